"""Run the calls of a map at once: each with its own random numbers, on its own streams, under its own name.

Forwards, backwards and the weight gradients that come later all run through `run_calls`; what they have in common is
the `Map`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from moe_autograd._contexts import contextmanager
from moe_autograd._habits import habit_of
from moe_autograd._interrupts import unwinding
from moe_autograd._random import CallSeeds, own_streams, running
from moe_autograd._streams import Lanes, lanes_from_here
from moe_autograd._workers import run_all
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.this_backward import with_its_schedule
from moe_autograd.timeline import add_span, is_recording


class Map(NamedTuple):
    """What the passes of a map have in common.

    Args:
        title: how errors and profiles call it.
        names: of its calls, likewise.
        max_concurrency: how many may run at once; `None` leaves it to the library.
        even_shares: whether each has the smallest share of intra-op threads, however many run beside it.
        kind: what is called, where the next map of it will do much the same (`_habits`).
        num_left_out: how many calls there are besides, in a pass of some; an error says "call 1 of 2" all the same.
        numbers: of its calls among all those of the map, by which each finds its streams again in every pass; `None`
            where they are 0, 1, ...
        shares_weights: whether calls may use a weight that others use.
    """

    title: str
    names: Sequence[str]
    max_concurrency: int | None
    even_shares: bool = False
    kind: object = None
    num_left_out: int = 0
    numbers: Sequence[int] | None = None
    shares_weights: bool = False

    def of_some(self, places: Collection[int]) -> Map:
        """Return what a pass of those calls has in common that have these places."""
        return self._replace(
            names=[self.names[i] for i in places],
            num_left_out=self.num_left_out + len(self.names) - len(places),
            numbers=[self.number_of(i) for i in places],
        )

    def has_lanes(self) -> bool:
        """Whether its calls have streams of their own, where an accelerator is in use."""
        num_calls = len(self.names) + self.num_left_out
        return num_calls > 1 and self.max_concurrency != 1 and not is_under_mode_of_torch()

    def number_of(self, index: int) -> int:
        """Return the number of a call of this pass among all calls of the map."""
        return index if self.numbers is None else self.numbers[index]


@unwinding
def run_calls(
    call: Callable[[int], None],
    the_map: Map,
    phase: str,
    *,
    seeds: CallSeeds | None = None,
    is_backward: bool = False,
    computes_elsewhere: bool = False,
) -> None:
    """Run `call(0)`, `call(1)`, ... at once, each with its own random numbers and on its own streams.

    Args:
        call: takes the index.
        the_map: whose calls these are.
        phase: how errors and profiles call this pass.
        seeds: of their random numbers; `None` takes them from the calling thread's stream.
        is_backward: whether the last call begins first, as those of a loop's backward do.
        computes_elsewhere: whether calls take tensors of an accelerator (`_streams`, Rule 8).

    Raises:
        BaseException: of the lowest failing call, with a note that names it, after all others have come to rest.
        UnsupportedTransformError: while a graph is captured on an accelerator.
    """
    names = the_map.names
    if not names:
        return
    if is_under_mode_of_torch():
        the_map = the_map._replace(max_concurrency=1)
    lanes = lanes_from_here(shares_weights=the_map.shares_weights) if the_map.has_lanes() else None
    seeds = CallSeeds() if seeds is None else seeds
    scope = functools.partial(own_streams, seeds)

    def run(index: int) -> None:
        running.index = index
        call(index)  # noqa: F821  # it is there until all calls are at rest

    chosen: Callable[[int], None] = run
    if lanes is not None:
        chosen = _on_lanes(chosen, lanes, the_map)
    if torch.autograd.profiler._is_profiler_enabled:
        chosen = _profiled(chosen, names, f"{the_map.title}, {phase}")
    if is_recording():
        chosen = _on_timeline(chosen, names, "backward" if is_backward else "forward")
    run_chosen = functools.partial(
        run_all,
        chosen,
        range(len(names) - 1, -1, -1) if is_backward else range(len(names)),
        max_concurrency=the_map.max_concurrency,
        scope=scope,
        even_shares=the_map.even_shares,
        habit=None if the_map.kind is None else habit_of(the_map.kind, is_backward=is_backward),
        computes_elsewhere=computes_elsewhere,
    )
    try:  # this frame is in the traceback of what is raised: it must not hold the failures
        _raise_lowest(with_its_schedule(run_chosen) if is_backward else run_chosen(), the_map, phase)
    finally:
        del call  # nor may frames of `run` hold what the calls have made
        if lanes is not None:
            lanes.rejoin()


def _on_lanes(run: Callable[[int], None], lanes: Lanes, the_map: Map) -> Callable[[int], None]:
    def run_on_lanes(index: int) -> None:
        with lanes.of(the_map.number_of(index)):
            run(index)

    return run_on_lanes


def _profiled(run: Callable[[int], None], names: Sequence[str], title: str) -> Callable[[int], None]:
    def run_profiled(index: int) -> None:
        with torch.autograd.profiler.record_function(f"{title}: {names[index]}"):
            run(index)

    return run_profiled


def _on_timeline(run: Callable[[int], None], names: Sequence[str], phase: str) -> Callable[[int], None]:
    def run_timed(index: int) -> None:
        name = names[index]
        lane = name.lane if isinstance(name, CallName) else name
        start_s = time.perf_counter()
        try:
            run(index)
        finally:
            if lane is not None:
                add_span(lane, phase, start_s, time.perf_counter())

    return run_timed


@contextmanager
def shown(name: str, phase: str, title: str) -> Iterator[None]:
    """Show the block to profilers and on timelines, as `run_calls` shows calls: for who runs calls by itself."""
    start_s = time.perf_counter()
    try:
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.autograd.profiler.record_function(f"{title}, {phase}: {name}"):
                yield
        else:
            yield
    finally:
        add_span(name, phase, start_s, time.perf_counter())


class CallName(str):
    """What errors and profiles call a call.

    Attributes:
        lane: where it is on a timeline, mostly the name of its expert; `None` if its parts have lanes of their own.
    """

    lane: str | None = None


def name_of_call(position: int, module: Callable[..., Any], names: Sequence[str] | None) -> CallName:
    """Return the name of a module's call: that of its place, or the one it was given, and what is called."""
    name = f"call {position}" if names is None else names[position]
    full_name = CallName(f"{name} ({name_of_module(module)})")
    own_name = getattr(module, "expert_name", None)
    full_name.lane = str(own_name) if own_name else str(full_name) if names is None else name
    return full_name


def name_of_module(module: Callable[..., Any]) -> str:
    """Return the class of a module, or the name of a function, and its `expert_name` if it has one."""
    own_name = getattr(module, "expert_name", None)
    kind = getattr(module, "__qualname__", None) or type(module).__qualname__
    return f"{kind} {own_name!r}" if own_name else str(kind)


def is_under_mode_of_torch() -> bool:
    """Whether a dispatch mode of torch's own, or one derived from it, is active: its state belongs to one thread.

    Those of the compiler, and those that count on the order of operators: a selective checkpoint (which would hand out
    other calls' results in its second run), `FlopCounterMode`, `CommDebugMode`. Torch's hooks on all modules count too:
    by these (`ModuleTracker`) a user's mode learns which module the operators that it sees belong to.
    """
    if any(getattr(hook, "__module__", "").startswith("torch.") for hook in _global_forward_hooks.values()):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    bases = {base for mode in _get_current_dispatch_mode_stack() for base in type(mode).__mro__}
    return any(base.__module__.startswith("torch.") for base in bases.difference(TorchDispatchMode.__mro__))


def name_guilty(error: BaseException, the_map: Map, phase: str, index: int, others: str = "") -> None:
    """Add a note to what a call has raised that names it, by its place in this pass; `others`: who else failed."""
    names = the_map.names
    place = names[index] if index < len(names) else "no call"
    num_calls = len(names) + the_map.num_left_out
    add_note(error, f"{the_map.title}, {phase}: raised by {place} of {num_calls}{others}.")


def _raise_lowest(failures: dict[int, BaseException], the_map: Map, phase: str) -> None:
    if not failures:
        return
    index = min(failures)
    error = failures[index]
    num_others = len(failures) - 1
    others = f"; {num_others} other call{'s' * (num_others > 1)} failed as well" if num_others else ""
    name_guilty(error, the_map, phase, index, others)
    try:
        raise error
    finally:
        del failures, error  # this frame is in the traceback: the exception must not hold itself
