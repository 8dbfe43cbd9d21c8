"""Tie the results of many calls to one autograd node, whose backward runs all their backwards at once.

The engine runs the backward of one device one node after the other. So the calls of a map must not be nodes of
their own; they become the inside of one:

        x0    x1    x2   ...            tensors the calls depend on
          \\    |    /
         ┌─────────────┐
         │    join     │  backward: 1. takes what the calls saved out of the node, and lets the node forget it
         └─────────────┘            2. runs every call's backward, concurrently
          /    |    \\               3. returns all gradients
        y0    y1    y2   ...            the calls' results

Rule 1. What a call saves is saved by the node. Saved-tensor hooks, the check for in-place changes, the release with
        the graph and the complaint about a second backward are then PyTorch's own.
Rule 2. A call's saved tensors go when that call is done: the node lets go of all of them first
        (`maybe_clear_saved_tensors`, which does nothing under `retain_graph`), then each call of its own. So do the
        gradients that it gets. Calls that a backward does not reach keep theirs (`left`).
Rule 3. A call none of whose results got a gradient does not run, as in plain PyTorch.
Rule 4. A result of a call that takes nothing which requires a gradient requires none, though the node does.
Rule 5. The node is not part of a cycle: a call forgets its results once they are tied.
Rule 6. The node leads to the inputs of the last call first, and the last call's backward begins first. So what several
        calls compute for one tensor is added in the order of a loop, by the engine or in `sums`, to the same bits.

The engine goes on to everything that lies behind a node, with a gradient or without: a backward through `y0` alone
would lead to what `x1` was computed with. Where that makes a difference (`histories`), calls whose inputs were computed
by different nodes are tied apart, by three nodes for each history::

        history of x0 ◀── departure ◀── waiting ◀── arrival ◀── y0
        history of x1 ◀── departure ◀── waiting ◀── arrival ◀── y1

Rule 7. Of the nodes that are ready the engine runs the one with the highest number, and a thread numbers those that it
        makes as it makes them. First come all departures, then all waitings, then all arrivals; so in a graph that one
        thread has made everybody whom this backward reaches has arrived when the first departure runs, and the
        backwards of all run at once. Another thread's nodes may lead to arrivals with any numbers: then a waiting gives
        its departure the lowest of all until everybody has arrived. (Were somebody to come later still, as he might
        where several maps of such a graph wait at a time, his backward would run later. No number depends on it.)
Rule 8. What has arrived belongs to one backward (`this_backward`); another one, also inside of it, sees nothing of it.
Rule 9. The engine has a thread for each device. So all nodes of a map are on one, that of the results, which their
        tokens are made on too; calls with results on several devices are not tied apart.
Rule 10. An input that comes out as a result, changed or not, is an input of its arrival as well, as PyTorch wants it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import Node

from moe_autograd._streams import accelerator_in_use, use_here
from moe_autograd.autograd.grad_dtypes import declare
from moe_autograd.autograd.joining.accumulating import Wanted
from moe_autograd.autograd.joining.boxed import INTERRUPTED, Grads, UnlessCompiled, boxed
from moe_autograd.autograd.joining.histories import apart
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD, Joined, Tensors, has_missing
from moe_autograd.autograd.joining.left import take_saved
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.result_hooks import see_within
from moe_autograd.autograd.runs import Map
from moe_autograd.autograd.sleeping_hooks import let_hooks_sleep
from moe_autograd.autograd.this_backward import kept_by_this_backward, refuse_other_engines
from moe_autograd.autograd.uncompiled import filled, is_backward_compiled, left_alone, uncompiled

_CPU = torch.device("cpu")


def join(joined: Joined) -> list[Sequence[Tensor]]:
    """Tie the results of all calls to the graph; return them call by call, as `Function.apply` returns results.

    Raises:
        RuntimeError, TypeError: in PyTorch's words, when a call marked or saved something that PyTorch refuses.
        KeyboardInterrupt: Ctrl-C, also where PyTorch makes another error of it (`boxed`).
    """
    try:
        device = _device_of(joined) if joined.can_be_apart else None
        places = () if device is None else apart(joined.calls)
        tied = _tie_apart(joined, places, device) if places else _tie(joined)
    except (RuntimeError, TypeError) as error:
        if str(error) == INTERRUPTED:
            raise KeyboardInterrupt from error
        _name_guilty_call(joined)
        raise
    finally:
        for call in joined.calls:
            call.forget_results()  # Rule 5, also where a saved-tensor hook raises when results are tied
    return tied


def _device_of(joined: Joined) -> torch.device | None:
    """Return the device of the results; `None` if they are on several (Rule 9)."""
    if accelerator_in_use() is None:
        return _CPU
    devices = {result.device for call in joined.calls for result in call.results}
    return devices.pop() if len(devices) == 1 else None


def _tie(joined: Joined) -> list[Sequence[Tensor]]:
    tied = _Join.apply(joined, joined.pass_gate(), *joined.inputs())  # type: ignore[no-untyped-call]
    return joined.result_parts.of_each(tied)


def _name_guilty_call(joined: Joined) -> None:
    """PyTorch refused all calls at once: show it one after the other, to say which it means."""
    title = joined.map.title
    for call, name in zip(joined.calls, joined.map.names, strict=True):
        try:
            _Join.apply(Joined([call], Map(title, [name], 1)), None, *call.inputs)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            add_note(error, f"{title}, forward: raised by {name} of {len(joined.calls)}.")
            raise


def backward_by(run: Callable[[Any, Grads], Tensors]) -> Any:
    """Return the backward of a node that `run` makes of its gradients; compiled autograd cannot trace it."""

    @uncompiled
    def run_all(ctx: Any, grad_outputs: Grads) -> Tensors:
        refuse_other_engines("parallel map", ctx)
        grads = run(ctx, grad_outputs)
        return filled(ctx.next_functions, grads) if is_backward_compiled() else grads

    @left_alone
    def backward(ctx: Any, *grad_outputs: Any) -> Tensors:
        return run_all(ctx, boxed(grad_outputs))

    return staticmethod(backward)


@see_within
class _Join(Function):
    boxed_grads_call = UnlessCompiled()

    @staticmethod
    def forward(ctx: Any, joined: Joined, gate: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results, saved, dirty, non_differentiable = joined.collect()
        use_here(results)
        use_here(saved)
        ctx.save_for_backward(*saved)  # Rule 1
        if dirty:
            _refuse_retained(joined.map.title, results, dirty)
            ctx.mark_dirty(*dirty)
        if non_differentiable:
            ctx.mark_non_differentiable(*non_differentiable)
        declare(ctx, joined.grad_dtypes())
        ctx.joined = joined
        return tuple(results)

    @backward_by
    def backward(ctx: Any, grad_outputs: Grads) -> Tensors:
        joined: Joined = ctx.joined
        wanted = _ask(joined, ctx, grad_outputs)
        saved = take_saved(ctx, joined, grad_outputs, wanted)
        grads = joined.backward(saved, grad_outputs, wanted)
        use_here(grads)
        return (None, *joined.hand_out(grads))


def _refuse_retained(title: str, results: Sequence[Tensor], dirty: Sequence[Tensor]) -> None:
    """Raise where `retain_grad` cannot go along with a changed tensor: PyTorch seeks it at the place among results."""
    places = {id(result): place for place, result in enumerate(results)}
    for tensor in dirty:
        if id(tensor) not in places:  # PyTorch refuses it, be it a tensor or not
            continue
        if tensor.retains_grad and not tensor._is_view() and tensor.output_nr != places[id(tensor)]:
            raise RuntimeError(
                f"{title}: expected calls to change no tensor in place that retains its gradient, got one of shape "
                f"{tuple(tensor.shape)}. Call retain_grad after the map, or give the call a clone."
            )


def _ask(joined: Joined, leading: Any, grad_outputs: Tensors) -> Sequence[Wanted]:
    """Return for each input, to which a node leads, whether it is wanted; only the engine's own thread may ask."""
    nodes: list[Node | None] = [node for node, _ in leading.next_functions]
    if has_missing(grad_outputs):  # the engine goes on to the leaves of such calls all the same
        leaf_nodes: Any = [node for node in nodes if type(node) is ACCUMULATE_GRAD]
        let_hooks_sleep(node.variable for node in leaf_nodes)
    wanted = joined.ask(joined.in_order(nodes), joined.reached(grad_outputs))
    if not is_backward_compiled():
        joined.refuse_escaped(wanted)
    return wanted


# ---- apart


def _tie_apart(
    joined: Joined, places: Sequence[list[int]], device: torch.device | None
) -> list[Sequence[Tensor]]:
    joined.look_for_shared()
    parts = [_Part(joined, own_places, device) for own_places in places]
    tokens = [part.depart() for part in parts]  # Rule 7
    tokens = [_Waiting.apply(*each) for each in zip(parts, tokens, strict=True)]  # type: ignore[no-untyped-call]
    tied: list[Sequence[Tensor]] = [()] * len(joined.calls)
    for part, token in zip(parts, tokens, strict=True):
        for place, results in zip(part.places, part.arrive(token), strict=True):
            tied[place] = results
    return tied


class _Part:
    """Those calls of a map whose inputs have the same history.

    Args:
        whole: all calls.
        places: which of them.
        device: of their results.
    """

    def __init__(self, whole: Joined, places: list[int], device: torch.device | None) -> None:
        self.whole, self.places, self._device = whole, places, device
        self.joined = whole.part(places)

    def depart(self) -> Tensor:
        """Return what leads to everything that the calls depend on."""
        inputs = self.joined.inputs()
        return cast(Tensor, _Departure.apply(self, self.joined.pass_gate(), *inputs))  # type: ignore[no-untyped-call]

    def arrive(self, token: Tensor) -> list[Sequence[Tensor]]:
        """Return the results of the calls, which lead to the token."""
        returned = {id(result) for call in self.joined.calls for result in call.results}
        again = [t for call in self.joined.calls for t in call.inputs if id(t) in returned]  # Rule 10
        tied = _Arrival.apply(self, token, *again)  # type: ignore[no-untyped-call]
        return self.joined.result_parts.of_each(tied)

    def token(self) -> Tensor:
        """Return an empty tensor, wherever tensors are made by default."""
        return torch.empty(0, dtype=torch.float32, device=self._device)


class _Link(Function):
    """A node that passes on no gradient, but a token: it only settles which node runs when.

    The token's gradient is one too: who takes what a node gets, to go on from there later, comes back with it.
    """

    @staticmethod
    def forward(ctx: Any, part: _Part, *leads_to: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.part = part
        return part.token()


class _Departure(_Link):
    @backward_by
    def backward(ctx: Any, _: Grads) -> Tensors:
        part: _Part = ctx.part
        return (None, *part.joined.hand_out(_arrivals_of(part.whole).take_grads(part)))


class _Waiting(_Link):
    @backward_by
    def backward(ctx: Any, _: Grads) -> Tensors:
        _arrivals_of(ctx.part.whole).let_wait(ctx.next_functions[0][0], ctx._sequence_nr())
        return None, ctx.part.token()


@see_within
class _Arrival(Function):
    boxed_grads_call = UnlessCompiled()

    @staticmethod
    def forward(ctx: Any, part: _Part, token: Tensor, *again: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        part.whole.arrivals.append(weakref.ref(ctx))
        return _Join.forward(ctx, part.joined, token, *again)

    @backward_by
    def backward(ctx: Any, grad_outputs: Grads) -> Tensors:
        part: _Part = ctx.part
        departure = ctx.next_functions[0][0].next_functions[0][0]
        wanted = _ask(part.joined, departure, grad_outputs)
        saved = take_saved(ctx, part.joined, grad_outputs, wanted)
        _arrivals_of(part.whole).add(part, saved, grad_outputs, wanted)
        return None, part.token(), *(None,) * (len(ctx.needs_input_grad) - 2)


def _arrivals_of(whole: Joined) -> _Arrivals:
    """Return those of this backward (Rule 8)."""
    if torch._C._current_graph_task_id() != -1:
        return kept_by_this_backward(whole, functools.partial(_Arrivals, whole.arrivals))
    if whole.compiled_arrivals is None:
        whole.compiled_arrivals = _Arrivals(())
    return cast(_Arrivals, whole.compiled_arrivals)


class _Arrivals:
    """The calls of one map whose gradients have arrived in one backward, and what came of them.

    Args:
        nodes: all arrivals of the map; those that are still alive.

    Threads: one; of one backward, the engine runs all nodes of a device on the same (Rule 9).
    """

    def __init__(self, nodes: Sequence[weakref.ref[Node]]) -> None:
        alive = [node for reference in nodes if (node := reference()) is not None]
        self._num_to_come = sum(map(torch._C._will_engine_execute_node, alive))
        self._waiting: list[tuple[Any, int]] = []  # departures, and the numbers that they are to have
        self._parts: list[_Part] = []  # those that have arrived and not run
        self._saved: dict[int, Tensors] = {}  # by the place of the call, as all below
        self._grad_outputs: dict[int, Tensors] = {}
        self._wanted: dict[int, Sequence[Wanted]] = {}
        self._grads: dict[int, Tensors] = {}

    def add(
        self, part: _Part, saved: dict[int, Tensors], grad_outputs: Grads, wanted: Sequence[Wanted]
    ) -> None:
        """Note what a part needs for its backward."""
        joined = part.joined
        self._num_to_come -= 1
        self._parts.append(part)
        self._saved.update((part.places[i], own) for i, own in saved.items())
        self._grad_outputs.update(zip(part.places, joined.result_parts.of_each(grad_outputs), strict=True))
        grad_outputs.clear()
        if not wanted:
            wanted = [True] * joined.input_parts.total
        self._wanted.update(zip(part.places, joined.input_parts.of_each(wanted), strict=True))

    def let_wait(self, departure: Any, number: int) -> None:
        """Let a departure wait for those who are to come; if nobody is, let all go (Rule 7)."""
        self._waiting.append((departure, number))
        if self._num_to_come > 0:
            departure._set_sequence_nr(0)
            return
        for one, number in self._waiting:
            one._set_sequence_nr(number)
        self._waiting.clear()

    def take_grads(self, part: _Part) -> Grads:
        """Return one gradient or `None` for each input of a part.

        Raises:
            RuntimeError: it has not arrived: somebody begins in the midst of the map.
        """
        if part in self._parts:
            self._run(part.whole)
        if not self._grads.keys() >= set(part.places):
            raise RuntimeError(
                f"{part.whole.map.title}: expected a backward that comes by way of the results, got one that begins at "
                "an inner node, as zero-bubble schedules of torch.distributed.pipelining make it. Take a schedule that "
                "splits no backward."
            )
        return [grad for place in part.places for grad in self._grads.pop(place)]

    def _run(self, whole: Joined) -> None:
        """Run the backwards of all that have arrived."""
        saved, self._saved = self._saved, {}
        grad_outputs = whole.result_parts.flat(self._grad_outputs, None)
        wanted = whole.input_parts.flat(self._wanted, False)
        self._grad_outputs.clear()
        self._wanted.clear()
        parts, self._parts = self._parts, []
        found = whole.backward(saved, grad_outputs, wanted)
        use_here(found)
        grads = whole.input_parts.of_each(found)
        for part in parts:
            self._grads.update((place, grads[place]) for place in part.places)
