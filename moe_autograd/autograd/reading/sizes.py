"""How large the tensors are that a call takes: what its work is told by (`work`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from moe_autograd.autograd.reading.known_arithmetic import METHODS
from moe_autograd.autograd.reading.readings import PLAIN


class Size(NamedTuple):
    """How large these tensors are.

    Args:
        num_rows: of all together.
        fewest_rows: of one of them.
        num_elements: of all together.
        width: of the widest.
        longest: how many rows one has in one direction at most.
        is_here: whether they are on the CPU.
    """

    num_rows: int
    fewest_rows: int
    num_elements: int
    width: int
    longest: int
    is_here: bool


def size_of(taken: Sequence[Any]) -> Size | None:
    """Return the size of what a call takes, in which each row of one tensor may meet each row of another.

    `None` if there is something else among it than tensors of torch's own class, on one kind of device, numbers, and
    tuples of these.
    """
    size: Size | None = None
    values = [*taken]
    for value in values:  # which grows
        kind = type(value)
        if kind is not Tensor and kind is not nn.Parameter:
            if kind is tuple:
                values += value
            elif kind not in PLAIN:
                return None
            continue
        if value.is_nested or ((own := value.__dict__) and not METHODS.isdisjoint(own)):
            return None
        shape = value.shape
        width = shape[-1] if shape else 1
        num_elements = value.numel()
        num_rows = num_elements // max(1, width)
        longest = max(shape[:-1]) if len(shape) > 2 else num_rows
        if size is None:
            size = Size(num_rows, num_rows, num_elements, width, longest, value.is_cpu)
        elif size.is_here != value.is_cpu:
            return None
        else:
            size = Size(
                size.num_rows + num_rows,
                min(size.fewest_rows, num_rows),
                size.num_elements + num_elements,
                max(size.width, width),
                max(size.longest, longest),
                size.is_here,
            )
    return size
