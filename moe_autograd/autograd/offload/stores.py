"""Where what is not resident lives: host memory, or a folder.

Measured on two cores of an EPYC, parts of 33 MiB in the page cache: reading into a buffer that
is used again 6.4 GB/s, copying out of a memory map 2.7, writing over a file 5.6, writing a new one 0.9. Hence the
folder reads with `preadv`, writes over its own files, and a new file is made only where the old one belongs to a
checkpoint as well.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.folder_locks import FolderLock

# of a file of a `FolderStore`: the length of its header, `{"__metadata__":{"write":"`, and the mark
_BEGIN_BYTES = 67
SUFFIX = ".safetensors"  # of files of checkpoints


class Store(Protocol):
    """Where `OffloadedExperts` keep what is not in memory, in a place of your own: runs of bytes under names.

    A run is one expert's weights, its gradients or its optimizer's state, or what one micro-batch has saved. It is read
    only after it was written, and written over whenever it has changed. A name may come back with another length, after
    `remove`.

    Raises:
        Exception: whatever a method raises. Who waits for what could not be read gets it as it is, who waits for room
            that could not be made an `OSError` that it caused.

    Autograd: methods are called outside of the graph, and may run in the midst of a forward or backward.

    Threads: methods are called from several, never two at a time for one name. They must call nothing of the experts.
    """

    def write(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        """Keep a copy of a run.

        Args:
            name: of letters, digits, dots, `-` and `_`; a file may have it.
            layout: which tensors lie where in it; `layout.header()` makes a safetensors file of it.
            flat: (num_bytes,), uint8, on the experts' device. It may change meanwhile, and is written once more then;
                once this returns it may be another run's.
        """

    def read(self, name: str, flat: torch.Tensor) -> None:
        """Fill `flat`, (num_bytes,), uint8, on the experts' device, with what was written last."""

    def remove(self, name: str) -> None:
        """Forget a run; nothing, if there is no such name."""


class RamStore:
    """Host memory, pinned where there is a GPU to copy to."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def write(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        """See `Store`."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() != flat.numel():
            kept = self._kept[name] = _on_host(flat)
        kept.copy_(flat)

    def read(self, name: str, flat: torch.Tensor) -> None:
        """See `Store`."""
        flat.copy_(self._kept[name])

    def remove(self, name: str) -> None:
        """See `Store`."""
        self._kept.pop(name, None)


class FolderStore:
    """Files in the layout of safetensors, written over and over; they mean nothing to another process.

    A file that has a second name, in a checkpoint, is never written over: a new one takes its place. Each write puts a
    mark of its own into the header, by which an older copy of the file is known, whoever put that there and however.

    Args:
        folder: made if it is not there; what it has is removed.
        lock: what keeps others away, as long as this store is there.
    """

    def __init__(self, folder: Path, lock: FolderLock | None = None) -> None:
        self._folder, self.lock = folder, lock
        self._own, self._numbers = os.urandom(8).hex(), itertools.count()
        self._begins: dict[str, bytes] = {}  # of each file, up to the mark of what was written last
        self._linked: dict[str, bytes] = {}  # of files that are linked, and not taken
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.iterdir():
                stale.unlink()
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def path(self, name: str) -> Path:
        """Return where it lies."""
        return self._folder / name

    def write(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        """See `Store`."""
        path, header = self.path(name), layout.header({"write": f"{self._own}-{next(self._numbers):016x}"})
        if _is_ours_alone(path, len(header) + flat.numel()):
            _write(path, os.O_WRONLY, header, flat)
        else:
            _write_new(path, header, flat)
        self._begins[name] = header[:_BEGIN_BYTES]

    def link(self, path: Path) -> None:
        """Give another file, which will not be written over, a name here, until `take_link` or `drop_links`."""
        name = path.name.removesuffix(SUFFIX)
        with opened(path, os.O_RDONLY) as fd:
            begin = os.pread(fd, _BEGIN_BYTES, 0)
        self._linked_path(name).unlink(missing_ok=True)
        self._linked[name] = begin  # first: Ctrl-C may come just behind the next line
        os.link(path, self._linked_path(name))

    def take_link(self, name: str) -> None:
        """Have what was linked for a name in place of what is there; if that raises, this stays."""
        os.replace(self._linked_path(name), self.path(name))
        self._linked_path(name).unlink(missing_ok=True)  # it stays where both are one file
        self._begins[name] = self._linked.pop(name)

    def drop_links(self) -> None:
        """Forget what was linked and not taken."""
        while self._linked:
            self._linked_path(self._linked.popitem()[0]).unlink(missing_ok=True)

    def _linked_path(self, name: str) -> Path:
        return self.path(f"{name}.linked")

    def read(self, name: str, flat: torch.Tensor) -> None:
        """See `Store`."""
        path = self.path(name)
        host = flat if flat.device.type == "cpu" else _on_host(flat)
        with opened(path, os.O_RDONLY) as fd:
            found, size = os.pread(fd, _BEGIN_BYTES, 0), os.fstat(fd).st_size
            begin = 8 + int.from_bytes(found[:8], "little")
            if size != begin + host.numel():
                raise OSError(
                    f"{path}: expected {begin} + {host.numel()} bytes, got {size}: somebody else cut or replaced the "
                    "file. Go back to a checkpoint (restore())."
                )
            if found != self._begins[name]:
                raise OSError(
                    f"{path}: expected what was written last, got an older copy or another file: somebody else "
                    "replaced the file. Go back to a checkpoint (restore())."
                )
            rest, position = _bytes_of(host), begin
            while rest:
                count = os.preadv(fd, [rest], position)
                if count == 0:
                    raise OSError(f"{path}: expected {len(rest)} more bytes, got the end of the file.")
                rest, position = rest[count:], position + count
        if host is not flat:
            flat.copy_(host)

    def remove(self, name: str) -> None:
        """See `Store`."""
        self._begins.pop(name, None)
        self.path(name).unlink(missing_ok=True)


def _is_ours_alone(path: Path, num_bytes: int) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_nlink == 1 and status.st_size == num_bytes


def _write_new(path: Path, header: bytes, flat: torch.Tensor) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        _write(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, header, flat)
        os.replace(new, path)
    except BaseException:  # the disk may be full
        new.unlink(missing_ok=True)
        raise


def _write(path: Path, flags: int, header: bytes, flat: torch.Tensor) -> None:
    host = flat if flat.device.type == "cpu" else _on_host(flat).copy_(flat)
    with opened(path, flags) as fd:
        for rest in (memoryview(header), _bytes_of(host)):
            while rest:
                rest = rest[os.write(fd, rest) :]


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file; what the system says against an operation inside, which knows no name, gets that of the file."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        os.close(fd)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return as many bytes of host memory, pinned where a GPU copies to it; torch keeps that for whoever asks next."""
    return torch.empty(flat.numel(), dtype=torch.uint8, device="cpu", pin_memory=flat.is_cuda)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return a CPU tensor's memory, without numpy. It must not outlive the tensor."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
