"""The backward that runs now: what is kept for as long as it does, however it ends.

Of a backward that failed the engine keeps gradients until the thread's next one, but drops its callbacks at once. So
one callback holds what belongs to the backward, and nothing else does.

Threads: any; a backward has one number on all of them. No locks, which a forked child might never get back: where
threads come at once, one of them makes what all get, by an operation that the interpreter makes atomic.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from moe_autograd._frames import beneath, on_each_thread
from moe_autograd._imported import imported
from moe_autograd.autograd.uncompiled import is_backward_compiled
from moe_autograd.errors import UnsupportedTransformError

T = TypeVar("T")
_ROOM = __name__.rpartition(".")[0] + "."
# by way of these calls begin backwards, and others as well
_ON_THE_WAY = frozenset(["torch.autograd", _ROOM + "split_backward", _ROOM + "uncompiled"])
_ANY_THREAD = contextlib.nullcontext()


class _Hold:
    """What the engine holds as long as one backward runs."""

    def __init__(self) -> None:
        self.things: dict[object, Any] = {}

    def __call__(self) -> None:
        """Do nothing at the end of a backward that went well."""


_holds: dict[int, weakref.ref[_Hold]] = {}  # by the engine's number, as long as that backward runs


def keeps_graph() -> bool:
    """Whether there may be another backward through the same graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def this_backward() -> int:
    """Return the number of this backward, never given again; -1 outside of one."""
    return torch._C._current_graph_task_id()


def is_wanted(node: Node | None) -> bool:
    """Whether this backward uses the gradients that flow to a node."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for: the engine says so by raising
        return True


def refuse_other_engines(name: str, node: Any) -> None:
    """Raise where this backward does not tell which nodes it runs: a node would leave out all that it leads to.

    The engine of `torch.distributed.autograd` makes no list of them, and says no of all. Torch's own says yes of a node
    that runs; of the one that a backward begins with, which it does not list, of some that it leads to.

    Args:
        name: of whoever needs to know.
        node: that runs.

    Raises:
        UnsupportedTransformError: it does not tell.
    """
    if is_backward_compiled() or is_wanted(node):
        return
    if any(is_wanted(behind) for behind, _ in node.next_functions):
        return
    raise UnsupportedTransformError(
        f"{name}, backward: expected torch's own engine, got one that does not tell which nodes it runs, as that of "
        "torch.distributed.autograd.backward. Call loss.backward() where no RPC is on the way; else use plain modules, "
        "in a plain loop."
    )


def kept_by_this_backward(key: object, make: Callable[[], T]) -> T:
    """Return what this backward keeps under `key`, made by its first call; only for a node that the engine runs."""
    number = this_backward()
    known = _holds.get(number)
    hold = None if known is None else known()
    if hold is None:
        made = _Hold()
        hold = _holds.setdefault(number, weakref.ref(made, lambda _: _holds.pop(number, None)))()
        if hold is made:  # else another thread's was first
            Variable._execution_engine.queue_callback(hold)
    assert hold is not None  # the engine has it
    thing: T | None = hold.things.get(key)
    return hold.things.setdefault(key, make()) if thing is None else thing


def asked_for_by_name() -> Collection[tuple[int, int]]:
    """Return what this backward is asked for by name: `id`s of nodes, each with an output.

    The engine tells a node only whether it is to run. Who is asked can be seen where the engine was called: on this
    thread; or on some thread, where a device has one of its own.
    """
    return kept_by_this_backward(asked_for_by_name, _asked_for_by_name)


def _asked_for_by_name() -> Collection[tuple[int, int]]:
    return frozenset([_edge_of(one) for extent in extents_of_this_backward() for one in extent.ends])


class Extent(NamedTuple):
    """From where to where a backward goes.

    Args:
        begins: where it begins.
        ends: what it is asked for by name.
        is_of_call: whether it is a call's own, which is over at its ends; another one may go on to what is behind.
    """

    begins: Sequence[Tensor | GradientEdge]
    ends: Sequence[Tensor | GradientEdge]
    is_of_call: bool


def extents_of_this_backward() -> Collection[Extent]:
    """Return that of this backward; where a device's thread asks, which may run several, of all."""
    here = _extent_in(sys._getframe())
    return [here] if here is not None else [one for one in _seen_by_devices(_extent_in) if one is not None]


def is_first_part_of_a_schedule() -> bool:
    """Whether a zero-bubble schedule of `torch.distributed.pipelining` runs the first part of a backward.

    It asks for the gradients of a stage's inputs; in the second part for those of its parameters, with which a node
    whose weights are elsewhere has nothing to do. So all that such a node ever computes, it computes now.
    """
    backward_input = imported("torch.distributed.pipelining._backward", "stage_backward_input")
    if backward_input is None or this_backward() < 0:
        return False
    first_part = backward_input.__code__
    return kept_by_this_backward(first_part, lambda: _runs_beneath(first_part))


def with_its_schedule(run: Callable[[], T]) -> T:
    """Run calls of a map's backward; those on workers are told whether it is the first part of a schedule."""
    is_first_part = is_first_part_of_a_schedule()
    if is_first_part == _is_told_first_part.get():
        return run()
    context = contextvars.copy_context()
    context.run(_is_told_first_part.set, is_first_part)
    return context.run(run)


_is_told_first_part = contextvars.ContextVar("_is_told_first_part", default=False)


def _runs_beneath(code: CodeType) -> bool:
    """Whether this backward runs for a function of this code, and not for one that another backward has begun inside.

    One on a worker does if that was told so; one on the engine's thread for a device, where the outermost frame is a
    node's, if any thread is beneath it.
    """
    frame: FrameType | None = sys._getframe()
    is_asking = False  # whether the engine runs for a frame further out
    module = ""
    while frame is not None and frame.f_code is not code:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code is _engine_run_backward.__code__:
            is_asking = True
        elif is_asking and not module.startswith(("torch.autograd", "torch._tensor")):
            is_asking = False
            if not module.startswith(("torch.", "moe_autograd.")):
                return False
        frame = frame.f_back
    if frame is not None or _is_told_first_part.get():
        return True
    return module == torch.autograd.function.__name__ and any(
        _seen_by_devices(lambda of: beneath(of, code) is not None)
    )


def _seen_by_devices(look: Callable[[FrameType], T]) -> Collection[T]:
    """Return what is seen on all threads, where this one may be the engine's for a device."""
    return on_each_thread(look).values() if torch.accelerator.is_available() else ()


def _extent_in(frame: FrameType | None) -> Extent | None:
    """Return that of the innermost backward in these frames; `None` if there is none."""
    frame = beneath(frame, _engine_run_backward.__code__)
    if frame is None:
        return None
    args: tuple[Any, ...] = frame.f_locals["args"]
    inputs = args[3] if len(args) > 3 else frame.f_locals["kwargs"].get("inputs", ())
    began = frame.f_back
    while began is not None and began.f_globals.get("__name__") in _ON_THE_WAY:
        began = began.f_back
    is_of_call = began is not None and str(began.f_globals.get("__name__")).startswith(_ROOM)
    return Extent(frame.f_locals["t_outputs"], inputs, is_of_call)


def _edge_of(asked: Tensor | GradientEdge) -> tuple[int, int]:
    if isinstance(asked, Tensor):
        return id(asked.grad_fn), asked.output_nr
    return id(asked.node), asked.output_nr


def on_this_thread() -> contextlib.AbstractContextManager[object]:
    """Keep an inner backward on its worker.

    On a GPU the engine hands nodes to a thread of the device. That thread is the one which runs the join, and waits
    there for the workers.
    """
    if torch.accelerator.current_accelerator() is None:
        return _ANY_THREAD
    return torch.autograd.set_multithreading_enabled(False)
