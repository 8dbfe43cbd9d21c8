"""Layers that only compute and may make more than they are given, and how many times as much that is at most.

Such as those that pad, scale up, or transpose a convolution: after them convolutions multiply at more positions. Their
numbers tell how much more, for one call of each (`work_of` sees to that). How large its input is, where it lies behind
others, is not known: so a layer counts as if it were given a single position in each direction, where padding is most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

TRANSPOSED = frozenset([nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
_CONSTANT = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_ZERO = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_REPLICATION = (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d)
_REFLECTION = (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d)
_CIRCULAR = (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
_PADS = frozenset([*_CONSTANT, *_ZERO, *_REPLICATION, *_REFLECTION, *_CIRCULAR])
_PADS_BY_ITSELF = frozenset([*_REFLECTION, *_CIRCULAR])  # by no more positions at an end than there are
# Of what a layer scales up, by its mode; else three.
_DIRECTIONS: Mapping[str, int] = {"linear": 1, "bilinear": 2, "bicubic": 2}

MOST = 1 << 64
# Kernels are summed by one core, whatever the intra-op threads: on two idle cores four calls that sum 2^23 elements
# each took a seventh to two fifths longer in turn than on threads.
ONE_CORE = 1 << 4
_METHODS = frozenset(["_check_input_dim", "_output_padding"])  # which their `forward` calls


def growth_of(part: Any) -> int:
    """Return how many times as many positions, or elements, one of these makes at most; 0 if that is not known."""
    own = part.__dict__
    if not own.keys().isdisjoint(_METHODS):
        return 0
    try:
        return min(MOST, math.ceil(math.prod([max(1.0, one) for one in _RULES[type(part)](own)])))
    except (KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError):
        return 0  # it has none, or others than torch takes


def _of_pad(own: Mapping[str, Any], most: float = math.inf) -> Iterable[float]:
    ends = [max(0.0, end) for end in _numbers(own["padding"], 0)]
    return [min(most, 1 + begin + end) for begin, end in zip(ends[::2], ends[1::2], strict=True)]


def _of_transposed(own: Mapping[str, Any]) -> Iterable[float]:
    """Of n positions it makes (n - 1) * stride + one kernel; a few more if it is told so by `output_size`."""
    names = ("stride", "padding", "kernel_size", "dilation", "output_padding")
    each = zip(*[_numbers(own[name], 3) for name in names], strict=True)
    return [max(stride, apart * (size - 1) + 1 + more - 2 * pad) for stride, pad, size, apart, more in each]


def _of_upsample(own: Mapping[str, Any], num_directions: int = 3) -> Iterable[float]:
    wanted = own["scale_factor"] if own["size"] is None else own["size"]
    return _numbers(wanted, _DIRECTIONS.get(own["mode"], num_directions))


def _of_unfold(own: Mapping[str, Any]) -> Iterable[float]:
    """Each position of what is padded begins a kernel, unless one has no room behind it, and that is written out."""
    names = ("padding", "kernel_size", "dilation")
    each = zip(*[_numbers(own[name], 2) for name in names], strict=True)
    return [size * max(1.0, 1 + 2 * pad - apart * (size - 1)) for pad, size, apart in each]


def _of_fold(own: Mapping[str, Any]) -> Iterable[float]:
    """Of one position, of which all of a kernel are channels, it makes one kernel, and perhaps a gap behind it."""
    each = zip(*[_numbers(own[name], 2) for name in ("stride", "kernel_size", "dilation")], strict=True)
    return [ONE_CORE, *[stride + apart * (size - 1) for stride, size, apart in each]]


def _of_shuffle(own: Mapping[str, Any]) -> Iterable[float]:
    """Of elements it makes as many, but more positions of fewer channels."""
    return _numbers(own["upscale_factor"], 2)


def _of_channels(own: Mapping[str, Any]) -> Iterable[float]:
    """It makes as many, but takes an average over so many channels for each."""
    return _numbers(own["size"], 1)


def _numbers(given: Any, num_directions: int) -> tuple[float, ...]:
    """Return a layer's number for each direction, where it may have one for all."""
    numbers = given if type(given) is tuple else (given,) * num_directions
    if not all(type(one) is int or type(one) is float for one in numbers):
        raise TypeError(f"expected numbers, got {numbers}")
    return numbers


_RULES: Mapping[type, Callable[[Mapping[str, Any]], Iterable[float]]] = {
    **dict.fromkeys(TRANSPOSED, _of_transposed),
    **dict.fromkeys(_PADS, _of_pad),
    **dict.fromkeys(_PADS_BY_ITSELF, functools.partial(_of_pad, most=3)),
    **dict.fromkeys([nn.ChannelShuffle, nn.PixelUnshuffle], lambda own: ()),
    nn.Fold: _of_fold,
    nn.LocalResponseNorm: _of_channels,
    nn.PixelShuffle: _of_shuffle,
    nn.Unfold: _of_unfold,
    nn.Upsample: _of_upsample,
    nn.UpsamplingBilinear2d: functools.partial(_of_upsample, num_directions=2),
    nn.UpsamplingNearest2d: functools.partial(_of_upsample, num_directions=2),
}
# Each with the number of its parameters.
GROWING: Mapping[type, int] = {kind: 2 if kind in TRANSPOSED else 0 for kind in _RULES}
