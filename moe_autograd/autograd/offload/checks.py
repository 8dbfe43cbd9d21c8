"""What `OffloadedExperts` refuses: before it does anything, and of calls whose gradients it would lose."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from moe_autograd._ambient import is_recorded, refuse_transforms
from moe_autograd._signatures import signature_of
from moe_autograd.autograd.anchors import stands_for_none
from moe_autograd.autograd.contents.in_objects import tensors_in_objects
from moe_autograd.autograd.grad_dtypes import grad_dtype_of
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.walks import walk
from moe_autograd.autograd.wrapped_hooks import innermost
from moe_autograd.errors import UnsupportedTransformError


def check_training(optimizer: object | None, num_microbatches: int | None, update: str) -> None:
    """Raise `TypeError` or `ValueError` for options of the training that make no sense."""
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            "OffloadedExperts: expected optimizer to make one from an expert's parameters, got "
            f"{type(optimizer).__name__}. Pass a function such as lambda parameters: torch.optim.Adam(parameters)."
        )
    if num_microbatches is not None and not (
        hasattr(num_microbatches, "__index__") and num_microbatches >= 1
    ):
        raise ValueError(
            f"OffloadedExperts: expected a whole num_microbatches of at least 1 or None, got {num_microbatches}."
        )
    if update not in ("on_step", "on_backward"):
        raise ValueError(f"OffloadedExperts: expected update='on_step' or 'on_backward', got {update!r}.")


def check_memory(max_resident_bytes: Any, beside: object | None, store: object) -> None:
    """Raise `TypeError` or `ValueError` for options of the memory that make no sense, or not together."""
    if (max_resident_bytes is None) == (beside is None):
        raise ValueError(
            "OffloadedExperts: expected max_resident_bytes or beside, got "
            f"max_resident_bytes={max_resident_bytes} and beside={beside!r}. Pass one of them."
        )
    if isinstance(max_resident_bytes, str):
        raise TypeError(
            f"OffloadedExperts: expected max_resident_bytes in bytes, got {max_resident_bytes!r}. A GiB is 1 << 30."
        )
    _check_store(store)
    if beside is not None and store != "ram":
        raise ValueError(
            f"OffloadedExperts: expected no store with beside, whose store they share, got {store!r}. Leave it out."
        )


def _check_store(store: object) -> None:
    """Refuse what is a path to a shell alone, and other spellings of "ram", of which folders would be made."""
    if isinstance(store, str | Path):
        if not str(store) or str(store).startswith("~"):
            raise ValueError(
                f'OffloadedExperts: expected store="ram" or a folder, written out, got {str(store)!r}. Of a name that '
                "begins with '~' pass './~'; os.path.expanduser finds your own folder."
            )
        if isinstance(store, str) and store != "ram" and sorted(store.strip().lower()) == sorted("ram"):
            raise ValueError(
                f'OffloadedExperts: expected store="ram" or a folder, got {store!r}. Of a folder with this name pass '
                f"Path({store!r})."
            )
    elif not all(hasattr(store, name) for name in ("write", "read", "remove")):
        raise TypeError(
            f'OffloadedExperts: expected store="ram", a folder or a Store, got {type(store).__name__}. A Store has '
            "write, read and remove."
        )


def check_stays(name: str, tensors: Iterable[Tensor], convert: Callable[[Tensor], Tensor]) -> None:
    """Raise `TypeError` if what `Module.to` and its like do to tensors would give these another dtype or device."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        got = convert(torch.empty(0, dtype=dtype, device=device))
        if (got.dtype, got.device) != (dtype, device):
            raise TypeError(
                f"offloaded expert {name!r}: expected to stay {dtype} on {device}, got {got.dtype} on {got.device}. "
                "Build OffloadedExperts of such modules (device=...), and convert the rest of a model by itself."
            )


def check_optimizer(name: str, made: Any) -> None:
    """Raise `TypeError` for what is no optimizer: a function may have forgotten to return its own.

    And for one whose step wants something else: nobody has it here.
    """
    if not all(hasattr(made, attribute) for attribute in ("param_groups", "state", "step")):
        raise TypeError(
            f"{name}: expected a torch.optim.Optimizer from optimizer(parameters), got {type(made).__name__}. Return "
            "one, or pass optimizer=None for experts that are not trained."
        )
    sparse = isinstance(made, torch.optim.SparseAdam)
    wanted = ["sparse gradients"] if sparse else _wanted_by(_without_schedule(made, made.step))
    if wanted:
        raise TypeError(
            f"{name}: expected an optimizer that steps by dense gradients alone, got {type(made).__name__}, whose step "
            f"wants {', '.join(wanted)}. Choose another, or train this expert as a plain module."
        )


def _without_schedule(made: Any, step: Any) -> Any:
    """Return what a schedule has put a function in the place of, which looks as one that wants `self`."""
    if isinstance(step, functools.partial):
        return functools.partial(_without_schedule(made, step.func), *step.args, **step.keywords)
    return step.__wrapped__.__get__(made) if hasattr(step, "_wrapped_by_lr_sched") else step


def _wanted_by(step: Callable[..., Any]) -> list[str]:
    """Return the names of what cannot be left out of a call."""
    try:
        parameters = signature_of(step).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return []
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def refuse_late_state(name: str, optimizer: Optimizer) -> None:
    """Have an optimizer's `load_state_dict` raise from now on: what it sets would be lost when the expert leaves."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            f"{name}: expected its optimizer's state to be loaded before the expert is taken over, got "
            "load_state_dict() afterwards. Call it in the function that makes the optimizer, or restore() a checkpoint."
        )

    if hasattr(optimizer, "register_load_state_dict_pre_hook"):  # wrappers of others may have none
        optimizer.register_load_state_dict_pre_hook(refuse)


def each_module(experts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield what is to be offloaded, one at a time.

    Raises:
        TypeError: one module instead of several, or what is none.
    """
    if not isinstance(experts, Iterable):
        raise TypeError(
            f"OffloadedExperts: expected several modules, got one {type(experts).__name__}. Pass a list or a generator."
        )
    for index, module in enumerate(experts):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"OffloadedExperts: expected every expert to be an nn.Module, got {module!r} (index={index}). Wrap a "
                "function in a module; of a class, pass an instance, and of a mapping its values()."
            )
        yield module


def check_note(note: Any) -> None:
    """Raise `TypeError` unless a checkpoint can hold it."""
    try:
        json.dumps(note)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"OffloadedExperts.checkpoint: expected a note of what JSON knows, got another ({error}). "
            "Save tensors in a file of their own."
        ) from error


def check_hooks(name: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `ValueError` for hooks that would never run: nothing is accumulated in `.grad`."""
    for parameter_name, parameter in parameters.items():
        all_hooks: Any = parameter._post_accumulate_grad_hooks or {}
        hooks = [hook for hook in all_hooks.values() if not isinstance(innermost(hook), _RefusingGradients)]
        if hooks:
            raise ValueError(
                f"OffloadedExperts: expected no post-accumulate-grad hooks, got {len(hooks)} on {parameter_name} of "
                f"{name}, whose gradients are not in .grad. Remove them; update='on_backward' updates in the backward."
            )


def refuse_gradients_from_elsewhere(name: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Have a backward raise from now on that accumulates in `.grad`, which no update would see."""
    for parameter_name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_RefusingGradients(name, parameter_name))


class _RefusingGradients:
    """A hook of a weight; calls of its expert gather gradients, so what arrives in `.grad` is of another use."""

    def __init__(self, name: str, parameter_name: str) -> None:
        self._name, self._parameter_name = name, parameter_name

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        parameter.grad = None
        raise RuntimeError(
            f"{self._name}: expected {self._parameter_name} to be used in calls of the expert alone, got a gradient of "
            "another use, which no update would see. Give a layer outside a weight of its own, or keep the expert in "
            "memory; a penalty on weights belongs into the expert's forward."
        )


def check_values(name: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise `ValueError` for tensors that have no bytes yet, or have them elsewhere."""
    for tensor_name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta or tensor.device != device:
            got = "without a shape" if is_lazy(tensor) else f"on {tensor.device}"
            raise ValueError(
                f"{name}: expected {tensor_name} with values, on {device}, got one {got}. Call a lazy module once and "
                "load a meta one before, and pass device= if experts are on several."
            )


def check_not_cached(name: str, put_there: Mapping[Any, weakref.ref[Tensor]]) -> None:
    """Raise `RuntimeError` if `parametrize.cached()` would give a call what an earlier one computed of its weights.

    Each call has a graph of its own, which its backward frees.

    Args:
        name: the expert's.
        put_there: what calls have put into the cache, by its keys there.
    """
    if any(
        (value := put()) is not None and parametrize._cache.get(key) is value
        for key, put in put_there.items()
    ):
        raise RuntimeError(
            f"{name}: expected one call within parametrize.cached(), got another one (a micro-batch counts, and a "
            "second run in the backward), which would share a graph with the first. Enter parametrize.cached() within "
            "the expert's forward."
        )


def check_trained(name: str, trained: Iterable[str], known: Collection[str]) -> None:
    """Raise `RuntimeError` for parameters that have no place for a gradient."""
    for parameter_name in trained:
        if parameter_name not in known:
            raise RuntimeError(
                f"{name}: expected {parameter_name} to stay frozen, as it was when it was taken over, got "
                "requires_grad=True. Freeze after building OffloadedExperts, not before."
            )


def check_gathered(
    name: str, parameters: Mapping[str, nn.Parameter], places: Mapping[str, torch.dtype], *, is_trained: bool
) -> None:
    """Raise for what may have come to parameters since, and would lose or change the gradients that a call gathers.

    Args:
        name: of the expert.
        parameters: of it.
        places: the dtype of each place for a gradient.
        is_trained: whether the gradients are wanted at all.

    Raises:
        ValueError: hooks that would never run, or a gradient that may have another dtype than the place for it.
        RuntimeError: a parameter that has no place for a gradient.
    """
    check_hooks(name, parameters)
    require = {n: parameter for n, parameter in parameters.items() if parameter.requires_grad}
    check_trained(name, require, places)
    for parameter_name, parameter in require.items() if is_trained else ():
        expected, got = places[parameter_name], grad_dtype_of(parameter)
        if got is not expected:
            raise ValueError(
                f"{name}: expected {parameter_name} with grad_dtype={expected}, got {got}: the place for its gradient "
                "has one dtype. Set it before OffloadedExperts takes the module over, and not to None."
            )


def check_transforms(name: str, leaves: Sequence[object]) -> None:
    """Raise `UnsupportedTransformError` for what does not see into a call, or would record weights that leave."""
    try:
        refuse_transforms(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if is_recorded(leaves):
            raise UnsupportedTransformError("make_fx or symbolic_trace")
    except UnsupportedTransformError as error:
        raise UnsupportedTransformError(
            f"{name}: expected no torch.func transform, torch.jit.trace, torch.export, make_fx, symbolic_trace or "
            "forward-mode tangent, got one. It cannot take part, as its weights come and go: use the plain module "
            "there."
        ) from error


def check_reached(
    name: str, outputs: Iterable[GradientEdge | None], own: Iterable[GradientEdge | None]
) -> None:
    """Raise `RuntimeError` if a call's graph leads to leaves that nobody asks for the gradient of.

    Args:
        name: the expert's.
        outputs: of the call.
        own: the inputs and the weights.
    """
    known = {edge.node for edge in own if edge}
    for node, _ in walk([edge[:2] for edge in outputs if edge], known):
        leaf: Tensor | None = node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]
        if leaf is not None and not stands_for_none(leaf):
            raise RuntimeError(
                f"{name}: expected a call to compute with its inputs and its own weights, got a tensor of shape "
                f"{tuple(leaf.shape)} that requires a gradient and would get none. Pass it as an argument, register it "
                "before OffloadedExperts takes the module over, or let it require no gradient. In place of a leaf that "
                "the call makes of an input (x.detach().requires_grad_()) take the input itself (x.requires_grad_())."
            )


def check_returned(name: str, values: Iterable[object], is_wrong: Callable[[Tensor], bool]) -> None:
    """Raise `TypeError` if an object that a call returned, and that is no pytree, holds a tensor that `is_wrong`."""
    for value in values:
        if any(is_wrong(tensor) for _, tensor in tensors_in_objects([value])):
            raise TypeError(
                f"{name}: expected tensors, also in tuples, lists and dicts, from a call, got {type(value).__name__}, "
                "which holds some. Return them as a dict, or register the class with "
                "torch.utils._pytree.register_pytree_node."
            )
