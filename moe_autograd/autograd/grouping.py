"""Call modules together that would rather be called at once than one by one.

Sixty-four experts on one server are sixty-four modules, but one message there and back is twelve times cheaper than
sixty-four. A module says so by an attribute `call_group`: all modules of a map with the same group become one call
of the map, and the group decides how to make it. A module without the attribute, or with `None`, is its own call; so
is one with hooks of the user's, or a `__call__`, which a group would not run.

A callable that may fail in its backward, and can be done without, has a method `leaves_out(error) -> bool`: if it
returns `True`, nothing flows through that call, and the other calls' backwards count.

A group whose calls can fail one by one (`can_leave_out`) takes an `Attendance`: it leaves failing calls out instead
of raising, and stops waiting for the last ones when it is told to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from torch import nn

from moe_autograd._random import running
from moe_autograd.autograd.in_turn import is_watched
from moe_autograd.autograd.reading.known_arithmetic import is_torchs_own
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.runs import CallName, name_of_call, name_of_module
from moe_autograd.autograd.uncompiled import uncompiled


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """A call that its group left out.

    Args:
        index: of the call among those that were made together.
        expert: its name.
        phase: "forward" or "backward".
        error: why.
    """

    index: int
    expert: str
    phase: str
    error: Exception


class Roll(Protocol):
    """The calls of a group that are waited for, in one pass. Threads: any."""

    def settle(self, index: int, is_answered: bool) -> None:
        """Note that a call has answered, or has failed for good."""

    def is_needed(self, index: int) -> bool:
        """Tell whether a call whose server is away is worth waiting for: whether some token cannot do without it."""


class Attendance(Protocol):
    """Takes note of who answers and who fails, in a forward and in its backwards. Threads: any."""

    def append(self, failure: CallFailure, /) -> None:
        """Note a call that is left out. May raise: then the whole pass does, once all its calls have come to rest."""

    def waiting(self, phase: str, give_up: Callable[[str], None]) -> AbstractContextManager[Roll]:
        """Enter this for as long as the calls of a group are waited for.

        Args:
            phase: "forward" or "backward".
            give_up: called with a reason when calls that have no answer yet are to be cancelled; from any thread.

        Returns:
            Yields the roll, which is to be told what becomes of each call.
        """


Failures: TypeAlias = list[CallFailure] | Attendance  # a list only records failures, and waits for every call


class CallGroup(Protocol):
    """What the `call_group` of a module has to be; compared by identity."""

    def call_together(
        self, modules: Sequence[Any], inputs: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> Sequence[Any]:
        """Return what each module returns for its inputs, in order; gradients flow as through the modules.

        Raises:
            Exception: of the lowest failing call, with a message that names the module.

        Threads: called on any one thread; several maps may call it at once.
        """


class LenientCallGroup(CallGroup, Protocol):
    """A group whose calls can fail one by one."""

    can_leave_out: bool

    def call_together(
        self,
        modules: Sequence[Any],
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        *,
        failures: Failures | None = None,
    ) -> Sequence[Any]:
        """As `CallGroup`; but with `failures`, calls that fail are noted there and left out.

        In the forward their result is `None`; in a backward, which may be on another thread, their inputs get no
        gradient.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One call of the map: a module, or a group of them."""

    positions: Sequence[int]  # which of the user's modules it stands for
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    is_group: bool

    def run(self) -> Any:
        """Make the call."""
        return self.call(*self.args, **self.kwargs)


def has_group(module: Any) -> bool:
    """Whether a module, or what stands for one, says which group makes its calls; that may be `None`."""
    return hasattr(type(module), "call_group") or "call_group" in getattr(module, "__dict__", ())


def group_of(module: Any) -> Any:
    """Return the group that makes a module's calls; `None`: the module itself is called.

    A group calls no module, so hooks on it would not run, nor what a user has put in the place of `nn.Module.__call__`.
    What has a module's attributes and stands for it, as `torch.compile` returns, is none of the group's.
    """
    if not has_group(module):
        return None
    group: CallGroup | None = module.call_group
    if group is None or not isinstance(module, nn.Module):
        return group
    return group if _is_called_by_torch(module) and not is_watched(module) else None


def _is_called_by_torch(module: nn.Module) -> bool:
    kind = type(module)
    return (
        is_torchs_own(kind.__call__) and is_torchs_own(kind._call_impl) and "_call_impl" not in vars(module)
    )


@uncompiled
def call_alone(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a module's group make one call of it."""
    return module.call_group.call_together([module], [args], [kwargs])[0]


def group_calls(
    modules: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    names: Sequence[str] | None,
) -> list[Unit]:
    """Return the calls that a map makes for these modules, in the order of their first module.

    Args:
        modules: the user's.
        args: for each its positional arguments.
        kwargs: for each its keyword arguments.
        names: for each what errors and profiles call it; `None` names it by its place and kind.
    """
    groups: dict[int, tuple[CallGroup | None, list[int]]] = {}
    for i, module in enumerate(modules):
        group = group_of(module)
        key = -1 - i if group is None else id(group)
        groups.setdefault(key, (group, []))[1].append(i)
    units = []
    for group, positions in groups.values():
        if group is None:
            (i,) = positions
            name = name_of_call(i, modules[i], names)
            units.append(Unit(positions, modules[i], args[i], kwargs[i], name, is_group=False))
        else:
            units.append(_together(group, [modules[i] for i in positions], args, kwargs, positions))
    return units


def _together(
    group: CallGroup,
    modules: list[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    positions: list[int],
) -> Unit:
    kind = f"{len(positions)} modules called together" if len(positions) > 1 else name_of_module(modules[0])
    name = CallName(f"call {positions[0]} ({kind})")
    how: Callable[..., Any] = _call_group
    own: tuple[Any, ...] = ([args[i] for i in positions], [kwargs[i] for i in positions])
    if all(len(args[i]) == 1 and not kwargs[i] for i in positions):  # mostly; and flat is a fifth of the cost
        how, own = _call_group_with_one_argument, tuple([args[i][0] for i in positions])
    call = functools.partial(how, group, modules, positions)
    return Unit(positions, call, own, {}, name, is_group=True)


def _call_group_with_one_argument(
    group: CallGroup, modules: list[Any], positions: list[int], *arguments: Any
) -> list[Any]:
    return _call_group(
        group, modules, positions, [(argument,) for argument in arguments], [{}] * len(modules)
    )


def _call_group(
    group: CallGroup, modules: list[Any], positions: list[int], inputs: list[Any], kwargs: list[Any]
) -> list[Any]:
    running.places = positions
    try:
        returned = list(group.call_together(modules, inputs, kwargs))
    finally:
        running.places = None
    if len(returned) != len(modules):
        raise RuntimeError(
            f"{type(group).__name__}.call_together: expected {len(modules)} results, one for each module, got "
            f"{len(returned)}."
        )
    return returned


def around(wrapper: Callable[..., Any], first: object, call: Any) -> Callable[..., Any]:
    """Return a callable that calls `wrapper(first, call, ...)`, and has the `leaves_out` of `call`."""
    return functools.update_wrapper(functools.partial(wrapper, first, call), call, ("leaves_out",), ())


def ungroup(units: Sequence[Unit], returned: Sequence[Any], num_modules: int) -> list[Any]:
    """Return what each of the user's modules returned."""
    results: list[Any] = [None] * num_modules
    for unit, value in zip(units, returned, strict=True):
        for position, own in zip(unit.positions, value if unit.is_group else (value,), strict=True):
            results[position] = own
    return results


def recomputed_in_group(module: Any, how: Recompute) -> Any:
    """Return the version of a group's module that is recomputed; itself, if it has none or is of no group."""
    make = None if group_of(module) is None else getattr(module, "recomputed", None)
    return module if make is None else make(how)
