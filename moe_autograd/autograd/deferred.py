"""Weight gradients that come later: computed by idle workers while the backward goes on upstream.

Whoever waits for a layer's backward waits for the gradients of its inputs; those of its weights are wanted when the
whole backward is over. So a join that defers runs the first part of every call's backward (`split_backward`) and
leaves the second for later::

        x ◀──── gradients, now ──────┐
                                   join ◀── y
   leaves ◀── late ◀──── promise ────┘
                 │                   └─▶ backlog ──▶ a worker: second parts, join after join
                 └ keeps the promise: runs what no worker has begun, waits for the rest

Rule 1. Of the nodes that are ready the engine runs the one that was made last. `late` says that it was made before
        all others, so it runs when nothing is left to do upstream.
Rule 2. The promise travels with the gradient that flows to `late`, so it belongs to this backward and to no other.
        When a backward has failed, nothing holds its promises any more (`this_backward`): what has not begun then
        never does, and what runs comes to rest before `loss.backward()` raises.
Rule 3. From `late` on everything is the engine's, as ever: sums with other uses of a parameter, `.grad`, hooks, DDP,
        `torch.autograd.grad`. A second part that failed raises there.
Rule 4. A promise may be kept at once. So it is where a backward cannot be in two parts: with `retain_graph` or
        `create_graph`, among saved-tensor hooks and modes of torch's, with a graph that calls share or that reaches
        tensors with history; where a call's results have hooks or retain their gradients, or it may be left out;
        where an accelerator is in use, whose kernels wait in streams and not on the host; where only some of the
        leaves are asked for; and where modules of this process are sharded by `fully_shard`. Calls too small for a
        thread do not come here (`in_turn`).
Rule 5. One worker at a time takes from the backlog, and nobody waits for what has not begun, but runs it himself:
        second parts may hold maps that defer, and nothing waits in a circle.

Mutable state: the backlog's `_works` and `_has_worker` are guarded by its lock; a work's `_pending` and `_grads` belong
to whoever has taken it off the backlog.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import Node

from moe_autograd._ambient import Ambient
from moe_autograd._imported import imported
from moe_autograd._random import CallSeeds
from moe_autograd._streams import accelerator_in_use
from moe_autograd._threads import start_soon
from moe_autograd._waiting import wait
from moe_autograd.autograd.hooks import nested_backwards
from moe_autograd.autograd.joining.accumulating import Wanted
from moe_autograd.autograd.joining.joined import Parts, Tensors, split, which_are_wanted
from moe_autograd.autograd.joining.sums import Sums, shared_by_many
from moe_autograd.autograd.modules.joined_modules import JoinedModules
from moe_autograd.autograd.modules.module_calls import ModuleCall
from moe_autograd.autograd.runs import Map, run_calls
from moe_autograd.autograd.sleeping_hooks import all_hooks_sleep
from moe_autograd.autograd.split_backward import PendingWeightGradients, is_in_first_part
from moe_autograd.autograd.this_backward import kept_by_this_backward, on_this_thread
from moe_autograd.autograd.uncompiled import left_alone


def may_defer() -> bool:
    """Whether gradients of weights may come later than those of inputs (Rule 4)."""
    # Of `fully_shard`: it knows the modules of this process, and reduces what is there when a backward has passed them.
    return accelerator_in_use() is None and not imported(
        "torch.distributed._composable_state", "_module_state_mapping"
    )


class DeferringModules(JoinedModules):
    """The module calls of one map, whose weight gradients come later than those of their inputs."""

    can_be_apart = False  # a worker computes the second parts of a whole map at once
    _has_late = False

    def __init__(self, calls: Sequence[ModuleCall], the_map: Map) -> None:
        super().__init__(calls, the_map)
        self.tied_parts = Parts([len(call.cuts) for call in calls])
        for call in calls:
            call.may_defer = True
            call.inputs = call.inputs[: len(call.cuts)]  # `late` leads to the leaves
        self.shared_leaves = shared_by_many([call.leaves for call in calls])

    def pass_gate(self) -> Tensor | None:
        """See `Joined`: `late` leads to the leaves."""
        leaves = [leaf for call in reversed(self.calls) for leaf in call.leaves]
        if not leaves:
            return None
        self._has_late = True
        late: Tensor = _Late.apply(*leaves)  # type: ignore[no-untyped-call]
        assert late.grad_fn is not None
        late.grad_fn._set_sequence_nr(0)  # type: ignore[attr-defined]  # Rule 1
        return late

    def ask(self, nodes: Sequence[Node | None], reached: Sequence[int]) -> Sequence[Wanted]:
        """See `JoinedModules`; the leaves' nodes are those behind `late`."""
        if is_in_first_part():
            return [True] * self.input_parts.total
        late, of_cuts = (nodes[0], nodes[1:]) if self._has_late else (None, nodes)
        self._note_histories(of_cuts, self.tied_parts)
        of_leaves = [] if late is None else which_are_wanted([node for node, _ in late.next_functions])
        num_leaves = [
            both - cuts for both, cuts in zip(self.input_parts.counts, self.tied_parts.counts, strict=True)
        ]
        leaves_of = reversed(split(of_leaves, num_leaves[::-1]))
        cuts_of = self.tied_parts.of_each(which_are_wanted(of_cuts))
        return [one for cuts, leaves in zip(cuts_of, leaves_of, strict=True) for one in (*cuts, *leaves)]

    def hand_out(self, grads: list[Tensor | None]) -> Tensors:
        """See `Joined`: promise the leaves' gradients to `late`."""
        if not self._has_late:
            return super().hand_out(grads)
        of_cuts: list[Tensor | None] = []
        of_leaves: list[Tensors] = []
        for own, num_cuts in zip(self.input_parts.of_each(grads), self.tied_parts.counts, strict=True):
            of_cuts += own[:num_cuts]
            of_leaves.append(own[num_cuts:])
        pending = {i: one for i, call in enumerate(self.calls) if (one := call.take_pending()) is not None}
        carrier = torch.empty(0, dtype=torch.float32, device="cpu")
        with nested_backwards():  # what is asked for in a second part waits for the end, too
            carrier.promise = work = _Work(self, pending, of_leaves)  # type: ignore[attr-defined]
        if pending:
            kept_by_this_backward(_Works, _Works).works.append(work)
            _backlog.add(work)
        return (carrier, *self.last_first(of_cuts))


class _Late(Function):
    only_computes = True  # see `upper_cuts`

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    @left_alone
    def backward(ctx: Any, carrier: Any) -> Tensors:
        if carrier is None:
            return (None,) * len(ctx.needs_input_grad)
        promise: _Work = carrier.promise
        with nested_backwards():
            return promise.keep()


class _Works:
    """The promises of one backward; those that it does not keep are cancelled when it lets go of them."""

    def __init__(self) -> None:
        self.works: list[_Work] = []
        weakref.finalize(self, _cancel, self.works).atexit = False


def _cancel(works: list[_Work]) -> None:
    for work in works:
        work.cancel()
    for work in works:
        work.come_to_rest()


class _Work:
    """The promise: the second parts of one join's backward.

    Args:
        joined: whose names and bounds hold.
        pending: the second parts, by call.
        grads: for each call those of its leaves; of those that are pending, nothing yet.
    """

    def __init__(
        self, joined: DeferringModules, pending: dict[int, PendingWeightGradients], grads: list[Tensors]
    ) -> None:
        self._pending, self._is_empty, self._grads = pending, not pending, grads
        self._sums = Sums(joined.shared_leaves, pending)
        self._map = joined.map.of_some(pending)._replace(even_shares=False, kind=None)
        self._ends_with_hooks = frozenset().union(*[joined.calls[i].ends_with_hooks for i in pending])
        self._error: BaseException | None = None
        self._is_cancelled = False
        self.is_with_worker = False
        self._worker_has_ended = threading.Event()
        self._thread_ids: set[int] = set()  # of those that compute
        if pending:
            self._ambient, self._seeds = Ambient(), CallSeeds().apart()

    def keep(self) -> Tensors:
        """Return the gradients of all leaves, those of the last call first.

        Raises:
            BaseException: of the lowest failing call, with a note that names it.
        """
        if self._is_empty:
            return self._take_grads()
        if _backlog.take(self):
            self._compute()
        else:
            self._wait_for_worker()
        self._seeds.come_back()
        return self._take_grads()

    def _compute(self) -> None:
        """Compute all that is pending, on this thread and others; raise as `run_calls` does."""
        places = list(self._pending)

        def run(index: int) -> None:
            pending = self._pending.pop(places[index])
            if self._is_cancelled:
                return
            self._thread_ids.add(threading.get_ident())
            try:
                with all_hooks_sleep(self._ends_with_hooks), on_this_thread():
                    self._grads[places[index]] = self._sums.add(places[index], pending.run())
            finally:
                self._thread_ids.discard(threading.get_ident())

        run_calls(run, self._map, "weight gradients", seeds=self._seeds, is_backward=True)
        self._sums.hand_out(self._grads)

    def compute_elsewhere(self) -> None:
        """Compute on a worker, in the world of the backward; what is raised waits for the promise to be kept."""
        try:
            self._ambient.run(self._compute)
        except BaseException as error:
            self._error = error
        finally:
            self._worker_has_ended.set()

    def _wait_for_worker(self) -> None:
        """Wait for the worker that has taken the work; Ctrl-C, and the like, leaves it to end by itself."""
        try:
            wait(self._worker_has_ended.wait)
        except BaseException:
            self._is_cancelled, self._grads = True, []
            raise

    def _take_grads(self) -> Tensors:
        """Return what was computed, or raise what went wrong; nothing of it stays here."""
        error, self._error = self._error, None
        grads, self._grads = self._grads, []
        if error is None:
            return tuple([grad for own in reversed(grads) for grad in own])
        try:
            raise error
        finally:
            del error  # this frame is in the traceback

    def cancel(self) -> None:
        """Begin nothing more; after a promise that was kept this changes nothing."""
        self._is_cancelled = True
        _backlog.take(self)
        self._seeds.let_go()

    def come_to_rest(self) -> None:
        """Wait for what runs, unless that is what calls, and let go of everything."""
        if self._grads and self.is_with_worker and threading.get_ident() not in self._thread_ids:
            self._wait_for_worker()
        self._grads = []
        self._pending.clear()


class _Backlog:
    """The works that wait for an idle worker, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[_Work] = deque()
        self._has_worker = False

    def add(self, work: _Work) -> None:
        """Let a worker run it."""
        try:
            with self._lock:
                self._works.append(work)
                if self._has_worker:
                    return
                self._has_worker = True
            start_soon(self._work)
        except RuntimeError:
            # The system has no thread left to give: whoever wants the promise kept does the work.
            self._has_worker = False
        except BaseException:
            # Ctrl-C, perhaps before the worker was asked for: the next work may ask for one more.
            self._has_worker = False
            raise

    def take(self, work: _Work) -> bool:
        """Return whether nobody has begun it; then it is the caller's."""
        with self._lock:
            try:
                self._works.remove(work)
            except ValueError:
                return False
            return True

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work.compute_elsewhere()
            del work  # the next may be long in coming, and holds its own

    def _next(self) -> _Work | None:
        with self._lock:
            self._has_worker = bool(self._works)
            if not self._works:
                return None
            work = self._works.popleft()
            work.is_with_worker = True
            return work


_backlog = _Backlog()


def _start_anew() -> None:
    """In a forked child there is no worker, and no lock is held by a thread that the child does not have."""
    _backlog.__init__()  # type: ignore[misc]  # the same object: promises know it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
