"""A save that finds no room fails clearly, leaves the old generation and no stray file."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import CheckpointError
from tests.support.checkpointing import BEGUN_AND_STOPPED, served, snapshot_of, train
from tests.support.servers import ROOT, WireClient


def test_with_a_file_size_limit_a_save_fails_clearly_and_the_old_generation_loads(tmp_path: Path) -> None:
    with served(tmp_path) as server, WireClient(server.address) as client:
        train(client, 1)
        expected = client.get_state()
    program = f"""
import resource, pathlib
from tests.support.checkpointing import served
from tests.support.servers import WireClient
import grpc
with_limit = served(pathlib.Path({str(tmp_path)!r}))
with_limit.start()
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
try:
    with WireClient(with_limit.address) as client:
        client.save()
except grpc.RpcError as error:
    print(error.details())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(sorted(p.name for p in pathlib.Path({str(tmp_path)!r}).iterdir()))
with_limit.stop()
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "expected a folder that takes generation-00000003, got 'File too large'" in ended.stdout, (
        ended.stderr
    )
    assert str([*BEGUN_AND_STOPPED, "lock"]) in ended.stdout
    with served(tmp_path) as server, WireClient(server.address) as client:
        torch.testing.assert_close(client.get_state(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fails_at", range(8))
def test_on_a_full_disk_the_old_generation_stays_and_no_stray_file(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the n-th write, flush or rename on."""
    num_done = 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal num_done
            num_done += 1
            if num_done > fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments)

        return call

    with CheckpointFolder(tmp_path) as folder:
        folder.write([snapshot_of("e", 1)])
        with monkeypatch.context() as full:
            for owner, name in ((os, "fsync"), (Path, "open"), (Path, "mkdir"), (Path, "rename")):
                full.setattr(owner, name, failing(getattr(owner, name)))
            with pytest.raises(CheckpointError, match="got 'No space left on device'"):
                folder.write([snapshot_of("e", 2)])
        newest = folder.read_newest()
        assert newest is not None
        saved = newest[1]["e"].tensors["weights.w"].item()
        assert saved == (2 if fails_at == 7 else 1), "only the last flush comes after the rename"
        assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"generation", "lock"}
        folder.write([snapshot_of("e", 3)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs a mounted tmpfs, for which one has to be root ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_disk_that_is_full_a_save_fails_clearly_and_one_with_room_again_succeeds(
    small_disk: Path,
) -> None:
    """A generation takes 1.6 MB: there is room for two, and with something else of one megabyte for one."""
    big = nn.Linear(1, 200_000)
    folder = small_disk / "saved"
    config = ServingConfig(checkpoint_dir=folder, keep_checkpoints=1)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def left() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    with (
        ExpertsServer({"big": big}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        assert client.save() == "generation-00000002"
        (small_disk / "filler").write_bytes(bytes(1 << 20))
        for attempt in range(3):
            with pytest.raises(grpc.RpcError) as refused:
                client.save()
            assert (
                "expected a folder that takes generation-00000003, got 'No space left on device'"
                in refused.value.details()
            )
            assert left() == ["generation-00000002", "lock"]
            assert client.forward("big", torch.ones(1, 1), call_id=attempt).code == "OK", "it serves on"
        with CheckpointFolder(_linked(folder, small_disk.parent / "read")) as opened:
            newest = opened.read_newest()
        assert newest is not None
        torch.testing.assert_close(newest[1]["big"].tensors["weights.weight"], big.weight.detach())
        (small_disk / "filler").unlink()
        assert client.save() == "generation-00000003"
        assert left() == ["generation-00000003", "lock"]


def _linked(folder: Path, beside: Path) -> Path:
    """Return a folder with links to the generations of one that a server still holds."""
    beside.mkdir()
    for generation in folder.glob("generation-*"):
        (beside / generation.name).symlink_to(generation)
    return beside
