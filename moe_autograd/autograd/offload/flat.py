"""Many tensors as one run of bytes, so that they move, are stored and are counted as one thing.

The run is the data section of a safetensors file, without gaps, as that format wants it: put its header in front,
and any reader of safetensors finds the tensors.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_autograd._computed_once import computed_once
from moe_autograd.autograd.grad_dtypes import grad_dtype_of
from moe_autograd.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",  # two values a byte, of which torch makes one; see `Field.shape_in_file`
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PAIRS = torch.float4_e2m1fn_x2
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Field:
    """Where one tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        """Its shape as safetensors counts: by values, also where torch has two as one."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype is _PAIRS else self.shape

    @classmethod
    def read(cls, name: str, entry: Mapping[str, Any]) -> Field:
        """Return what an entry of a header tells; raises `CheckpointError` for a dtype that torch has not."""
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"expected a dtype of torch, got {entry['dtype']!r} (name={name!r})")
        field = cls(_DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"][0])
        if field.dtype is not _PAIRS:
            return field
        field = dataclasses.replace(field, shape=(*field.shape[:-1], field.shape[-1] // 2))
        if list(field.shape_in_file) != entry["shape"]:
            raise CheckpointError(f"expected pairs of values, got shape {entry['shape']} (name={name!r})")
        return field


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a run of bytes."""

    fields: Mapping[str, Field]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Lay out tensors: each begins at a multiple of the largest power of two, up to 64, that divides its length.

        So its bytes can be viewed as whatever they can be elsewhere, such as pairs of numbers as complex ones.
        """

        def roughness(name: str) -> int:
            num_bytes = tensors[name].nbytes
            return -min(num_bytes & -num_bytes or _ALIGNMENT, _ALIGNMENT)

        for name, tensor in tensors.items():
            _check_bytes(name, tensor)
        fields, start = {}, 0
        for name in sorted(tensors, key=roughness):
            fields[name] = Field(tensors[name].dtype, tuple(tensors[name].shape), start)
            start += fields[name].num_bytes
        return cls(fields, start)

    @classmethod
    def of_gradients(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Lay out the gradients of those of the tensors that require one."""
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        return cls.of(
            {
                name: torch.empty(tensor.shape, dtype=grad_dtype_of(tensor) or tensor.dtype, device="meta")
                for name, tensor in trained.items()
            }
        )

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that lie in `flat`, `(num_bytes,)` of uint8, as views of it."""
        return {
            name: flat[field.start : field.start + field.num_bytes].view(field.dtype).view(field.shape)
            for name, field in self.fields.items()
        }

    def fixed_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return them so that torch refuses to let one that is resized in place grow into those behind it.

        On a GPU they may grow: `record_stream` passes memory by that is cut out of other memory.
        """
        if not flat.is_cpu:
            return self.views(flat)
        memory, first = flat.untyped_storage(), flat.storage_offset()
        views = {}
        for name, field in self.fields.items():
            start = first + field.start
            own_memory = memory[start : start + field.num_bytes]
            views[name] = flat.new_empty(0, dtype=field.dtype).set_(own_memory).view(field.shape)
        return views

    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return what the tensors are, wherever they lie."""
        return {name: (field.dtype, field.shape) for name, field in self.fields.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return of which dtype the tensors are."""
        return {name: field.dtype for name, field in self.fields.items()}

    def name_at(self, position: int) -> str:
        """Return whose byte lies there."""
        starts, names = self._starts
        return names[bisect.bisect_right(starts, position) - 1]

    @computed_once
    def _starts(self) -> tuple[list[int], list[str]]:
        in_order = sorted((field.start, name) for name, field in self.fields.items() if field.num_bytes)
        return [start for start, _ in in_order], [name for _, name in in_order]

    def header(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return what a safetensors file has in front of the bytes; `metadata` is what it tells beside the tensors."""
        entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        entries |= {
            name: {
                "dtype": _NAMES[field.dtype],
                "shape": field.shape_in_file,
                "data_offsets": [field.start, field.start + field.num_bytes],
            }
            for name, field in self.fields.items()
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def read(cls, path: Path) -> tuple[Layout, int]:
        """Return the layout of a safetensors file and where its bytes begin.

        Raises:
            CheckpointError: it is no whole safetensors file.
        """
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(min(length, 2**27)))
            fields = {
                name: Field.read(name, entry) for name, entry in entries.items() if name != "__metadata__"
            }
            in_order = sorted(fields.values(), key=lambda field: (field.start, field.num_bytes))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}.") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path}: expected a safetensors file, got one without a readable header."
            ) from error
        num_bytes = 0
        for field in in_order:
            if field.start != num_bytes:
                raise CheckpointError(
                    f"{path}: expected a tensor at byte {num_bytes}, got the next at {field.start}."
                )
            num_bytes += field.num_bytes
        if path.stat().st_size != 8 + length + num_bytes:
            raise CheckpointError(
                f"{path}: expected {8 + length + num_bytes} bytes, as its header says, got {path.stat().st_size}."
            )
        return cls(fields, num_bytes), 8 + length


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, in memory of their own."""
    layout, begin = Layout.read(path)
    return layout.views(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8, offset=begin))


def _check_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raise `TypeError` for a tensor that is no run of bytes, or that safetensors has no word for."""
    if is_made_of_others(tensor):
        raise TypeError(
            f"Layout: expected a tensor with memory of its own, got {type(tensor).__name__}, which is made of other "
            f"tensors (name={name!r}). Keep the expert in memory, or make it without them."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"Layout: expected a dense tensor, got one of {tensor.layout} (name={name!r}). Keep the expert in memory, "
            "or make it dense, or register its indices and values and make it of them in the call."
        )
    if tensor.dtype not in _NAMES:
        raise TypeError(
            f"Layout: expected a dtype of safetensors, got {tensor.dtype} (name={name!r}). Keep the expert in memory, "
            f"or make it of others: {', '.join(str(dtype)[6:] for dtype in _NAMES)}."
        )
    if tensor.dtype is _PAIRS and not tensor.dim():
        raise TypeError(
            f"Layout: expected {_PAIRS} with a dimension, as safetensors counts its values by twos, got shape () "
            f"(name={name!r}). Keep the expert in memory, or give it one."
        )


class Place(NamedTuple):
    """Where a tensor lies that begins in a run of bytes, whatever it is a view of."""

    start: int  # in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, flat: torch.Tensor) -> Place:
        """Return the place of a tensor in `flat`."""
        start, shape, strides = tensor.data_ptr() - flat.data_ptr(), tuple(tensor.shape), tensor.stride()
        return cls(start, tensor.dtype, shape, strides, tensor.is_conj(), tensor.is_neg())

    def find(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what lies there in `flat`, as a view of it."""
        itemsize = self.dtype.itemsize
        typed = flat[self.start % itemsize :]
        typed = typed[: typed.numel() // itemsize * itemsize].view(self.dtype)
        found = typed.as_strided(self.shape, self.strides, self.start // itemsize)
        found = found.conj() if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own, as quantized ones and `DTensor`."""
    return hasattr(tensor, "__tensor_flatten__")


def lies_in(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    """Whether a tensor begins in `flat`; one that is not strided is a thing of its own, and does not."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.numel()


def kind_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return a tensor's shape and dtype."""
    return tuple(tensor.shape), tensor.dtype


def is_same(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a tensor is what a view of a part's buffer is."""
    return tensor.layout is torch.strided and Place.of(tensor, view) == Place.of(view, view)
