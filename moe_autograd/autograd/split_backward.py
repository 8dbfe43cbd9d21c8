"""A backward in two parts: the gradients of the inputs first, those of the weights later.

Whoever waits for a backward (the layer upstream, the client of a server) waits for the gradients of its
inputs only. Those of the weights take as long again and nobody needs them before the next update. PyTorch
computes both in one pass: `AddmmBackward0`, the node of a linear layer, makes the two matrix products one
after the other. But an engine pass that is asked for some gradients only (`torch.autograd.grad`) skips
whatever does not lead to them, inside such a node too. That is what this file builds on, by four rules::

        x ──◀── linear 1 ──◀── gelu ──◀── linear 2 ──◀── y      the inner nodes lead to x
                   │border               │border
                   ▼                     ▼
                 W1, b1                W2, b2

1. A node that leads to an input is *inner*. The first part is one engine pass over the inner nodes. What
   flows into each of them is then known, for good, and its tensor hooks have fired.
2. An edge from an inner node to one that is not inner, but leads to a weight, is a *border*. The first part
   remembers what flowed into the nodes above the borders (`linear 1` and `linear 2`); the saved tensors of
   all other inner nodes (`gelu`) are dropped, unless saved-tensor hooks packed them.
3. The second part calls the nodes above the borders again, all in one graph task that wants the borders
   only: so each makes the products the first part left out and no other, and no hook fires twice. Then one
   ordinary engine pass goes from the borders down to the weights. Whatever several weights share below
   the borders is computed once.
4. A `torch.autograd.Function` written in Python always computes all its gradients, and calling it twice may
   not be harmless. So it runs in the first part only, and what it sends over its borders is kept. One that
   leaves out what the engine does not want (a parallel map does) has to ask `is_in_first_part`, too; one whose
   weights are elsewhere, behind a tensor that stands for them, `is_wanted_later`. What `torch.compile` has made is
   such a function, and refuses a pass after which the graph is still there: with it, all is computed at once. So it
   is with a `torch.utils.checkpoint`, which would run its forward once for each part; a selective one refuses that.

`torch.distributed.pipelining._backward` knows the idea too. It starts a pass for each group of weights that
share a node, fires the hooks of those nodes twice, keeps the saved tensors of all nodes between them, and
writes to `.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from moe_autograd.autograd.borders import Borders, Edges, Graph, is_of_compiled_code, is_python
from moe_autograd.autograd.saved_tensors import drop_in_python, drop_saved_tensors, is_checkpointed
from moe_autograd.autograd.split_arguments import (
    Differentiable,
    Root,
    as_sequence,
    edges_of,
    pair_roots,
    refuse_hooks_on_the_way,
)
from moe_autograd.autograd.this_backward import is_first_part_of_a_schedule
from moe_autograd.autograd.uncompiled import uncompiled

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
P = ParamSpec("P")
T = TypeVar("T")


def _out_of_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function where tensors have gradient edges.

    To leave that mode, torch switches on whatever it switches off. A backward of a caller who has asked to have it on
    this thread, as each call of a map does on an accelerator, stays here all the same.
    """

    @functools.wraps(function)
    def choose(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        goes_to_threads = torch._C._is_multithreading_enabled()
        with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(goes_to_threads):
            return function(*args, **kwargs)

    return choose


@uncompiled
@_out_of_inference_mode
def split_backward(
    outputs: Differentiable | Iterable[Differentiable],
    grad_outputs: torch.Tensor | Iterable[torch.Tensor | None] | None,
    inputs: Differentiable | Iterable[Differentiable],
    weights: Differentiable | Iterable[Differentiable],
) -> tuple[Gradients, PendingWeightGradients]:
    """Compute the gradients of the inputs now, and leave those of the weights for later.

    Both parts together give what `torch.autograd.grad(outputs, (*inputs, *weights), grad_outputs)` gives,
    for any graph, and free what it frees. A single tensor stands for a sequence of one.

    Args:
        outputs: tensors (or `GradientEdge`s) to start from; those that require no gradient are passed over.
        grad_outputs: a gradient for each output, of its shape; `None` stands for one, for an output with
            one element, and in place of the sequence for as many `None`s.
        inputs: tensors (or `GradientEdge`s) whose gradients are wanted now.
        weights: tensors (or `GradientEdge`s) whose gradients may wait.

    Returns:
        `(input_grads, pending)`: a tuple in the order of `inputs`, `None` where no output depends on it or
        it requires no gradient, and an object whose `run()` returns the same for `weights`.

    Raises:
        ValueError: `grad_outputs` does not fit `outputs`; or weights lie behind an input that has hooks, or that
            Python made and that retains its gradient: these would have to fire twice.
        TypeError: something is neither a tensor nor a `GradientEdge`.
        RuntimeError: no output requires a gradient.

    Autograd: nobody's `.grad` is touched. Tensor hooks fire once, in the part that computes the gradient.
    The gradients require none themselves: differentiating them once more raises. The graph can't be used
    a second time, as after any backward without `retain_graph`: that raises, or `pending.run()` does.

    Threads: any thread may call it, and another one `pending.run()`. On an accelerator, both parts belong
    on the stream that ran the forward.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> x = torch.ones(3, 2, requires_grad=True)
        >>> (grad_x,), pending = split_backward(layer(x).sum(), None, x, layer.parameters())
        >>> torch.equal(grad_x, layer.weight.expand(3, 2))
        True
        >>> pending.run()
        (tensor([[3., 3.]]), tensor([3.]))
    """
    inputs = as_sequence(inputs)
    output_edges = edges_of("outputs", outputs)
    graph = Graph(output_edges, edges_of("inputs", inputs), edges_of("weights", weights))
    roots = pair_roots(output_edges, grad_outputs)
    if any(is_of_compiled_code(node) or is_checkpointed(node) for node in graph.inner):
        return _all_at_once(graph, roots)
    refuse_hooks_on_the_way(graph, inputs)
    return _first_part(graph, roots)


class PendingWeightGradients:
    """The second part of a backward: what it needs, and nothing else of the graph.

    Dropping it without `run()` is fine: then there are no weight gradients.
    """

    def __init__(self, work: _SecondPart) -> None:
        self._work = [work]  # taken by a pop, which no two threads can both win

    @uncompiled
    @_out_of_inference_mode
    def run(self) -> Gradients:
        """Compute the gradients of the weights.

        Returns:
            A tuple in the order of `weights`, `None` where no output depends on the weight.

        Raises:
            RuntimeError: it ran before; or a gradient that the first part took or returned has been
                changed in place in the meantime.
        """
        try:
            work = self._work.pop()
        except IndexError:
            message = (
                "PendingWeightGradients.run: expected one call, got a second. Keep what the first returned."
            )
            raise RuntimeError(message) from None
        return work.run()

    def __repr__(self) -> str:
        return f"PendingWeightGradients({'pending' if self._work else 'ran'})"


class _Recall(NamedTuple):
    """A node above borders, and what flowed into it."""

    node: Node
    grads: Gradients
    borders: Borders


class _SecondPart:
    """What is left to do. Whatever it holds, it lets go of as it is used."""

    def __init__(self, graph: Graph, roots: Sequence[Root]) -> None:
        self.weights = graph.weights
        self.known: dict[int, torch.Tensor | None] = {}  # by place in `weights`
        # Those the engine runs first come last, and are taken first: none frees many others (`deep`).
        self.recalls: list[_Recall] = []
        self.roots = [root for root in roots if root.edge.node in graph.wanted]
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.watch(root.grad for root in self.roots)

    def watch(self, grads: Iterable[torch.Tensor | None]) -> None:
        """Remember the versions of gradients that the caller can reach, and so could change."""
        self.versions += [(t, t._version) for t in grads if t is not None and not t.is_inference()]

    def add_roots(self, gradients: Iterable[tuple[GradientEdge | None, torch.Tensor | None]]) -> None:
        self.roots += [
            Root(edge, _fitted(grad, edge)) for edge, grad in gradients if edge and grad is not None
        ]

    def add_behind(
        self, graph: Graph, gradients: Iterable[tuple[GradientEdge | None, torch.Tensor | None]]
    ) -> None:
        """Go on behind inputs: by calling their nodes, as an engine pass would fire the tensors' hooks once more.

        Only the engine can call a node in Python; of tensors whose hooks can be seen those are refused.
        """
        flowed: dict[Node, dict[int, torch.Tensor]] = {}
        for edge, grad in gradients:
            if edge and is_python(edge.node):
                self.add_roots([(edge, grad)])
            elif edge and grad is not None:
                flowed.setdefault(edge.node, {})[edge.output_nr] = grad
        self.add_recalls(
            _Recall(node, tuple(map(grads.get, range(len(node._input_metadata)))), graph.borders(node))
            for node, grads in flowed.items()
        )

    def add_recalls(self, recalls: Iterable[_Recall]) -> None:
        for recall in recalls:
            self.recalls.append(recall)
            self.watch(recall.grads)

    def run(self) -> Gradients:
        self._check_versions()
        if self.recalls:
            _in_graph_task([edge for recall in self.recalls for _, edge in recall.borders], self._call_again)
        missing = [i for i, edge in enumerate(self.weights) if edge and i not in self.known]
        roots, self.roots = self.roots, []
        self.known.update(zip(missing, _engine_pass(roots, [self.weights[i] for i in missing]), strict=True))
        return tuple(self.known.get(i) for i in range(len(self.weights)))

    def _check_versions(self) -> None:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "PendingWeightGradients.run: expected the gradients of the first part unchanged, got one that "
                "was changed in place. Change a copy, or run the second part before."
            )
        self.versions.clear()

    def _call_again(self) -> None:
        while self.recalls:
            node, grads, borders = self.recalls.pop()
            made = node(*grads)  # type: ignore[operator]  # nodes of C++ are callable, the stub does not say so
            made = made if isinstance(made, tuple) else (made,)
            self.add_roots((edge, made[i]) for i, edge in borders)
            drop_saved_tensors(node)


_first_parts: dict[int, Graph] = {}  # those that run now, by the engine's numbers


def is_in_first_part() -> bool:
    """Whether the backward that runs now is a first part: what a node in Python leaves out is lost then (Rule 4)."""
    return torch._C._current_graph_task_id() in _first_parts


def is_wanted_later(node: Node | None) -> bool:
    """Whether the backward that runs now is a first part, whose second part wants what flows to `node`.

    Args:
        node: what stands for weights that are elsewhere.
    """
    graph = _first_parts.get(torch._C._current_graph_task_id())
    if graph is not None:
        return node in graph.wanted
    return node is not None and is_first_part_of_a_schedule()


def _first_part(graph: Graph, roots: Sequence[Root]) -> tuple[Gradients, PendingWeightGradients]:
    second = _SecondPart(graph, roots)
    known = [i for i, edge in enumerate(graph.weights) if edge and edge.node in graph.known]
    behind = graph.edges_to_behind()
    flowed: dict[Node, Gradients] = {}
    numbers: list[int] = []
    handles = _watch_inner_nodes(graph, second, flowed, numbers)
    try:
        grads = _engine_pass(
            [root for root in roots if root.edge.node in graph.known],
            [*graph.inputs, *(graph.weights[i] for i in known), *behind],
            retain_graph=True,
        )
    finally:
        for handle in handles:
            handle.remove()
        for number in numbers:
            _first_parts.pop(number, None)
    _drop_all(graph.inner - flowed.keys())
    grads_of_inputs, rest = grads[: len(graph.inputs)], grads[len(graph.inputs) :]
    second.known.update(zip(known, rest, strict=False))
    second.add_behind(graph, zip(behind, rest[len(known) :], strict=True))
    second.add_recalls(_Recall(node, given, graph.borders(node)) for node, given in reversed(flowed.items()))
    return grads_of_inputs, PendingWeightGradients(second)


def _all_at_once(graph: Graph, roots: Sequence[Root]) -> tuple[Gradients, PendingWeightGradients]:
    grads = _engine_pass(roots, [*graph.inputs, *graph.weights])
    second = _SecondPart(graph, ())
    second.known.update(enumerate(grads[len(graph.inputs) :]))
    return grads[: len(graph.inputs)], PendingWeightGradients(second)


def _drop_all(nodes: Iterable[Node]) -> None:
    in_python = [node for node in nodes if is_python(node)]
    for node in nodes:
        if not is_python(node):
            drop_saved_tensors(node)
    if in_python:
        _in_graph_task((), lambda: drop_in_python(in_python))


def _watch_inner_nodes(
    graph: Graph, second: _SecondPart, flowed: dict[Node, Gradients], numbers: list[int]
) -> list[Any]:
    """Hook the nodes above the borders: keep what flows in (Rule 2), or what comes out in Python (Rule 4)."""
    handles = []
    for node in graph.inner:
        borders = graph.borders(node)
        if is_python(node):
            handles.append(node.register_prehook(functools.partial(_note_first_part, graph, numbers)))
            if borders:
                handles.append(node.register_hook(functools.partial(_keep_made, second, borders)))
        elif borders:
            handles.append(node.register_prehook(functools.partial(flowed.__setitem__, node)))
    return handles


def _note_first_part(graph: Graph, numbers: list[int], _: Gradients) -> None:
    numbers.append(torch._C._current_graph_task_id())
    _first_parts[numbers[-1]] = graph


def _keep_made(second: _SecondPart, borders: Borders, made: Gradients, _: Gradients) -> None:
    second.add_roots((edge, made[i]) for i, edge in borders)
    second.watch(made[i] for i, _ in borders)


def _engine_pass(roots: Sequence[Root], targets: Edges, retain_graph: bool = False) -> Gradients:
    """Call `torch.autograd.grad`, which wants no `None` among its targets and at least one of each."""
    wanted = [target for target in targets if target]
    if not roots or not wanted:
        return (None,) * len(targets)
    edges, grads = [root.edge for root in roots], [root.grad for root in roots]
    made = iter(torch.autograd.grad(edges, wanted, grads, retain_graph=retain_graph, allow_unused=True))
    return tuple(next(made) if target else None for target in targets)


def _in_graph_task(wanted: Sequence[GradientEdge], body: Callable[[], None]) -> None:
    """Run `body` inside an engine pass that wants these edges only, and frees what it uses.

    The pass has one node of its own, whose hook is `body`. A node that `body` calls asks the current graph
    task which of its gradients are wanted.
    """
    start = torch.zeros((), device="cpu", requires_grad=True)
    start.register_hook(lambda _: body())
    torch.autograd.grad(start, (get_gradient_edge(start), *wanted), allow_unused=True)


def _fitted(grad: torch.Tensor, edge: GradientEdge) -> torch.Tensor:
    """Sum a broadcast gradient to the shape of its edge, and cast it: what the engine does between nodes."""
    metadata = edge.node._input_metadata[edge.output_nr]
    if metadata.is_nested_tensor or (grad.is_complex() and not metadata.dtype.is_complex):
        return grad  # a complex one for what is real is refused, as between nodes
    if grad.shape != torch.Size(metadata.shape):
        grad = grad.sum_to_size(metadata.shape)
    return grad.to(metadata.dtype)
