"""What `split_backward` is given: looked at, and said what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge

from moe_autograd.autograd.borders import Edges, Graph, is_python
from moe_autograd.autograd.walks import gradient_edge

Differentiable: TypeAlias = torch.Tensor | GradientEdge


class Root(NamedTuple):
    """An edge to start from, and the gradient that flows into it."""

    edge: GradientEdge
    grad: torch.Tensor


def edges_of(name: str, given: Differentiable | Iterable[Differentiable]) -> Edges:
    """Return where the gradients of `given` go, with `None` for a tensor that requires none."""
    return [_edge_of(f"{name}[{i}]", one) for i, one in enumerate(as_sequence(given))]


def as_sequence(given: Differentiable | Iterable[Differentiable]) -> tuple[Differentiable, ...]:
    """Return a sequence; a single tensor stands for a sequence of one."""
    return (given,) if isinstance(given, torch.Tensor | GradientEdge) else tuple(given)


def _edge_of(name: str, one: Differentiable) -> GradientEdge | None:
    if isinstance(one, GradientEdge):
        return one
    if not isinstance(one, torch.Tensor):
        raise TypeError(
            f"split_backward: expected {name} to be a tensor or a GradientEdge, got {type(one).__name__}."
        )
    return gradient_edge(one) if one.requires_grad else None


def pair_roots(
    outputs: Edges, grad_outputs: torch.Tensor | Iterable[torch.Tensor | None] | None
) -> list[Root]:
    """Pair each output that requires a gradient with the gradient it is given."""
    if outputs and not any(outputs):
        raise RuntimeError(
            f"split_backward: expected an output that requires a gradient, got {len(outputs)} that do not. Compute "
            "them outside of `torch.no_grad` and `torch.inference_mode`."
        )
    if grad_outputs is None:
        grad_outputs = (None,) * len(outputs)
    grads = (grad_outputs,) if isinstance(grad_outputs, torch.Tensor) else tuple(grad_outputs)
    if len(grads) != len(outputs):
        raise ValueError(
            f"split_backward: expected {len(outputs)} grad_outputs, one for each output, got {len(grads)}."
        )
    return [Root(edge, _root_grad(i, edge, grads[i])) for i, edge in enumerate(outputs) if edge]


def _root_grad(i: int, edge: GradientEdge, grad: torch.Tensor | None) -> torch.Tensor:
    metadata = edge.node._input_metadata[edge.output_nr]
    shape = torch.Size(metadata.shape)
    if grad is None and shape.numel() == 1:
        return torch.ones(shape, dtype=metadata.dtype, device=metadata.device)
    if grad is None or grad.shape != shape:
        got = "None" if grad is None else f"one of shape {tuple(grad.shape)}"
        raise ValueError(
            f"split_backward: expected grad_outputs[{i}] of shape {tuple(shape)}, that of its output, got {got}. "
            "Leave out outputs without a gradient."
        )
    return grad


def refuse_hooks_on_the_way(graph: Graph, inputs: Sequence[Differentiable]) -> None:
    """Complain where weights lie behind an input with hooks: the second part would fire them again.

    So would it fire what keeps the gradient of an input that a function in Python has made, and `retain_grad` asks for.
    """
    for i, (one, edge) in enumerate(zip(inputs, graph.inputs, strict=True)):
        if not edge or edge.node not in graph.behind or not isinstance(one, torch.Tensor):
            continue
        if one._backward_hooks:
            what = f"{len(one._backward_hooks)} hooks"
        elif one.retains_grad and is_python(edge.node):
            what = "retain_grad on a result of a function in Python"
        else:
            continue
        raise ValueError(
            f"split_backward: expected no weights behind inputs[{i}], which has hooks, got {what} and weights behind "
            "it. Detach the input, or leave those weights out."
        )
