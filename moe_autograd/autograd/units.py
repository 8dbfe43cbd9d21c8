"""The calls of a map, of single modules, groups or functions: how they draw, what they hold, and what they share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from moe_autograd._random import running
from moe_autograd._streams import accelerator_in_use, use_here
from moe_autograd.autograd.contents.closures import look_into
from moe_autograd.autograd.contents.in_modules import NOT_MADE_YET
from moe_autograd.autograd.contents.in_objects import (
    HOLDS_NOTHING,
    tensors_in_objects,
    with_tensors_in_objects,
)
from moe_autograd.autograd.contents.leaves import LookedThrough, leaves_of
from moe_autograd.autograd.contents.named import functions_within, globals_of
from moe_autograd.autograd.contents.ranks import are_for_one_call, has_other_ranks
from moe_autograd.autograd.contents.reaching import Held, Known, is_generator
from moe_autograd.autograd.contents.telling import CHANGING, SETTING, SURE, TALKING
from moe_autograd.autograd.deferred import DeferringModules, may_defer
from moe_autograd.autograd.entry import flatten
from moe_autograd.autograd.grouping import Unit, around
from moe_autograd.autograd.modules.joined_modules import JoinedModules, run_module_calls
from moe_autograd.autograd.modules.module_calls import Planned
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.runs import Map, is_under_mode_of_torch
from moe_autograd.autograd.turns import Turns, may_be_changed, shared_among

_HOLD_NOTHING = frozenset([Tensor, nn.Parameter, *HOLDS_NOTHING])  # arguments, mostly


def run_units(
    units: Sequence[Unit],
    modules: Sequence[Callable[..., Any]],
    max_concurrency: int | None,
    how: Recompute | None,
    defer_weight_grads: bool,
) -> list[Any]:
    """Call every unit, forwards and backwards concurrently; return what each returned.

    Args:
        units: at least one.
        modules: all that they stand for.
        max_concurrency: at most so many units at once; `None` leaves the number to the library.
        how: their forwards run again in the backward; not those of groups, which do so by themselves.
        defer_weight_grads: whether weight gradients may be computed later, where that can be.
    """
    known: Known = {}
    leaves: LookedThrough = {}
    held = [_held_by(unit, modules, known, leaves) for unit in units]
    flat = [flatten(unit.args, unit.kwargs, leaves) for unit in units]
    others = leaves_of([values for values, spec in flat if spec is not None], leaves)  # than plain tensors
    leaves.clear()  # calls may change their containers
    if are_for_one_call(others) or any(own.talks or own.sets for own in held):
        max_concurrency, defer_weight_grads = 1, False
    if accelerator_in_use() is not None and any(map(_is_jagged, others)):
        max_concurrency = 1  # the engine cannot hand their gradients from one stream to another
    side_by_side = max_concurrency != 1 and not is_under_mode_of_torch()
    the_map = Map("parallel_apply", [unit.name for unit in units], max_concurrency, kind=_kind_of(units))
    turns = Turns(held, the_map.names, side_by_side=side_by_side)
    the_map = the_map._replace(shares_weights=turns.has_shared)
    called = turns.wrap(_callables(units, len(modules), how))
    defers = defer_weight_grads and how is None and may_defer()
    with turns:
        returned = run_module_calls(
            [
                Planned(call, own_flat, own.cuts)
                for call, own_flat, own in zip(called, flat, held, strict=True)
            ],
            the_map,
            joined=DeferringModules if defers else JoinedModules,
            turns=turns,
            recomputes=how is not None,
            compiled=[one for own in held for one in own.compiled],
        )
    if accelerator_in_use() is not None:
        use_here(with_tensors_in_objects(returned))
    return returned


def _is_jagged(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.jagged


def _callables(units: Sequence[Unit], num_modules: int, how: Recompute | None) -> list[Callable[..., Any]]:
    calls = [
        unit.call if how is None or unit.is_group else functools.partial(how, unit.call) for unit in units
    ]
    if len(units) == num_modules:
        return calls
    return [  # single calls beside a group draw what they would draw without it
        call if unit.is_group else around(_drawing_as, unit.positions[0], call)
        for unit, call in zip(units, calls, strict=True)
    ]


def _kind_of(units: Sequence[Unit]) -> object:
    """Return the class of the modules that are called, or the function, if all units are calls of one."""
    kinds = [type(unit.call) if isinstance(unit.call, nn.Module) else unit.call for unit in units]
    is_one = all(kind is kinds[0] for kind in kinds) and isinstance(kinds[0], (type, FunctionType))
    return kinds[0] if is_one else None


def _drawing_as(position: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    running.index = position
    return call(*args, **kwargs)


def _held_by(unit: Unit, modules: Sequence[Any], known: Known, leaves: LookedThrough) -> Held:
    if not unit.is_group:
        held = look_into(unit.call, (*unit.args, *unit.kwargs.values()), known, leaves)
        held.note(CHANGING & SURE & unit.kwargs.keys())
        return held
    # Of a group the modules with buffers that it calls here, and generators; what else it holds is its own business.
    members = [modules[i].stands_for for i in unit.positions if hasattr(type(modules[i]), "stands_for")]
    looks = [look_into(one) for one in members]
    parts = [part for own in looks for part in own.parts if part._buffers or NOT_MADE_YET in vars(part)]
    return Held(parts=parts, generators=[one for own in looks for one in own.generators])


def must_be_in_turn(func: type[Function], args_per_call: Sequence[Sequence[Any]]) -> bool:
    """Whether calls of an autograd function may not run side by side: for an argument, or a reason of `named`."""
    taken = [*itertools.chain.from_iterable(args_per_call)]
    if not _HOLD_NOTHING.issuperset(map(type, taken)):
        generators = list(filter(is_generator, taken))
        if len({*map(id, generators)}) < len(generators):
            return True
        once = {id(one): one for one in taken}.values()  # mostly all calls take the same vocabulary
        held = [tensor for _, tensor in tensors_in_objects(once)]
        if are_for_one_call([*taken, *held]):
            return True
    telling = globals_of(func, func.forward).telling
    if not telling:  # mostly
        return False
    if telling & SETTING or (telling & TALKING and has_other_ranks()):
        return True
    own = [
        one
        for kind in func.__mro__[: -len(Function.__mro__)]
        for held in vars(kind).values()
        for one in functions_within(held)
    ]
    shared = shared_among([look_into(own, args).parts for args in args_per_call])
    return any(map(may_be_changed, itertools.chain(*shared)))
