"""What a call may not leave a module with: tensors that its part has no room for, or that are not what they were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload.flat import Field, kind_of


def fits(field: Field | None, own: Tensor | None, tensor: Tensor | None) -> bool:
    """Whether a field has room for a tensor, which a call has left in the place of `own`."""
    if tensor is None or field is None or tensor.layout is not torch.strided:
        return False
    return kind_of(tensor) == (field.shape, field.dtype) and (tensor is own or tensor.grad_fn is None)


def expected(
    misfit: str,
    own_name: str,
    field: Field | None,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
) -> str:
    """Return what an exception says of the first that does not fit.

    Args:
        misfit: its name.
        own_name: of the tensor that it was one with, which parts shared.
        field: that it had.
        module: as the call has left it.
        tensors: of the module, each once.
    """
    if own_name != misfit:
        return (
            f"expected a call to leave {misfit} and {own_name} one tensor, got two. Give all parts that share one the "
            "new one, or each its own before the module is taken over."
        )
    buffer = dict(module.named_buffers(remove_duplicate=False)).get(misfit)
    twin = next((name for name, tensor in tensors.items() if name != misfit and tensor is buffer), None)
    if twin is not None:
        return (
            f"expected a call to leave {misfit} and {twin} two tensors, got one. Give {misfit} a clone of it."
        )
    tensor = tensors.get(misfit)
    if field is not None and fits(field, tensor, tensor):
        return (
            f"expected a call to leave {misfit} without a history, got what was computed from tensors that require "
            "gradients; none flows from call to call by a buffer. Detach it, or return it and pass it to the next call."
        )
    before = "no " + misfit if field is None else f"{misfit} of {_kind(field)}"
    return (
        f"expected a call to leave {before}, got {'none' if tensor is None else _kind(tensor)}. Make buffers as large "
        "as they get before the module is taken over, or keep what comes and goes in a plain attribute."
    )


def _kind(tensor: Tensor | Field) -> str:
    layout = f", {tensor.layout}" if isinstance(tensor, Tensor) and tensor.layout is not torch.strided else ""
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}{layout}"
