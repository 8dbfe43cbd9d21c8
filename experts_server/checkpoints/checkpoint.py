"""Checkpoints on disk: whole generations beside each other, of which the newest whole one counts.

    checkpoint_dir/
      generation-00000007/          what a server would load
        manifest.json               every file with its length and checksum; itself checksummed
        ffn.0.safetensors           weights, optimizer state, gathered gradients; plain values as metadata
        ...
      generation-00000006/          the one before; the last `keep` stay, and damaged ones between them
      writing-00000008/             one that was not finished: removed at the next save or start
      lock                          held by the server that writes here

Rules, from which it follows that at every moment there is a whole generation to load (once one was written):

1. A generation is written under another name; its files and the folder are flushed to the disk; then one rename
   makes it count, and the rename is flushed.
2. Older ones are removed after that, and only by being renamed out of the way first.
3. What is read is believed only if lengths and checksums are those of the manifest. Nothing is unpickled.
4. What is damaged is passed over. What may be whole, and cannot be read here and now, is not: the server would go on
   from an older state, and soon remove the newer one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import xxhash

from experts_server.checkpoints.earlier import FORMAT, READ_FORMATS
from experts_server.checkpoints.expert_file import read_snapshot, write_flushed, write_snapshot
from experts_server.checkpoints.snapshot import Snapshot
from experts_server.configuration.names import check_name
from experts_server.locks import take_folder
from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.offload.stores import opened
from moe_autograd.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# what reading a damaged file may raise
_DAMAGES = (OSError, ValueError, KeyError, TypeError, RecursionError)
# the other errors of a system (permissions, descriptors, a network) say nothing of what is on the disk
_OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN)
_GENERATION = re.compile(r"generation-(\d{8,})")
_LEFTOVER = re.compile(r"(?:writing|removing)-(\d{8,})")


class _Damaged(Exception):
    """A generation is torn or damaged; the one before may stand in for it."""


class CheckpointFolder:
    """The generations in one folder; opening it takes its lock.

    Args:
        folder: made if it is not there.
        keep: how many generations stay, of those that no read has found damaged.

    Raises:
        CheckpointError: the folder cannot be used, or another server uses it.

    Threads: one at a time.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep
        self._damaged: set[int] = set()
        self._lock = take_folder("checkpoint_dir", folder, "lock", CheckpointError)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _take_again_if_replaced(self) -> None:
        """Lock what is in the place of the folder that was opened, unless another server has, which began there."""
        if not self._lock.is_in_place():
            lock = take_folder("checkpoint_dir", self.folder, "lock", CheckpointError)
            self._lock.release()
            self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- writing

    def write(self, snapshots: Iterable[Snapshot]) -> str:
        """Write a generation and make it the current one; return its name.

        Raises:
            CheckpointError: it could not be written; what was there before is untouched.
        """
        number = max(self.generations(), default=0) + 1
        self._take_again_if_replaced()
        writing, name = self.folder / f"writing-{number:08}", _name_of(number)
        try:
            self.remove_leftovers()
            writing.mkdir()
            files = {
                snapshot.plain["expert"]: write_snapshot(
                    _file_of(writing, snapshot.plain["expert"]), snapshot
                )
                for snapshot in snapshots
            }
            manifest = {"format": FORMAT, "generation": number, "experts": files}
            write_flushed(writing / MANIFEST, [_sealed(manifest)])
            _flush_folder(writing)
            writing.rename(self.folder / name)
            _flush_folder(self.folder)
            self._damaged.discard(number)  # that one was moved away
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {str(self.folder)!r}: expected a folder that takes {name}, got "
                f"{error.strerror!r}. The one before is untouched; make room, or let it be written, and save again."
            ) from error
        except MemoryError as error:
            raise CheckpointError(
                f"checkpoint_dir {str(self.folder)!r}: expected memory to write {name}, got none. "
                "The one before is untouched; free some, and save again."
            ) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)  # nothing is left of one that was not finished
        self._remove_old()
        return name

    def remove_leftovers(self) -> None:
        """Remove what an interrupted save or removal has left; what others have named alike is not ours.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        next_one = max(self.generations(), default=0) + 1
        for found in self._found(_LEFTOVER):
            if int(found[1]) <= next_one:
                path = self.folder / found[0]
                logger.info("removing %s, which an interrupted save or removal has left", path)
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # it was a folder, and is gone
                    path.unlink()

    def _remove_old(self) -> None:
        there = [number for number in self.generations() if (self.folder / _name_of(number)).is_dir()]
        whole = [number for number in there if number not in self._damaged]
        oldest = min(whole[-self.keep :], default=0)
        for number in [number for number in there if number < oldest]:
            removing = self.folder / f"removing-{number:08}"
            with contextlib.suppress(OSError):  # it is tried again after the next save
                (self.folder / _name_of(number)).rename(removing)
                shutil.rmtree(removing)

    # ---- reading

    def generations(self) -> list[int]:
        """Return the numbers of the generations that are there, whole or not.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return sorted(int(found[1]) for found in self._found(_GENERATION))

    def _found(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {str(self.folder)!r}: expected the folder that was opened, got {error.strerror!r}. "
                "Put it back and save again."
            ) from error
        return [*filter(None, map(pattern.fullmatch, names))]

    def read_newest_of(self, expert: str) -> tuple[str, Snapshot] | None:
        """Return the newest whole state of one expert, and the generation that holds it; `None` if there is none.

        Raises:
            CheckpointError: one cannot be read.
        """
        for number in reversed(self.generations()):
            folder = self.folder / _name_of(number)
            with contextlib.suppress(_Damaged), _reading(folder):
                entry = _read_manifest(folder / MANIFEST)["experts"][expert]
                return folder.name, read_snapshot(_file_of(folder, expert), entry)
        return None

    def read_newest(self) -> tuple[str, dict[str, Snapshot]] | None:
        """Return the newest whole generation, its name and the experts' snapshots; `None` if nothing was saved yet.

        Raises:
            CheckpointError: there are generations, and none is whole; or one cannot be read, though it may be whole.
        """
        numbers = self.generations()
        for number in reversed(numbers):
            name = _name_of(number)
            try:
                return name, _read_generation(self.folder / name)
            except _Damaged as error:
                self._damaged.add(number)
                logger.error("%s. Falling back to the generation before.", error)
        if numbers:
            raise CheckpointError(
                f"checkpoint_dir {str(self.folder)!r}: expected a whole generation, got {len(numbers)} damaged. "
                "The log says how; restore the folder from a backup, or start with an empty one."
            )
        return None


def _name_of(generation: int) -> str:
    return f"generation-{generation:08}"


def _file_of(folder: Path, expert: str) -> Path:
    return folder / f"{check_name(expert)}.safetensors"


def _flush_folder(folder: Path) -> None:
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    body = json.dumps(manifest, indent=1)
    return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(body.encode()), "manifest": body}).encode()


def _read_generation(folder: Path) -> dict[str, Snapshot]:
    with _reading(folder):
        manifest = _read_manifest(folder / MANIFEST)
        return {
            name: read_snapshot(_file_of(folder, name), entry) for name, entry in manifest["experts"].items()
        }


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Tell what is damaged (`_Damaged`) from what only cannot be read (`CheckpointError`)."""
    try:
        yield
    except MemoryError as error:
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: expected memory to read it, got none. It may be whole: free some, and try "
            "again."
        ) from error
    except _DAMAGES as error:
        if isinstance(error, OSError) and error.errno not in _OF_DAMAGE:
            raise CheckpointError(
                f"checkpoint {str(folder)!r}: expected files that can be read, got {error.strerror!r} "
                f"({Path(error.filename or folder).name}). They may be whole: put that right and start again, or move "
                "this generation away to go on from the one before."
            ) from error
        raise _Damaged(
            f"checkpoint {str(folder)!r}: expected a whole generation, got {type(error).__name__}: {error}"
        ) from error


def _read_manifest(path: Path) -> Any:
    sealed = json.loads(path.read_bytes())
    body = sealed["manifest"]
    if xxhash.xxh3_64_hexdigest(body.encode()) != sealed["xxh3_64"]:
        raise ValueError(f"the checksum of {path.name} is not that of its content")
    manifest = json.loads(body)
    if manifest["format"] not in READ_FORMATS:
        raise CheckpointError(
            f"checkpoint {str(path.parent)!r}: expected format {FORMAT}, got {manifest['format']}: another version of "
            "moe-autograd wrote it. Start that one, or move this generation away to go on from the one before."
        )
    return manifest
