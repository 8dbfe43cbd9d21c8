"""What is looked at before a call may change anything. A check raises, `InvalidCallError` mostly, or does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from experts_server.hosting.calls import BackwardCall, ForwardCall
from experts_server.hosting.gradients import Gradients, are_surely_finite, is_finite
from experts_server.spec import InputSpec, infer_spec
from moe_autograd.autograd.anchors import lead_to_anchors, trained_elsewhere
from moe_autograd.autograd.offload import checks as offload_checks
from moe_autograd.autograd.offload.flat import is_made_of_others
from moe_autograd.autograd.walks import Edge
from moe_autograd.errors import ConfigError, ExpertFailedError, ExpertNotFoundError, InvalidCallError

_INSTEAD = "Let clients call it, beside this one, or freeze it: requires_grad_(False)."
_INSTEAD_OF_HOOKS = (
    "Let the optimizer's step do it, such as by register_step_pre_hook, or set clip_grad_value."
)


def check_calls(place: str, module: nn.Module) -> None:
    """Raise `ConfigError` for a module of which every call would fail: it has no forward, or no mode to be set to."""
    kind = type(module)
    if kind.__call__ is nn.Module.__call__ and _forward_of(module) in (None, nn.Module.forward):
        raise ConfigError(
            f"{place}: expected a module with a forward, got {kind.__name__}, which has none of its own. Host one that "
            "calls its parts, such as nn.Sequential."
        )
    if not hasattr(module, "training"):
        raise ConfigError(
            f"{place}: expected a module that trains or evaluates, got {kind.__name__} without a mode. If torch.jit "
            "has frozen it, host it as it was before."
        )


def _forward_of(module: nn.Module) -> object:
    forward = getattr(module, "forward", None)
    return getattr(forward, "__func__", forward)


def check_weights(place: str, module: nn.Module) -> None:
    """Raise `ConfigError` for weights that cannot be sent, saved or found in memory."""
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_lazy = nn.parameter.is_lazy(tensor)
        if is_lazy or tensor.is_meta:
            raise ConfigError(
                f"{place}: expected weights with values, got {key!r} {'without a shape' if is_lazy else 'on meta'}. "
                "Say how large they are, and on which device."
            )
        if is_made_of_others(tensor):
            raise ConfigError(
                f"{place}: expected weights with memory of their own, got {type(tensor).__name__}, which is "
                f"made of other tensors (key={key!r}). Host the module as it was before these came into it."
            )


def check_parts(place: str, module: nn.Module) -> None:
    """Raise `ConfigError` for a module, to be trained, in which there are experts that are trained elsewhere."""
    for name in trained_elsewhere(module):
        raise ConfigError(
            f"{place}: expected a module that is trained here as a whole, got {f'a part {name!r}' if name else 'one'} "
            f"that is on a server or offloaded, whose weights would get no gradient. {_INSTEAD}"
        )


def check_hooks(place: str, module: nn.Module) -> None:
    """Raise `ConfigError` for a module, to be trained, with hooks that would never run: gradients gather by client."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and _is_hooked(parameter):
            raise ConfigError(
                f"{place}: expected weights without post-accumulate-grad hooks, got one on {name!r}. Gradients gather "
                f"by client here, and not in .grad. {_INSTEAD_OF_HOOKS}"
            )


def check_late_hooks(expert: str, parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ExpertFailedError` if such a hook has come since."""
    for parameter in parameters:
        if parameter._post_accumulate_grad_hooks and _is_hooked(parameter):
            raise ExpertFailedError(
                f"expert {expert!r}: expected weights without post-accumulate-grad hooks, got one on a weight of shape "
                f"{tuple(parameter.shape)}. Nothing was changed. {_INSTEAD_OF_HOOKS}"
            )


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a post-accumulate-grad hook of a user is on a weight: offloading has some of its own."""
    try:
        offload_checks.check_hooks("", {"": parameter})
    except ValueError:
        return True
    return False


def check_all_are_own(place: str, module: nn.Module, optimizer: object) -> None:
    """Raise `ConfigError` for an optimizer with more weights than the module's, which would get no gradients.

    One may have others in their place: copies of more bits, or all of them in one.
    """
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    held = {parameter for group in groups for parameter in group["params"]}
    own = set(module.parameters())
    missing = [parameter for parameter in own - held if parameter.requires_grad]
    others = held - own
    if len(others) > len(missing):
        shapes = sorted(str(tuple(other.shape)) for other in others)
        raise ConfigError(
            f"{place}: expected an optimizer of weights of this module, got one with {len(others)} that are not among "
            f"its parameters() (shapes: {', '.join(shapes[:4])}). They would get no gradient here. Register them in "
            "the module, and give each expert an optimizer of its own."
        )


def check_reached(place: str, results: Iterable[Edge]) -> None:
    """Raise `ExpertFailedError` if a call's graph leads to experts that are trained elsewhere."""
    if lead_to_anchors(results):
        raise ExpertFailedError(
            f"{place}: expected its module to compute with weights of its own, got a call of an expert on a server or "
            f"offloaded, whose weights would get no gradient. {_INSTEAD}"
        )


def check_frozen(expert: str, weights: Mapping[str, nn.Parameter]) -> None:
    """Raise `ExpertFailedError` if a weight wants a gradient now that no optimizer has, by whom it is not trained."""
    for name, weight in weights.items():
        if weight.requires_grad:
            raise ExpertFailedError(
                f"expert {expert!r}: expected weights that its optimizer has not got to stay frozen, got {name!r} "
                "thawed. Nothing was changed. Host it thawed, or make the optimizer of it as well."
            )


def check_inputs(expert: str, spec: InputSpec, call: ForwardCall | BackwardCall, module: nn.Module) -> None:
    """Check number, shape and dtype of a call's inputs, as far as the expert is known without asking it.

    Args:
        expert: its name.
        spec: of `module` as it was hosted. Hooks that have come since may take what it refuses.
        call: whose inputs they are.
        module: is looked at again where the inputs do not fit.

    Raises:
        InvalidCallError: they cannot be right.
    """
    inputs = call.inputs
    if inputs is None:
        return
    if not inputs:
        raise InvalidCallError(f"expert {expert!r}: expected at least one tensor, got none. Pass its inputs.")
    wrong = spec.mismatch(expert, inputs[0]) if spec.is_certain else None
    if wrong is not None and infer_spec(module) == spec:
        raise InvalidCallError(wrong)
    wanted = call.input_requires_grad if isinstance(call, ForwardCall) else call.wants_input_grads
    if any(
        needs and not (x.is_floating_point() or x.is_complex())
        for x, needs in zip(inputs, wanted, strict=False)
    ):
        raise InvalidCallError(
            f"expert {expert!r}: expected floating inputs where gradients are wanted, got "
            f"{[str(x.dtype) for x in inputs]}. Only floating tensors have gradients."
        )


def check_grad_outputs(expert: str, call: BackwardCall, shapes: Sequence[torch.Size] | None) -> None:
    """Check that there is a finite gradient (or None) for each output; `shapes` is `None` if they are not known."""
    grads = call.grad_outputs
    if shapes is not None:
        if len(grads) != len(shapes):
            raise InvalidCallError(
                f"expert {expert!r}: expected {len(shapes)} grad_outputs, one for each output, got {len(grads)}."
            )
        for index, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
            if grad is not None and grad.shape != shape:
                raise InvalidCallError(
                    f"expert {expert!r}: expected grad_outputs[{index}] of the output's shape {tuple(shape)}, got "
                    f"{tuple(grad.shape)} (dtype={grad.dtype})."
                )
    if not call.is_finite:
        check_finite(expert, grads, "grad_outputs")


def check_same_shapes(expert: str, first: Sequence[torch.Size], again: Sequence[torch.Size]) -> None:
    """Raise `ExpertFailedError` unless a forward that ran again returned what it returned at first."""
    if first != again:
        both = " again, got ".join(str([tuple(shape) for shape in shapes]) for shapes in (first, again))
        raise ExpertFailedError(
            f"expert {expert!r}, backward: expected its module to return tensors of shapes {both}. Forwards are "
            "computed again for their backward; let the module do the same each time."
        )


def check_replica(expert: str, replica: int, call: BackwardCall) -> None:
    """Check that a forward is computed again by the replica that made it: each has weights of its own."""
    if call.replica not in (0, replica):
        raise ExpertNotFoundError(
            f"expert {expert!r}: expected the replica that made the forward, got another one. Has a server been "
            "started where another one was, or without its checkpoint? Repeat the forward."
        )


def check_finite(expert: str, tensors: Gradients, what: str) -> None:
    """Check that all values are finite."""
    are_on_a_device = len(tensors) > 1 and (last := tensors[-1]) is not None and not last.is_cpu
    if are_on_a_device and are_surely_finite(tensors):
        return
    for index, tensor in enumerate(tensors):
        if tensor is not None and not is_finite(tensor):
            num_bad = int((~tensor.isfinite()).sum())
            raise InvalidCallError(
                f"expert {expert!r}, {what} {index}: expected finite values, got {num_bad} of {tensor.numel()} that "
                f"are not (shape={tuple(tensor.shape)}). Nothing was changed."
            )
