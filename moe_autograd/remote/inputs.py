"""What is looked at in a call before anything travels: its inputs, and what a server says of its expert (`wire.specs`).

A server says it only where it is certain; everything else it checks itself when a call arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_autograd._ambient import is_recorded, refuse_transforms
from moe_autograd._streams import accelerator_in_use
from moe_autograd.errors import CorruptDataError, InvalidCallError, UnsupportedTransformError
from moe_autograd.wire.heads import Tensors
from moe_autograd.wire.tensors import check_can_travel

if TYPE_CHECKING:
    from moe_autograd.remote.placement import HostedExpert

_Mode: Any = torch._C._TorchDispatchModeKey
# Modes that record operators, or make up results.
_WITHOUT_NUMBERS = (_Mode.FAKE, _Mode.FUNCTIONAL)


def on_devices_of(inputs: Sequence[Tensor], results: Tensors) -> Tensors:
    """Return what a server sent, each where its input is: outputs of a module are where its inputs are."""
    if len(inputs) == 1 and inputs[0].is_cpu:  # mostly
        return results
    return tuple([y if y is None else y.to(x.device) for x, y in zip(inputs, results, strict=True)])


def wait_until_made(tensors: Iterable[Any]) -> None:
    """Wait until those on devices have their values, which streams of this thread may still be computing.

    Call it on the calling thread: those that send them have streams of their own, in no order with these.
    """
    accelerator = accelerator_in_use()
    if accelerator is None:
        return
    devices = {x.device for x in tensors if isinstance(x, Tensor) and not x.is_cpu}
    for device in devices:
        if device.type == accelerator.kind:
            accelerator.current_stream(device.index).synchronize()


def check_tensors(expert: str, inputs: tuple[Any, ...]) -> None:
    """Refuse what cannot travel, and to be called where there are no numbers."""
    has_modes = torch._C._len_torch_dispatch_stack()
    if is_recorded(inputs) or (has_modes and any(map(torch._C._get_dispatch_mode, _WITHOUT_NUMBERS))):
        raise UnsupportedTransformError(
            f"expert {expert!r}: expected numbers, got torch.export, make_fx, symbolic_trace or a FakeTensorMode "
            "around it. Its server cannot take part, and what it answers would be a constant there: use a local expert."
        )
    if not inputs:
        raise InvalidCallError(f"expert {expert!r}: expected at least one tensor, got none. Pass its inputs.")
    for position, x in enumerate(inputs):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"expert {expert!r}: expected tensors, got {type(x).__name__} (input={position}). "
                "Only tensors travel; wrap a number in torch.tensor."
            )
        try:
            check_can_travel(x)
        except TypeError as error:
            raise TypeError(f"expert {expert!r}, input {position}: {error}") from error


def check_transforms(name: str, inputs: Iterable[Tensor]) -> None:
    """Refuse what a server would not see; a trace would even keep its answer as a constant.

    Raises:
        UnsupportedTransformError: a `torch.func` transform, `torch.jit.trace` or forward-mode AD.
    """
    try:
        refuse_transforms(inputs)
    except UnsupportedTransformError as error:
        raise UnsupportedTransformError(
            f"expert {name!r}: expected no torch.func transform, torch.jit.trace or forward-mode tangent, got one. "
            "Its server cannot take part: use a local expert there."
        ) from error


def dense(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return gradients as they can travel; those that are sparse (`torch.gather(sparse_grad=True)`) as dense ones.

    Raises:
        UnsupportedTransformError: they are of many backwards at once, which torch gives as tensors without memory.
    """
    found = [g if g is None or g.layout is torch.strided else g.to_dense() for g in grads]
    if not all(grad is None or torch._C._has_storage(grad) for grad in found):
        raise UnsupportedTransformError(
            "remote expert: expected gradients of one backward, got those of many at once (torch.vmap, vectorize=True, "
            "is_grads_batched=True). Its server cannot take part: ask for one after the other, or use a local expert."
        )
    return found


def under_autocast(hosted: HostedExpert, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under autocast, convert floating inputs to the dtype that the expert takes, as operators convert theirs."""

    def converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        is_meant = x.is_floating_point() and dtype is not None and dtype.is_floating_point
        return x.to(dtype) if is_meant and torch.is_autocast_enabled(x.device.type) else x

    wanted = [spec.dtype for spec in hosted.inputs] + [None] * len(inputs)
    return tuple(converted(x, dtype) for x, dtype in zip(inputs, wanted, strict=False))


def refusal_of(hosted: HostedExpert, inputs: tuple[Tensor, ...]) -> InvalidCallError | None:
    """Return why the server would refuse these inputs, before anything travels."""
    for position, (spec, x) in enumerate(zip(hosted.inputs, inputs, strict=False)):
        if (mismatch := spec.mismatch(x)) is not None:
            at = f" (input {position})" if position else ""
            return InvalidCallError(f"expert {hosted.name!r} at {hosted.addresses[0]}{at}: {mismatch}")
    return None


def mismatch_of_outputs(outputs: Tensors, uses: Sequence[int], *, is_sequence: bool) -> str:
    """Return what is wrong with what a server says an expert returned: one tensor, or a sequence of tensors.

    Args:
        outputs: these.
        uses: which of them were computed from which others, as `Call` has it.
        is_sequence: whether it may be several.
    """
    if len(outputs) == 1 and outputs[0] is not None:  # mostly
        return ""
    if is_sequence and all(y is not None for y in outputs):
        if len(uses) % 2 == 0 and all(place < len(outputs) for place in uses):
            return ""
        return f"expected pairs of {len(outputs)} outputs, got {[*uses]}. The server is broken, or of another version."
    got = [None if y is None else tuple(y.shape) for y in outputs]
    expected = "tensors alone" if is_sequence else "one tensor"
    return f"expected {expected}, got {got}. The server is broken, or of another version."


def mismatch_of_grads(
    place: str, inputs: Sequence[Tensor], wants: Sequence[bool], grads: Tensors
) -> CorruptDataError | None:
    """Trust a server's gradients no more than it trusts our inputs: return what is wrong with them."""
    if len(grads) == len(inputs) == 1 and (grad := grads[0]) is not None and wants[0]:  # mostly
        x = inputs[0]
        if grad.shape == x.shape and grad.dtype == x.dtype:
            return None
    expected = [(x.shape, x.dtype) if wanted else None for x, wanted in zip(inputs, wants, strict=True)]
    got = [None if grad is None else (grad.shape, grad.dtype) for grad in grads]
    if got != expected and (
        len(got) != len(expected) or any(g is not None and g != e for g, e in zip(got, expected, strict=True))
    ):
        return CorruptDataError(
            f"{place}: expected gradients {expected}, got {got}. The server is broken, or of another version."
        )
    return None
