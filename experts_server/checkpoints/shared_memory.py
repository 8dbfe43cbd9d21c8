"""Which tensors have memory of others: what is written to one changes the other, until a restart gives each its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Span(NamedTuple):
    """From where to where a tensor lies in the memory of its device, in bytes."""

    device: str
    start: int
    end: int
    place: int  # in the order of all
    name: str | None
    tensor: Tensor


def first_that_shares(
    tensors: Iterable[tuple[str | None, Tensor]], *, only_with_nameless: bool = False
) -> str | None:
    """Return the name of a tensor that has memory of one before it; `None` where there is none.

    Args:
        tensors: with their names; those without come first, and may share memory with each other.
        only_with_nameless: those with names may, too.
    """
    spans = [_span(place, *one) for place, one in enumerate(tensors) if _lies_in_memory(one[1])]
    found = (_that_overlaps(together, only_with_nameless) for together in _touching(spans))
    return next((name for name in found if name is not None), None)


def is_within_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor have memory of other ones, as those of one that is `expand`ed have."""
    if not _lies_in_memory(tensor):
        return False
    last = 0  # element of the dimensions before, whose steps are smaller
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            return step == 0 or _num_places(tensor) < tensor.numel()  # they may be interleaved
        last += (size - 1) * step
    return False


def _num_places(tensor: Tensor) -> int:
    """Return how many elements there are, each in memory of its own."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    is_taken = torch.zeros(last + 1, dtype=torch.bool, device="cpu")
    is_taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(is_taken.sum())


def _lies_in_memory(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_plain and not hasattr(tensor, "__tensor_flatten__") and tensor.numel() > 0  # of others made


def _span(place: int, name: str | None, tensor: Tensor) -> _Span:
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    start = tensor.data_ptr()
    return _Span(str(tensor.device), start, start + (sum(steps) + 1) * tensor.itemsize, place, name, tensor)


def _touching(spans: Iterable[_Span]) -> Iterator[Sequence[_Span]]:
    """Yield those together that lie within each other's bounds: mostly there are none."""
    together: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda one: one[:4]):
        if together and (span.device != together[0].device or span.start >= end):
            yield together
            together = []
        end = max(end, span.end) if together else span.end
        together.append(span)
    yield together


def _that_overlaps(together: Sequence[_Span], only_with_nameless: bool) -> str | None:
    """Return the name of one that has a byte of one before it: they may be interleaved, as columns are."""
    if len(together) < 2 or all(span.name is None for span in together):
        return None
    first = together[0].start
    unit = math.gcd(*(number for span in together for number in (span.tensor.itemsize, span.start - first)))
    is_taken = torch.zeros(
        (max(span.end for span in together) - first) // unit, dtype=torch.bool, device="cpu"
    )
    for span in sorted(together, key=lambda one: one.place):
        units = span.tensor.itemsize // unit
        dims = [
            (n, step * units) for n, step in zip(span.tensor.shape, span.tensor.stride(), strict=True) if step
        ]
        shape, strides = zip(*dims, (units, 1), strict=True)
        of_it = is_taken.as_strided(shape, strides, (span.start - first) // unit)
        if span.name is not None and of_it.any():
            return span.name
        if span.name is None or not only_with_nameless:
            of_it.fill_(True)
    return None
