"""Layers for images and signals: which only compute, and how much work their convolutions are.

A convolution multiplies all of its weights at each position of what it makes. These are no more than the call was
given, unless a layer pads by more than its kernel takes away again: such a one is not known. Others say how many more
they make (`growing`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from moe_autograd.autograd.reading.growing import TRANSPOSED, growth_of

CONVOLUTIONS = frozenset([nn.Conv1d, nn.Conv2d, nn.Conv3d])
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = frozenset([*_BATCH_NORMS, *_INSTANCE_NORMS])
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_POOLS = frozenset([*_AVERAGES, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d])
_AVERAGES_OF_ALL = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_MAXIMA_OF_ALL = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_POOLS_OF_ALL = frozenset([*_AVERAGES_OF_ALL, *_MAXIMA_OF_ALL])
# Each with the number of its parameters.
SPATIAL: Mapping[type, int] = {
    **dict.fromkeys(CONVOLUTIONS | _NORMS, 2),
    **dict.fromkeys(_POOLS | _POOLS_OF_ALL, 0),
}
_METHODS = frozenset(["_check_input_dim", "_conv_forward"])  # which their `forward` calls


def makes_no_more_positions(part: Any) -> bool:
    """Whether one of these makes at most as many positions as it is given, by methods of its class."""
    kind, own = type(part), part.__dict__
    if not own.keys().isdisjoint(_METHODS):
        return False
    if kind in _NORMS:
        return True
    if kind in _POOLS_OF_ALL:
        return all(size == 1 or size is None for size in _of_each(own.get("output_size")))
    try:
        return _is_made_up_for(own["padding"], own["kernel_size"], own.get("dilation", 1))
    except (KeyError, TypeError):  # it has none, or lists, which torch makes tuples of
        return False


@functools.lru_cache
def _is_made_up_for(padding: Any, kernel_size: Any, dilation: Any) -> bool:
    """Whether a kernel takes away as many positions as the padding adds, in each direction."""
    if padding == "same" or padding == "valid":
        return True
    each = [*zip(*map(_of_each, (padding, kernel_size, dilation)), strict=False)]
    if not all(type(number) is int for numbers in each for number in numbers):
        return False
    return all(2 * pad <= apart * (size - 1) for pad, size, apart in each)


def work_among(parts: Iterable[Any], num_elements: int) -> tuple[int, int]:
    """Return the weights of convolutions and linear layers among the parts, and the multiply-adds by them, at most.

    The first convolution is given all channels of a position in as many elements as the call is given, or as linear
    layers make of them; a linear layer is given all that the others make.

    Args:
        parts: of the call.
        num_elements: as many as it is given, times what layers make more of them (`growing`). A transposed convolution
            multiplies at the positions that it is given.
    """
    fewest_channels, most_channels, times = num_elements, 0, 1.0
    multiplying: list[tuple[Any, float]] = []
    for part in parts:
        kind = type(part)
        if kind in CONVOLUTIONS or kind in TRANSPOSED:
            fewest_channels = min(fewest_channels, part.in_channels)
            most_channels = max(most_channels, part.out_channels)
            multiplying.append((part, 0.0))
        elif kind is nn.Linear:
            grows = max(1.0, part.out_features / max(1, part.in_features))
            times *= grows
            multiplying.append((part, grows * max(1, part.in_features)))
    num_given = num_elements * times
    num_positions = num_given / max(1, fewest_channels)
    num_made = max(num_given, num_positions * most_channels)
    num_weights = work = 0
    for part, width in multiplying:
        own = sum([one.numel() for one in part._parameters.values() if one is not None])
        num_weights += own
        growth = growth_of(part) if type(part) in TRANSPOSED else 1
        work += math.ceil(num_made / width if width else num_positions / growth) * own
    return num_weights, work


def _of_each(given: Any) -> tuple[Any, ...]:
    """Return a layer's number for each direction, where it may have one for all."""
    return given if isinstance(given, tuple) else (given,) * 3
