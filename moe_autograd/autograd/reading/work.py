"""How much work a call of a module is, of which is known that it only computes (rules 1 to 3 of `in_turn`).

Work is counted in multiply-adds of the forward; one core makes 2^20 of them in about 50 us, and their backward in 100.
A forward that is read may also multiply rows with buffers, with rows, as attention does, or columns with columns; and
it may call a part again in each round of a loop. Convolutions multiply at each position, not for each row (`spatial`),
and some layers make more positions than they are given (`growing`): these are known where each is called once, as else
there are more with each call. Embeddings, attention and recurrent layers do other work (`composed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_autograd.autograd.reading.arithmetic import Reading, reading_of
from moe_autograd.autograd.reading.callees import Callee
from moe_autograd.autograd.reading.composed import (
    COMPOSED,
    PLAIN_DICTS,
    SHARE,
    draws_itself,
    num_parameters_of,
    rows_among,
)
from moe_autograd.autograd.reading.growing import GROWING, MOST, TRANSPOSED, growth_of
from moe_autograd.autograd.reading.sizes import Size
from moe_autograd.autograd.reading.spatial import SPATIAL, makes_no_more_positions, work_among

# Of more than that at least every other is to be another one: one may lead back to what it is a part of, and looking
# through them would not end.
MOST_PARTS = 1 << 9

DROPOUTS = frozenset(
    [nn.AlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout]
)
# Each with the number of its parameters; where one is missing, something else stands in its place.
ONLY_COMPUTE: Mapping[type[nn.Module], int] = {
    **dict.fromkeys([nn.Flatten, nn.Identity, nn.ModuleList, nn.Sequential, nn.Unflatten], 0),
    **dict.fromkeys([nn.GroupNorm, nn.LayerNorm, nn.Linear], 2),
    **dict.fromkeys([nn.PReLU, nn.RMSNorm], 1),
    **dict.fromkeys([nn.GRUCell, nn.LSTMCell, nn.RNNCell], 4),
    **dict.fromkeys([nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh], 0),
    **dict.fromkeys([nn.LeakyReLU, nn.LogSigmoid, nn.LogSoftmax, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU], 0),
    **dict.fromkeys([nn.SiLU, nn.Sigmoid, nn.Softmax, nn.Softplus, nn.Softsign, nn.Tanh], 0),
    **dict.fromkeys([nn.Hardshrink, nn.Softmax2d, nn.Softmin, nn.Softshrink, nn.Tanhshrink, nn.Threshold], 0),
    **dict.fromkeys(DROPOUTS, 0),
    **SPATIAL,
    **GROWING,
    **COMPOSED,
}

# Those which may return what they are given, or a view of it.
_PASS_ON = frozenset([*DROPOUTS, *(GROWING.keys() - TRANSPOSED), nn.Flatten, nn.Identity, nn.Unflatten])
_HOLD_OTHERS = frozenset([nn.ModuleList, nn.Sequential, *COMPOSED])
_GROW = frozenset([*GROWING, *_HOLD_OTHERS])  # or others in them
_TO_LOOK_AT = frozenset([*DROPOUTS, *SPATIAL, *GROWING, *COMPOSED])


class Work(NamedTuple):
    """How much work a call is.

    Args:
        least: at least.
        most: at most.
        draws: whether it may draw random numbers.
        is_read: whether that is known of all its parts; a class that says `only_computes` is not read.
    """

    least: int
    most: int
    draws: bool
    is_read: bool


def work_of(
    module: Any,
    size: Size,
    readings: dict[type, Reading | None],
    kinds: set[type[nn.Module]],
    callee: Callee | None = None,
) -> Work | None:
    """Return the work of a call that only computes (rules 1 and 2); `None` if it may do more than that.

    Of a function or a method `callee` says what it calls.

    What every part is asked is written out, hooks too: it is asked before each call, of all its parts, and is most of
    what a map in turn costs. Each class is looked at once for all calls: `readings` keeps what was found, and `kinds`
    those of torch's that the caller is to look at.
    """
    tally: _Tally | None = None  # layers alone, as most calls are, want none
    parts: list[Any] = [module]
    if callee is not None:
        tally, parts[:] = _Tally.of(callee), callee.parts
    num_parameters, most_parts = 0, MOST_PARTS
    in_place: list[Any] = []
    for part in parts:  # which grows
        kind = type(part)
        count = ONLY_COMPUTE.get(kind)
        if count is None:
            tally = tally or _Tally()
            if not tally.takes(part, readings):
                return None
        else:
            kinds.add(kind)
            if kind in _TO_LOOK_AT:
                tally = tally or _Tally()
                if (count := tally.count_of(part, count)) < 0:
                    return None
        own = part.__dict__
        if "forward" in own or "_call_impl" in own or "_modules" not in own:
            return None
        if own.get("inplace"):
            in_place.append(part)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return None
        if own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return None
        parameters = own["_parameters"]
        if count is not None and len(parameters) != count:
            return None
        if parameters:
            if type(parameters) not in PLAIN_DICTS:
                return None
            num_elements = 0
            for parameter in [*parameters.values()]:
                if type(parameter) is nn.Parameter:
                    num_elements += parameter.numel()
                elif parameter is not None:
                    return None
            num_parameters += num_elements
            if tally is not None and count is None:
                tally.num_elsewhere += num_elements
        if children := own["_modules"]:
            if type(children) not in PLAIN_DICTS:
                return None
            parts += children.values()
            if len(parts) > most_parts:
                most_parts = 2 * len({*map(id, parts)})
                if len(parts) > most_parts:
                    return None
    takes_single_parts = tally is not None and tally.takes_single_parts
    if in_place and (takes_single_parts or not _changes_its_own(parts, in_place)):
        return None
    if tally is None:
        widest = max(num_parameters, size.width)
        return Work(size.fewest_rows * widest, size.num_rows * widest, draws=False, is_read=True)
    return tally.work(parts, size, num_parameters)


@dataclasses.dataclass(slots=True)
class _Tally:
    """What the parts of a call come to, where some are more than plain layers of torch's.

    Attributes:
        num_elsewhere: numbers in weights of classes that are not torch's own, which may multiply by them or not.
        num_in_buffers: numbers in buffers of what is read.
        num_read: operations in what is read; all of it is run `num_times` at most.
        growth: how many times as many positions come out as went in.
        is_again: whether some part may be called more than once.
        takes_single_parts: whether some may be called by themselves, and not as their parent does.
        reshapes: whether rows and columns may change places.
        draws, is_read: those of `Work`.
        is_spatial, is_composed: whether some part is one of `SPATIAL` or `GROWING`, of `COMPOSED`.
    """

    num_elsewhere: int = 0
    num_in_buffers: int = 0
    num_read: int = 0
    num_times: int = 1
    growth: int = 1
    is_again: bool = False
    takes_single_parts: bool = False
    reshapes: bool = False
    draws: bool = False
    is_read: bool = True
    is_spatial: bool = False
    is_composed: bool = False

    @classmethod
    def of(cls, callee: Callee) -> _Tally:
        """Return that of a function or method, without its parts."""
        return cls(
            num_read=callee.num_read,
            num_times=callee.num_times,
            is_again=True,
            takes_single_parts=True,
            reshapes=callee.reshapes,
            draws=callee.draws,
        )

    def takes(self, part: Any, readings: dict[type, Reading | None]) -> bool:
        """Add a part of a class that is not torch's own; return whether it only computes."""
        kind = type(part)
        says_so = kind.__dict__.get("only_computes")
        if says_so is not None:
            self.takes_single_parts, self.is_again, self.is_read = True, True, False  # for all that is known
            return type(says_so) is FunctionType and isinstance(part, nn.Module) and bool(says_so(part))
        if kind not in readings:
            readings[kind] = reading_of(kind)
        reading = readings[kind]
        if reading is None or not reading.fits(part):
            return False
        self.draws = self.draws or reading.draws
        self.reshapes = self.reshapes or reading.reshapes
        self.num_read += 1
        if reading.looped or reading.listed:
            self.takes_single_parts = self.is_again = True
        for name in reading.again:
            again = type(part._modules.get(name))
            self.is_again = self.is_again or again not in ONLY_COMPUTE or again in _GROW
        if reading.has_loops:
            self.is_again = True
            num_rounds, num_uses = reading.rounds(part)
            self.num_read += num_rounds
            self.num_times *= max(1, num_uses)
        buffers = [*part._buffers.values()]  # at once, as other threads may add some
        self.num_in_buffers += sum(buffer.numel() for buffer in buffers if type(buffer) is Tensor)
        return all(map(_is_plain_buffer, buffers))

    def count_of(self, part: Any, count: int) -> int:
        """Add a part of torch's, one of `_TO_LOOK_AT`; return how many parameters it has, -1 if it may do more."""
        kind = type(part)
        if kind in DROPOUTS:
            self.draws = self.draws or part.training
        elif kind in COMPOSED:
            count, self.is_composed = num_parameters_of(part), True
            self.draws = self.draws or (count >= 0 and draws_itself(part))
        elif kind in SPATIAL:
            self.is_spatial = True
            if not makes_no_more_positions(part) or not all(map(_is_plain_buffer, [*part._buffers.values()])):
                return -1
        else:
            self.is_spatial, self.growth = True, min(MOST, self.growth * growth_of(part))
            if not self.growth:
                return -1
        return count

    def work(self, parts: Sequence[Any], size: Size, num_parameters: int) -> Work | None:
        """Return the work of them all, with so many parameters, with inputs of this size; `None` if nobody knows."""
        if self.growth > 1 and self.is_again:
            return None
        num_elsewhere, multiplied = self.num_elsewhere, 0
        if self.is_composed:
            if self.is_spatial or not size.is_here or (rows := rows_among(parts, size)) is None:
                return None
            size, num_tabled, multiplied = rows
            if not self.num_read:  # else what is read may multiply by them, too
                num_parameters -= num_tabled
            num_elsewhere = num_parameters
        if self.is_spatial:  # how often weights are multiplied is not told by the rows, nor how seldom
            size = size._replace(
                num_rows=size.num_rows * self.growth, num_elements=size.num_elements * self.growth
            )
            num_counted, multiplied = work_among(parts, size.num_elements)
            num_parameters -= num_counted
            num_elsewhere = num_parameters
        least = size.fewest_rows * max(num_parameters - num_elsewhere, 0 if self.num_read else size.width)
        if self.num_read:
            widest = max(size.num_elements, (size.width * self.growth) ** 2 if self.reshapes else 0)
            most = size.num_rows * max(num_parameters + self.num_in_buffers, widest * self.num_read)
        else:
            most = size.num_rows * max(num_parameters, size.width)
        most = (multiplied + most) * self.num_times
        if self.is_composed and torch.get_num_threads() > 1:
            most *= SHARE
        return Work(least, most, self.draws, self.is_read)


def _is_plain_buffer(buffer: Any) -> bool:
    return buffer is None or type(buffer) is Tensor


def _changes_its_own(parts: Sequence[Any], in_place: Sequence[Any]) -> bool:
    """Whether parts that change what they are given, such as `nn.ReLU(inplace=True)`, change what only the call has.

    That is what a part before made, one after the other in a `Sequential`: what is changed there is nobody else's.
    """
    changing = set(map(id, in_place))
    if id(parts[0]) in changing:
        return False
    for parent in parts:
        is_its_own = False
        for part in [*parent._modules.values()]:
            kind = type(part)
            if id(part) in changing:
                if type(parent) is not nn.Sequential or not is_its_own:
                    return False
            elif kind not in ONLY_COMPUTE or kind in _HOLD_OTHERS:
                is_its_own = False
            elif kind not in _PASS_ON:
                is_its_own = True
    return True
