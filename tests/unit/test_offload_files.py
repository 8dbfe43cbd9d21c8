"""Many tensors as one run of bytes, and the folder or memory it is kept in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.flat import Layout, tensors_in
from moe_autograd.autograd.offload.stores import FolderStore, RamStore, opened
from moe_autograd.errors import CheckpointError
from tests.support.offloading import OPTIMIZERS, ffn
from tests.support.scarce import no_thread_to_give
from tests.support.subprocesses import assert_prints

MIXED = {
    "weight": torch.randn(4, 16),
    "half": torch.randn(3).to(torch.bfloat16),
    "step": torch.tensor(7.0),
    "mask": torch.tensor([True, False, True]),
    "wide": torch.randn(5, dtype=torch.complex64),
    "none": torch.empty(0, 3),
    "count": torch.tensor(5),
}


def test_views_give_back_what_was_laid_out() -> None:
    layout = Layout.of(MIXED)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(MIXED[name])
    for name, view in layout.views(flat).items():
        assert view.dtype == MIXED[name].dtype
        assert torch.equal(view, MIXED[name])


def test_files_are_safetensors_and_any_reader_finds_the_tensors(tmp_path: Path) -> None:
    layout = Layout.of(MIXED)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(MIXED[name])
    store = FolderStore(tmp_path)
    store.write("expert", layout, flat)
    loaded = safetensors.torch.load_file(store.path("expert"))
    assert loaded.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert torch.equal(loaded[name], tensor)
    assert Layout.read(store.path("expert"))[0] == layout
    back = torch.empty_like(flat)
    store.read("expert", back)
    assert torch.equal(back, flat)


def test_a_dtype_that_safetensors_has_not_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"expected a dtype of safetensors, got torch\.complex128 \(name='w'\)"
    ):
        Layout.of({"w": torch.empty(1, dtype=torch.complex128)})


@pytest.mark.parametrize("damage", ["cut", "grown", "no header", "lying header", "lying offsets", "missing"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    store, layout = FolderStore(tmp_path), Layout.of({"x": torch.ones(100)})
    store.write("x", layout, torch.zeros(400, dtype=torch.uint8))
    path = store.path("x")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut": content[:-1],
                "grown": content + b"x",
                "no header": b"\xff" * 64,
                "lying header": (2**62).to_bytes(8, "little") + content[8:],
                "lying offsets": content.replace(b"[0,400]", b"[4,404]"),
            }[damage]
        )
    with pytest.raises(CheckpointError, match=r"x: expected"):
        Layout.read(path)


def test_a_file_that_belongs_to_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    store, layout = FolderStore(tmp_path / "store"), Layout.of({"x": torch.ones(3)})
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    (tmp_path / "saved").hardlink_to(store.path("x"))
    store.write("x", layout, torch.ones(12, dtype=torch.uint8))
    assert not (tmp_path / "saved").read_bytes().endswith(b"\1" * 12)
    assert store.path("x").read_bytes().endswith(b"\1" * 12)
    inode = store.path("x").stat().st_ino
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    assert store.path("x").stat().st_ino == inode, "its own file it writes over"


@pytest.mark.parametrize("size", [0, 7, 12, 20, 128, 132, 139, 141])
def test_a_file_of_another_size_raises_instead_of_giving_shifted_bytes(tmp_path: Path, size: int) -> None:
    """The bytes had been looked for from the end of the file."""
    store, layout = FolderStore(tmp_path / "store"), Layout.of({"x": torch.ones(3)})
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    assert store.path("x").stat().st_size == 128 + 12
    os.truncate(store.path("x"), size)
    with pytest.raises(OSError, match=rf"store.x: expected \d+ \+ 12 bytes, got {size}: .* Go back to"):
        store.read("x", torch.empty(12, dtype=torch.uint8))


def test_a_file_that_is_linked_twice_leaves_no_other_name_of_it(tmp_path: Path) -> None:
    """To rename one name of a file to another of the same does nothing, and leaves both."""
    store, layout = FolderStore(tmp_path / "store"), Layout.of({"x": torch.ones(3)})
    store.write("x", layout, torch.ones(12, dtype=torch.uint8))
    (tmp_path / "x.safetensors").hardlink_to(store.path("x"))
    for _ in range(2):
        store.link(tmp_path / "x.safetensors")
        store.take_link("x")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["x"]
    assert store.path("x").stat().st_nlink == 2
    back = torch.empty(12, dtype=torch.uint8)
    store.read("x", back)
    assert back.tolist() == [1] * 12


@pytest.mark.parametrize("how", ["replaced", "in place", "after restore"])
def test_an_older_copy_of_a_file_raises_instead_of_giving_older_numbers(tmp_path: Path, how: str) -> None:
    """As when the disk's snapshot was rolled back, or a backup was restored, while the experts train."""
    store, layout = FolderStore(tmp_path / "store"), Layout.of({"x": torch.ones(3)})
    path, back, last = store.path("x"), torch.empty(12, dtype=torch.uint8), 2
    for number in range(3):
        store.write("x", layout, torch.full((12,), number, dtype=torch.uint8))
        shutil.copy2(path, tmp_path / str(number))
    if how == "after restore":
        last = 0
        store.link((tmp_path / "0").rename(tmp_path / "x.safetensors"))
        store.take_link("x")
        shutil.copy2(tmp_path / "x.safetensors", tmp_path / "0")
    store.read("x", back)
    assert back.tolist() == [last] * 12
    if how != "in place":
        path.unlink()
    shutil.copy2(tmp_path / "1", path)
    with pytest.raises(
        OSError, match=r"store.x: expected what was written last, got an older copy .* Go back"
    ):
        store.read("x", back)
    shutil.copy2(tmp_path / str(last), path)
    store.read("x", back)
    assert back.tolist() == [last] * 12, "another copy of what was written last is as good"


def test_a_file_of_another_store_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Such as the folder's copy from before a restart, whose writes were counted alike."""
    layout = Layout.of({"x": torch.ones(3)})
    first, second = FolderStore(tmp_path / "first"), FolderStore(tmp_path / "second")
    for store in (first, second):
        store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    shutil.copy(first.path("x"), second.path("x"))
    with pytest.raises(OSError, match="expected what was written last"):
        second.read("x", torch.empty(12, dtype=torch.uint8))


@pytest.mark.parametrize("is_folder", [False, True], ids=["ram", "folder"])
def test_places_of_activations_take_no_more_than_these_once_did(is_folder: bool, tmp_path: Path) -> None:
    """Each number of rows had kept places of its own, for good."""
    ram = RamStore()
    experts = OffloadedExperts(
        (ffn() for _ in range(3)),
        OPTIMIZERS["sgd"],
        max_resident_bytes=16_000,
        store=tmp_path if is_folder else ram,
        num_microbatches=2,
    )

    def kept_bytes() -> int:
        if is_folder:
            return sum(file.stat().st_size for file in tmp_path.rglob("activations*"))
        return sum(kept.nbytes for name, kept in ram._kept.items() if name.startswith("activations"))

    with experts:
        known, most = experts.residency.known_bytes, 0
        for num_rows in range(40, 80, 2):
            loss = sum(expert(torch.ones(num_rows, 8)).sum() for expert in experts)
            most = max(most, experts.residency.known_bytes - known)
            experts.residency.flush()
            assert 0 < kept_bytes() < 1.5 * most
            loss.backward()


FILES_ARE_TOO_LARGE = """
import errno, os, resource, signal, sys
import torch
from torch import nn
from torch import nn
from moe_autograd.autograd.offload import OffloadedExperts

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = os.path.realpath({folder!r})
experts = OffloadedExperts(
    (nn.Linear(32, 32) for _ in range(4)), torch.optim.Adam, max_resident_bytes=26_000, store=folder
)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    sum(expert(torch.ones(1, 32)) for expert in experts).sum().backward()
    experts.step()
except OSError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert error.errno == errno.EFBIG, error
    assert "expected the store to take a part, got File too large" in str(error), error
    print(error.filename.startswith(folder), "expert-0" in error.filename)
    sys.stdout.flush()
    os._exit(0)  # what could not be written stays in memory
"""


def test_a_file_that_the_system_refuses_is_named_and_its_errno_is_kept(tmp_path: Path) -> None:
    assert_prints(FILES_ARE_TOO_LARGE.format(folder=str(tmp_path)), "True True")


def test_what_the_system_says_against_a_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as raised, opened(tmp_path, os.O_RDONLY) as fd:
        os.read(fd, 1)
    assert raised.value.filename == str(tmp_path)


DTYPES = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)


def of_each_dtype() -> dict[str, torch.Tensor]:
    raw = torch.arange(64, dtype=torch.uint8) % 2  # as bools, too
    tensors = {}
    for dtype in DTYPES:
        with contextlib.suppress(RuntimeError, TypeError):  # of some torch makes none of bytes
            tensors[str(dtype)] = raw.view(dtype).unflatten(0, (2, -1))
    return tensors


def is_of_safetensors(tensor: torch.Tensor) -> bool:
    try:
        safetensors.torch.save({"w": tensor})
    except KeyError:
        return False
    return True


def header_of(file: bytes) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return entries


def test_each_dtype_of_safetensors_is_written_as_safetensors_does_and_read_back(tmp_path: Path) -> None:
    path, names = tmp_path / "w.safetensors", set()
    for name, tensor in of_each_dtype().items():
        if not is_of_safetensors(tensor):
            with pytest.raises(TypeError, match="expected a dtype of safetensors"):
                Layout.of({"w": tensor})
            continue
        layout = Layout.of({"w": tensor})
        theirs = safetensors.torch.save({"w": tensor})
        assert header_of(layout.header()) == header_of(theirs)
        path.write_bytes(theirs)
        assert Layout.read(path)[0] == layout
        back = tensors_in(path)["w"]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
        names.add(name)
    assert {"torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", "torch.uint64"} <= names


def test_half_a_pair_is_refused_as_safetensors_does(tmp_path: Path) -> None:
    one = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0]
    with pytest.raises(TypeError, match=r"expected torch\.float4_e2m1fn_x2 with a dimension.*got shape \(\)"):
        Layout.of({"w": one})
    path = tmp_path / "w.safetensors"
    header = json.dumps({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(CheckpointError, match=r"expected pairs of values, got shape \[2, 3\] \(name='w'\)"):
        Layout.read(path)


def test_a_dtype_of_a_file_that_torch_has_not_is_told(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(CheckpointError, match=r"w\.safetensors: expected a dtype of torch, got 'F6_E2M3'"):
        Layout.read(path)


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("scales", torch.arange(4, dtype=torch.uint8).view(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.get_buffer("scales").view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_experts_with_narrow_buffers_are_put_out_and_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    def step() -> None:
        torch.stack([expert(torch.ones(2, 4)).sum() for expert in experts]).sum().backward()
        experts.step()

    experts = OffloadedExperts(
        [Scaled(dtype) for _ in range(3)], OPTIMIZERS["sgd"], max_resident_bytes=300, store=tmp_path
    )
    step()
    experts.checkpoint()
    step()
    experts.restore()
    for index in range(3):
        state = experts.state_dict(index)
        assert state["scales"].dtype is dtype
        assert state["scales"].view(torch.uint8).tolist() == [0, 1, 2, 3]


def test_a_folder_is_free_again_where_no_thread_was_to_be_had(tmp_path: Path) -> None:
    """The traceback kept it locked."""
    with no_thread_to_give(), pytest.raises(RuntimeError, match="can't start new thread") as kept:
        OffloadedExperts([nn.Linear(2, 2)], OPTIMIZERS["sgd"], max_resident_bytes=1000, store=tmp_path)
    OffloadedExperts([nn.Linear(2, 2)], OPTIMIZERS["sgd"], max_resident_bytes=1000, store=tmp_path).close()
    assert kept.tb is not None


def test_a_folder_stays_where_it_is_though_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = [nn.Linear(4, 4) for _ in range(3)]
    with OffloadedExperts(modules, OPTIMIZERS["sgd"], max_resident_bytes=250, store="experts") as experts:
        before = experts.state_dict(0)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir("other")
        for expert in experts:
            expert(torch.ones(1, 4)).sum().backward()
        assert experts.checkpoint("here") == tmp_path / "experts/checkpoint-00000000"
        experts.step()
        assert experts.restore() == "here"
        torch.testing.assert_close(experts.state_dict(0), before, rtol=0, atol=0)
