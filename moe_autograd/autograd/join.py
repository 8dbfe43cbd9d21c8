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
        (`maybe_clear_saved_tensors`, which does nothing under `retain_graph`), then each call of its own.
Rule 3. A call none of whose results got a gradient does not run, as in plain PyTorch.
Rule 4. A result of a call that takes nothing which requires a gradient requires none, though the node does.
Rule 5. The node is not part of a cycle: a call forgets its results once they are tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import Node, get_gradient_edge

from moe_autograd._streams import use_here
from moe_autograd.autograd.runs import run_calls
from moe_autograd.autograd.sleeping_hooks import let_hooks_sleep

ACCUMULATE_GRAD = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


class Call(Protocol):
    """What a join has to know of one call whose forward has run."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What its gradients are asked for."""

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What the join is to tie."""

    @property
    def to_save(self) -> tuple[Tensor | None, ...]:
        """What the join is to save for it."""

    @property
    def dirty(self) -> tuple[Tensor, ...]:
        """Those of `inputs` that it changed in place."""

    @property
    def non_differentiable(self) -> tuple[Tensor, ...]:
        """Those of `results` that no gradient flows through."""

    def forget_results(self) -> None:
        """Drop every reference to a result, and to what the node saves from now on."""

    def backward(
        self,
        saved: Sequence[Tensor | None],
        grad_outputs: Sequence[Tensor | None],
        wanted: Sequence[bool],
        keep_graph: bool,
    ) -> Sequence[Tensor | None]:
        """Return one gradient or `None` for each of `inputs`.

        Args:
            saved: what `to_save` was.
            grad_outputs: one for each of `results`, `None` where none flows.
            wanted: for each of `inputs`, whether this backward uses its gradient; empty where nobody asks.
            keep_graph: whether there may be another backward.
        """


class Joined:
    """The calls of one map: how many tensors each contributes, and how to run their backwards.

    Args:
        calls: their forwards have run.
        names: of the calls, for errors and profiles.
        max_concurrency: how many backwards may run at once; `None` leaves it to the library.
        title: how the map is called in errors and profiles.
    """

    def __init__(
        self, calls: Sequence[Call], names: Sequence[str], max_concurrency: int | None, title: str
    ) -> None:
        self.calls = calls
        self.names = names
        self.max_concurrency = max_concurrency
        self.title = title
        self.num_inputs = [len(call.inputs) for call in calls]
        self.num_results = [len(call.results) for call in calls]
        self.num_saved = [len(call.to_save) for call in calls]

    def pass_gate(self) -> Tensor | None:
        """Return one more tensor for the join to depend on, or `None`."""
        return None

    def ask(self, nodes: Sequence[Node | None]) -> list[bool]:
        """Return for each input whether this backward uses its gradient; empty if the calls compute all anyway.

        Args:
            nodes: where the gradients of the inputs go, after that of the gate if there is one.

        Threads: only the engine's, while it runs the join.
        """
        return []

    def collect(self) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor]]:
        """Return the results, and what is to be saved and marked, of all calls."""
        results: list[Tensor] = []
        saved: list[Tensor | None] = []
        dirty: list[Tensor] = []
        non_differentiable: list[Tensor] = []
        for call in self.calls:
            results += call.results
            saved += call.to_save
            dirty += call.dirty
            non_differentiable += call.non_differentiable
        return results, saved, dirty, non_differentiable

    def backward(
        self,
        saved_of: list[Sequence[Any]],
        grad_outputs: Sequence[Tensor | None],
        wanted: Sequence[bool],
        keep_graph: bool,
    ) -> list[Tensor | None]:
        """Run the backwards of all calls that got a gradient.

        Args:
            saved_of: for each call what it saved; emptied on the way.
            grad_outputs: one for each result of all calls.
            wanted: one for each input of all calls.
            keep_graph: whether there may be another backward.

        Returns:
            One gradient or `None` for each input of all calls.
        """
        grads_of = split(grad_outputs, self.num_results)
        wanted_of = split(wanted, self.num_inputs)
        del grad_outputs
        grads: list[Sequence[Tensor | None]] = [(None,) * count for count in self.num_inputs]
        reached = [i for i, own in enumerate(grads_of) if has_any(own)]  # Rule 3

        def run(index: int) -> None:
            i = reached[index]
            own_saved, own_grads = saved_of[i], grads_of[i]
            saved_of[i] = grads_of[i] = ()  # Rule 2: nobody but this call holds them now
            use_here(own_saved)
            use_here(own_grads)
            grads[i] = self.calls[i].backward(own_saved, own_grads, wanted_of[i], keep_graph)

        names = self.names if len(reached) == len(self.calls) else [self.names[i] for i in reached]
        run_calls(run, names, self.max_concurrency, f"{self.title}, backward")
        return [grad for own in grads for grad in own]

    def hand_out(self, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
        """Return what flows to the gate, and after it what flows to the inputs.

        Args:
            grads: what `backward` returned.
        """
        return (None, *grads)


def has_any(grads: Sequence[Tensor | None]) -> bool:
    """Whether any gradient flows; written out, since it is asked once for each call."""
    for grad in grads:  # noqa: SIM110  # a generator costs more than the loop
        if grad is not None:
            return True
    return False


def split(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Cut `flat` into one part for each count."""
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, joined: Joined, gate: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results, saved, dirty, non_differentiable = joined.collect()
        use_here(results)
        use_here(saved)
        ctx.save_for_backward(*saved)  # Rule 1
        if dirty:
            ctx.mark_dirty(*dirty)
        if non_differentiable:
            ctx.mark_non_differentiable(*non_differentiable)
        ctx.joined = joined
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        # Compiled autograd traces what it can, and threads it cannot.
        run = _run_uncompiled if torch.compiler.is_compiling() else _run
        return run(ctx, grad_outputs)


def _run(ctx: Any, grad_outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    joined: Joined = ctx.joined
    saved = split(ctx.saved_tensors, joined.num_saved)
    ctx.maybe_clear_saved_tensors()  # Rule 2
    nodes = [node for node, _ in ctx.next_functions]
    for grad in grad_outputs:
        if grad is None:  # the engine goes on to the leaves of that call all the same
            leaf_nodes: Any = [node for node in nodes if type(node) is ACCUMULATE_GRAD]
            let_hooks_sleep(node.variable for node in leaf_nodes)
            break
    # The engine answers these only here, on its own thread.
    wanted = joined.ask(nodes)
    keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    grads = joined.backward(saved, grad_outputs, wanted, keep_graph)
    use_here(grads)
    return (None, *joined.hand_out(grads))


_run_uncompiled = torch._disable_dynamo(_run)


def is_wanted(node: Node | None) -> bool:
    """Whether this backward uses the gradients that flow to `node`; the engine cannot tell for leaves."""
    if node is None:
        return False
    return type(node) is ACCUMULATE_GRAD or torch._C._will_engine_execute_node(node)


def join(joined: Joined) -> list[Sequence[Tensor]]:
    """Tie the results of all calls to the graph; return them call by call, as `Function.apply` returns results.

    Raises:
        RuntimeError, TypeError: in PyTorch's words, when a call marked or saved something that PyTorch refuses.
    """
    inputs = [tensor for call in joined.calls for tensor in call.inputs]
    try:
        tied = _Join.apply(joined, joined.pass_gate(), *inputs)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError):
        _name_guilty_call(joined)
        raise
    for call in joined.calls:
        call.forget_results()  # Rule 5
    return split(tied, joined.num_results)


def _name_guilty_call(joined: Joined) -> None:
    """PyTorch refused all calls at once: show it one after the other, to say which it means."""
    for call, name in zip(joined.calls, joined.names, strict=True):
        try:
            _Join.apply(Joined([call], [name], 1, joined.title), None, *call.inputs)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            error.add_note(f"{joined.title}, forward: raised by {name} of {len(joined.calls)}.")
            raise
