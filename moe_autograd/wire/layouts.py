"""What a state holds, without its values: so that each side knows whether it got the state that it asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import DTYPES, TORCH_DTYPES


def layout_of(state: Mapping[str, Tensor], left_out: Iterable[str] = ()) -> pb.StateLayout:
    """Return keys, dtypes and shapes of a `state_dict`, and keys of what else the module has in it."""
    return pb.StateLayout(
        entries=[
            pb.EntryLayout(key=key, dtype=DTYPES.get(value.dtype, pb.DTYPE_NONE), shape=value.shape)
            for key, value in state.items()
        ],
        left_out=left_out,
    )


def num_bytes(layout: pb.StateLayout) -> int:
    """Return how many bytes a state of this layout has.

    >>> import torch
    >>> num_bytes(layout_of({"weight": torch.ones(2, 3), "step": torch.ones(())}))
    28
    """
    return sum(math.prod(entry.shape) * _itemsize(entry) for entry in layout.entries)


def _itemsize(entry: pb.EntryLayout) -> int:
    """Return the bytes of an element; of a dtype that does not travel, those of the largest."""
    return TORCH_DTYPES.get(entry.dtype, torch.complex128).itemsize


def mismatch(layout: pb.StateLayout, state: Mapping[str, Tensor]) -> str | None:
    """Return what is wrong with `state` as the second half of an error, or None if it fits.

    >>> import torch
    >>> mismatch(layout_of({"weight": torch.ones(2, 3)}), {"weight": torch.ones(3, 2)})
    "'weight': expected (2, 3) of torch.float32, got (3, 2) of torch.float32"
    """
    expected = {entry.key: (tuple(entry.shape), TORCH_DTYPES.get(entry.dtype)) for entry in layout.entries}
    got = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    if expected.keys() != got.keys():
        missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        return f"expected keys {sorted(expected)}, got {sorted(got)} (missing={missing}, unknown={unknown})"
    for key, (shape, dtype) in expected.items():
        if got[key] != (shape, dtype):
            return f"{key!r}: expected {shape} of {dtype}, got {got[key][0]} of {got[key][1]}"
    return None
