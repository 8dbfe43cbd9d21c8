"""Checkpoints of a folder of offloaded experts: whole or not there, whenever the writer is killed.

    folder/
      resident-store/                 written over and over; means nothing to another process
      checkpoint-00000012/            never written again; one safetensors file for each part
        expert-00000.weights.safetensors
        expert-00000.optimizer.safetensors
        manifest.json                 the optimizers' options, and the caller's note

1. Every part's file is linked into `checkpoint-00000012.new/`: nothing is copied, and from then on the store makes
   a new file where it would write over one that belongs to a checkpoint too.
2. Every file is flushed to the disk, then the folder.
3. One rename makes the checkpoint; flushing the outer folder makes that last.
4. Older checkpoints go.

Killed before 3, the older checkpoint is the newest; after it, the new one is, and is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_autograd.autograd.offload.stores import SUFFIX, FolderStore, opened
from moe_autograd.errors import CheckpointError

_PREFIX = "checkpoint-"
_UNFINISHED = ".new"
_NAME = re.compile(_PREFIX + r"\d{8,}")
_MANIFEST = "manifest.json"


def write_checkpoint(
    folder: Path, store: FolderStore, names: Sequence[str], manifest: Mapping[str, Any]
) -> Path:
    """Make what the store has under these names a checkpoint, and remove the older ones; one caller at a time."""
    noted, older = json.dumps(manifest), _finished(folder)
    number = _number(older[-1]) + 1 if older else 0
    final = folder / f"{_PREFIX}{number:08}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name in names:
            os.link(store.path(name), unfinished / f"{name}{SUFFIX}")
        _write_text(unfinished / _MANIFEST, noted)
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        os.rename(unfinished, final)
    except BaseException:  # its links would have the store write every file anew
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _flush(folder)
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name.removesuffix(_UNFINISHED)) and _number(path) < number:
            shutil.rmtree(path)
    return final


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint and its manifest.

    Raises:
        CheckpointError: there is none, or its manifest cannot be read.
    """
    finished = _finished(folder)
    if not finished:
        raise CheckpointError(
            f"{folder}: expected a checkpoint, got none. Call checkpoint() before restore()."
        )
    try:
        manifest = json.loads((finished[-1] / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{finished[-1]}: expected a manifest, got {error}.") from error
    return finished[-1], manifest


def link_files(checkpoint: Path, store: FolderStore) -> None:
    """Give each part's file a name in the store: what can fail in a `restore` does before anything changes."""
    for path in checkpoint.glob(f"*{SUFFIX}"):
        store.link(path)


def _finished(folder: Path) -> list[Path]:
    """Return the checkpoints, the newest last; what is left of unfinished and half removed ones is not among them."""
    paths = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted(path for path in paths if (path / _MANIFEST).exists())


def _number(path: Path) -> int:
    return int(path.name.removesuffix(_UNFINISHED)[len(_PREFIX) :])


def _write_text(path: Path, text: str) -> None:
    """Write a new file, which what the system says against it names."""
    rest = text.encode()
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        while rest:
            rest = rest[os.write(fd, rest) :]


def _flush(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)
