"""Pure functions over lists of gradients, where `None` stands for a parameter that got none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experts_server.hosting.own_memory import storages

Gradients = Sequence[Tensor | None]

_CAN_BE_INFINITE = frozenset(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it; the rare other case is looked at exactly."""
    if tensor.dtype not in _CAN_BE_INFINITE:
        return True
    total = tensor.sum().item()
    return (math.isfinite(total.real) and math.isfinite(total.imag)) or bool(tensor.isfinite().all())


def are_surely_finite(tensors: Gradients) -> bool:
    """Whether all sums are finite, which proves that all values are; tensors on a device are waited for once."""
    sums = [t.sum() for t in tensors if t is not None and t.dtype in _CAN_BE_INFINITE]
    return not sums or bool(torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all())


def differentiate(
    roots: Sequence[Tensor], root_grads: Sequence[Tensor], targets: Sequence[Tensor], *, retain_graph: bool
) -> Gradients:
    """Return the gradients of `targets`, as `torch.autograd.grad` does with `allow_unused`.

    Without its checks, which take as long as a small backward: what comes here has been checked. Sparse ones are made
    dense, so that they can be added, weighed, saved and sent.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    grads: Gradients = engine.run_backward(
        tuple(roots),
        tuple(root_grads),
        retain_graph,
        False,  # create_graph
        tuple(targets),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return dense(grads)


def dense(grads: Gradients) -> Gradients:
    """Return the same gradients, each as a dense tensor: `torch.nn.Embedding(sparse=True)` gives others."""
    for grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            return [None if grad is None else grad.to_dense() for grad in grads]
    return grads


def laid_out_like(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return a gradient with its parameter's strides, as `.grad` has them in torch: fused steps count on it.

    They read both from the first byte to the last, also beyond the memory of one that is `expand`ed.
    """
    if grad is None or grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def added(old: Gradients, new: Gradients) -> Gradients:
    """Return the sums, in memory of their own where both sides have a gradient; an empty `old` is all `None`."""
    if not old:
        return new
    return [b if a is None else a if b is None else a + b for a, b in zip(old, new, strict=True)]


def clipped_to_value(grads: Gradients, max_value: float) -> Gradients:
    """Return the gradients as `torch.nn.utils.clip_grad_value_` would make them, leaving the given ones alone."""
    return [None if grad is None else grad.clamp(-max_value, max_value) for grad in grads]


def clipped_to_norm(grads: Gradients, max_norm: float) -> Gradients:
    """Return the gradients as `torch.nn.utils.clip_grad_norm_` would make them, leaving the given ones alone."""
    total = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return [None if grad is None else grad * scale for grad in grads]


def num_bytes(grads: Gradients) -> int:
    """Return the bytes of all of them together."""
    return sum(grad.nbytes for grad in grads if grad is not None)


class GraphWeigher:
    """Adds up what autograd saves: all tensors, and the memory of those that is not there anyhow."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.num_bytes = 0
        self.num_saved = 0
        self._seen = {memory.data_ptr() for tensor in known for memory in storages(tensor)}

    def weighing(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts what is saved within."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def weigh(self, tensor: Tensor) -> None:
        """Count the memory that a tensor keeps, once."""
        for memory in storages(tensor):
            if memory.data_ptr() not in self._seen:
                self._seen.add(memory.data_ptr())
                self.num_bytes += memory.nbytes()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        self.num_saved += 1
        self.weigh(tensor)
        return tensor.detach(), tensor._version  # the tensor itself could be the node's own output: a cycle


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    """Return what was saved; where there are hooks, torch does not look whether it was changed since."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}."
        )
    return tensor
