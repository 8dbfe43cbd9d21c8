"""The units of a `parallel_apply`, single calls and groups: how they draw, what they hold, and what they share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from moe_autograd._random import running
from moe_autograd._streams import accelerator_in_use, use_here
from moe_autograd.autograd.closures import look_into
from moe_autograd.autograd.deferred import DeferringModules, may_defer
from moe_autograd.autograd.grouping import Unit, around
from moe_autograd.autograd.joined_modules import JoinedModules, run_module_calls
from moe_autograd.autograd.reaching import Held, holds_nothing
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.statistics import Turns


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
    held = [_held_by(unit, modules) for unit in units]
    if any(own.talkers or own.setting for own in held):
        max_concurrency, defer_weight_grads = 1, False
    turns = Turns(held, [unit.name for unit in units])
    defers = defer_weight_grads and how is None and may_defer()
    with contextlib.nullcontext() if max_concurrency == 1 else turns:
        returned = run_module_calls(
            turns.wrap(_callables(units, len(modules), how), range(len(units))),
            [unit.args for unit in units],
            [unit.kwargs for unit in units],
            names=[unit.name for unit in units],
            max_concurrency=max_concurrency,
            title="parallel_apply",
            cuts=[own.cuts for own in held],
            joined=DeferringModules if defers else JoinedModules,
            turns=None if how is None else turns,
            compiled=[one for own in held for one in own.compiled],
        )
    if accelerator_in_use() is not None:
        use_here(tree_leaves(returned))
    return returned


def _callables(units: Sequence[Unit], num_modules: int, how: Recompute | None) -> list[Callable[..., Any]]:
    calls = [
        unit.call if how is None or unit.is_group else functools.partial(how, unit.call) for unit in units
    ]
    if len(units) == num_modules:
        return calls
    return [  # single calls beside a group draw what they would draw without it
        call if unit.is_group else around(_in_place, unit.positions[0], call)
        for unit, call in zip(units, calls, strict=True)
    ]


def _in_place(position: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    running.index = position
    return call(*args, **kwargs)


def _held_by(unit: Unit, modules: Sequence[Any]) -> Held:
    if not unit.is_group:
        return look_into(unit.call, (*unit.args, *unit.kwargs.values()))
    # Of a group the modules with buffers that it calls here; what else it holds is its own business.
    members = [modules[i].stands_for for i in unit.positions if hasattr(type(modules[i]), "stands_for")]
    return holds_nothing()._replace(owners=[owner for one in members for owner in look_into(one).owners])
