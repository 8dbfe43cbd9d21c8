"""One expert's state as a file of safetensors, written and read tensor by tensor.

So neither a save nor a start holds the file in memory beside the tensors; and where there is no memory left it fails,
where safetensors, which makes the whole file in memory, ends the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from experts_server.checkpoints.earlier import as_of_now
from experts_server.checkpoints.snapshot import Snapshot, tells_of_no_memory
from moe_autograd.autograd.offload.flat import Field, Layout
from moe_autograd.errors import CheckpointError

PLAIN_KEY = "experts_server"
_PIECE_BYTES = 1 << 20


def write_snapshot(path: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write a file that is not there yet, and flush it to the disk; return its length and checksum.

    Raises:
        CheckpointError: safetensors has no word for one of the tensors.
        OSError, MemoryError: the system does not take it.
    """
    try:
        layout = Layout.of(snapshot.tensors)
    except TypeError as error:
        what = str(error).partition(". ")[0]
        raise CheckpointError(
            f"checkpoint of expert {snapshot.plain['expert']!r}: expected tensors that safetensors can hold, got one "
            f"that it cannot ({what}). Use another dtype, or host it without checkpoint_dir."
        ) from error
    header = layout.header({PLAIN_KEY: json.dumps(snapshot.plain)})
    parts = [memoryview(header), *(_bytes_of(snapshot.tensors[name]) for name in layout.fields)]
    write_flushed(path, parts)
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    num_bytes = len(header) + layout.num_bytes
    return {"file": path.name, "num_bytes": num_bytes, "xxh3_64": checksum.hexdigest()}


def write_flushed(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that is not there yet, of parts one after another, and flush it to the disk."""
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def read_snapshot(path: Path, entry: Mapping[str, Any]) -> Snapshot:
    """Read a file, if its length and checksum are those that `write_snapshot` returned.

    Raises:
        ValueError: they are not.
        OSError, MemoryError: the system does not give it.
    """
    with path.open("rb") as file:
        _check(file, path, entry)
        layout, begin = Layout.read(path)
        file.seek(8)
        header = json.loads(file.read(begin - 8))
        tensors = {}
        for name, field in layout.fields.items():
            tensors[name] = _empty(field)
            file.seek(begin + field.start)
            if file.readinto(_bytes_of(tensors[name])) != field.num_bytes:
                raise ValueError(f"{path.name} has changed while it was read")
    return Snapshot(tensors, as_of_now(json.loads(header["__metadata__"][PLAIN_KEY])))


def _empty(field: Field) -> Tensor:
    try:
        return torch.empty(field.shape, dtype=field.dtype)
    except RuntimeError as error:
        if tells_of_no_memory(error):
            raise MemoryError(str(error)) from error
        raise


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data


def _check(file: BinaryIO, path: Path, entry: Mapping[str, Any]) -> None:
    checksum, num_bytes, piece = xxhash.xxh3_64(), 0, memoryview(bytearray(_PIECE_BYTES))
    while num_read := file.readinto(piece):  # type: ignore[attr-defined]
        checksum.update(piece[:num_read])
        num_bytes += num_read
    if num_bytes != entry["num_bytes"] or checksum.hexdigest() != entry["xxh3_64"]:
        raise ValueError(f"{path.name} has {num_bytes} bytes that are not those of the manifest")
