"""A damaged generation is passed over, and that is said; one that may be whole, and cannot be read, is not."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts_server.checkpoints.checkpoint import CheckpointFolder, _sealed
from experts_server.checkpoints.earlier import FORMAT
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.errors import CheckpointError
from tests.support.checkpointing import served, snapshot_of


def flip_a_byte(folder: Path) -> None:
    file = folder / "ffn.0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_format(folder: Path) -> None:
    file = folder / "manifest.json"
    content, told = file.read_bytes(), rb"\"format\": %d"
    assert told % FORMAT in content
    file.write_bytes(content.replace(told % FORMAT, told % (FORMAT + 1)))


def lead_to_the_generation_before(folder: Path) -> None:
    """By a manifest that is right in all but the name."""
    before = folder.parent / "generation-00000001"
    entry = json.loads(json.loads((before / "manifest.json").read_bytes())["manifest"])["experts"]["ffn.0"]
    manifest = {"format": FORMAT, "generation": 2, "experts": {f"../{before.name}/ffn.0": entry}}
    (folder / "manifest.json").write_bytes(_sealed(manifest))


def replace_by(replace: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "glu.0.safetensors"
        file.unlink()
        replace(file)

    return damage


def replace_all_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped byte": flip_a_byte,
    "truncated file": lambda folder: (folder / "glu.0.safetensors").write_bytes(b"short"),
    "missing file": lambda folder: (folder / "glu.0.safetensors").unlink(),
    "changed manifest": change_the_format,
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "foreign manifest": lambda folder: (folder / "manifest.json").write_bytes(
        b'{"manifest": "{}", "xxh3_64": ""}'
    ),
    "manifest that says nothing": lambda folder: (folder / "manifest.json").write_bytes(b"{}"),
    "manifest that leaves its folder": lead_to_the_generation_before,
    "list as manifest": lambda folder: (folder / "manifest.json").write_bytes(b"[]"),
    "lists without end": lambda folder: (folder / "manifest.json").write_bytes(b"[" * 100_000),
    "unreadable sector": replace_by(lambda file: file.symlink_to("/proc/self/mem")),  # EIO at its first page
    "folder for a file": replace_by(Path.mkdir),
    "file for the folder": replace_all_by_a_file,
}
OF_ANOTHER = ("flipped byte",)  # file than that of `glu.0`, which stays whole


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_passed_over_and_that_is_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointFolder(tmp_path) as folder:
        for number in (1, 2):
            folder.write([snapshot_of(name, number) for name in ("ffn.0", "glu.0")])
        DAMAGES[damage](tmp_path / "generation-00000002")
        with caplog.at_level(logging.ERROR):
            name, snapshots = folder.read_newest() or ("", {})
        of_one = folder.read_newest_of("glu.0")
    assert name == "generation-00000001"
    assert snapshots["ffn.0"].tensors["weights.w"].item() == 1
    assert "generation-00000002" in caplog.text
    assert "Falling back" in caplog.text
    if damage not in OF_ANOTHER:
        assert of_one is not None
        assert (of_one[0], of_one[1].tensors["weights.w"].item()) == (name, 1)


def test_a_file_that_is_cut_while_it_is_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing would be whatever was in memory."""
    read = Layout.read

    def read_and_cut(path: Path) -> tuple[Layout, int]:
        found = read(path)
        if path.parent.name == "generation-00000002":
            os.truncate(path, path.stat().st_size - 1)
        return found

    with CheckpointFolder(tmp_path) as folder:
        for number in (1, 2):
            folder.write([snapshot_of("ffn.0", number)])
        monkeypatch.setattr(Layout, "read", read_and_cut)
        assert (folder.read_newest() or ("",))[0] == "generation-00000001"


def write_another_format(difference: int, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(_sealed({"format": FORMAT + difference, "experts": {}}))


def lead_in_circles(folder: Path) -> None:
    """Stands for all that says nothing of what is on the disk, as missing permissions do to all but root."""
    (folder / "glu.0.safetensors").unlink()
    (folder / "glu.0.safetensors").symlink_to("glu.0.safetensors")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        *(
            (
                functools.partial(write_another_format, n),
                f"expected format {FORMAT}, got {FORMAT + n}: another version",
            )
            for n in (-2, 1)
        ),
        (lead_in_circles, r"expected files that can be read, got 'Too many levels .*' \(glu.0.safetensors\)"),
    ],
)
def test_a_generation_that_may_be_whole_and_cannot_be_read_is_not_passed_over(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    """After an upgrade, or as another user, a server would go on from an older state and remove the newer one."""
    with CheckpointFolder(tmp_path) as folder:
        for number in (1, 2):
            folder.write([snapshot_of(name, number) for name in ("ffn.0", "glu.0")])
        spoil(tmp_path / "generation-00000002")
        with pytest.raises(CheckpointError, match=text) as refused:
            folder.read_newest()
        assert "move this generation away" in str(refused.value)
        with pytest.raises(CheckpointError, match=text):
            folder.read_newest_of("glu.0")


def test_if_no_generation_is_whole_the_server_refuses_to_start_afresh(tmp_path: Path) -> None:
    with served(tmp_path):
        pass
    for generation in tmp_path.glob("generation-*"):
        flip_a_byte(generation)
    with pytest.raises(CheckpointError, match="expected a whole generation, got 2 damaged"):
        served(tmp_path).start()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("generation-*"))


def test_what_was_found_damaged_takes_no_place_of_a_whole_generation(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=2) as folder:
        for number in (1, 2, 3):
            folder.write([snapshot_of("ffn.0", number)])
        flip_a_byte(tmp_path / "generation-00000003")
        assert (folder.read_newest() or ("",))[0] == "generation-00000002"
        folder.write([snapshot_of("ffn.0", 4)])
        assert names_in(tmp_path) == [f"generation-0000000{number}" for number in (2, 3, 4)]
        folder.write([snapshot_of("ffn.0", 5)])
        assert names_in(tmp_path) == [f"generation-0000000{number}" for number in (4, 5)]


def test_a_generation_in_the_place_of_a_damaged_one_that_was_moved_away_is_whole(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=1) as folder:
        for number in (1, 2):
            folder.write([snapshot_of("ffn.0", number)])
        flip_a_byte(tmp_path / "generation-00000002")
        with pytest.raises(CheckpointError, match="got 1 damaged"):
            folder.read_newest()
        (tmp_path / "generation-00000002").rename(tmp_path / "damaged")
        for number in (1, 2):
            folder.write([snapshot_of("ffn.0", number)])
        assert names_in(tmp_path) == ["generation-00000002"]


def test_a_file_that_is_named_as_a_generation_takes_no_place_of_one_and_stays(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=2) as folder:
        (tmp_path / "generation-00000099").write_text("mine")
        for number in (100, 101, 102):
            assert folder.write([snapshot_of("ffn.0", number)]) == f"generation-00000{number}"
        (tmp_path / "generation-00000200").write_text("mine")
        folder.write([snapshot_of("ffn.0", 201)])
        assert names_in(tmp_path) == [f"generation-00000{number}" for number in ("099", 102, 200, 201)]


def test_a_removal_that_is_interrupted_leaves_no_torn_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the place of a whole one."""

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            next(path.iterdir()).unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with CheckpointFolder(tmp_path, keep=1) as folder:
        folder.write([snapshot_of("ffn.0", 1)])
        with monkeypatch.context() as torn:
            torn.setattr(shutil, "rmtree", interrupted)
            folder.write([snapshot_of("ffn.0", 2)])
        assert names_in(tmp_path) == ["generation-00000002"]
        folder.write([snapshot_of("ffn.0", 3)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation-00000003", "lock"]
