"""Find the tensors with history that a callable holds, before it is called."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Cut = tuple[GradientEdge, Tensor]  # where an inner graph ends, and the outer tensor that stands there


def find_cuts(module: object) -> list[Cut]:
    """Return the tensors with history that a callable holds: by name, in its closure or bound arguments (Rule 3)."""
    if isinstance(module, torch.nn.Module):
        tensors = _held_by_module(module)
        return [(get_gradient_edge(tensor), tensor) for tensor in tensors] if tensors else []
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    to_visit: list[object] = [module]
    while to_visit:
        held = to_visit.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            if held.grad_fn is not None:
                found[id(held)] = held
        else:
            to_visit += _held_by(held)
    return [(get_gradient_edge(tensor), tensor) for tensor in found.values()]


def _held_by(value: object) -> Iterable[object]:
    if isinstance(value, torch.nn.Module):
        return _held_by_module(value)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        # Of the globals only tensors: following functions there would walk through whole libraries.
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        tensors = [held for held in named if isinstance(held, Tensor)]
        return (*cells, *tensors, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    # Of other objects only their tensors: following the rest could walk through a whole program.
    attributes = getattr(value, "__dict__", None)
    is_plain = isinstance(attributes, dict) and not isinstance(value, type | types.ModuleType)
    return (
        [held for held in attributes.values() if isinstance(held, Tensor)] if is_plain and attributes else ()
    )


def _held_by_module(module: torch.nn.Module) -> list[Tensor]:
    """Computed weights stand as attributes, as parameters (`torch.func.functional_call`) or as buffers.

    Every call of a module asks, so this reads the dictionaries themselves, not `Module.modules()`.
    """
    found: list[Tensor] = []
    parts = [module]
    for part in parts:  # grows
        attributes = part.__dict__
        parameters, buffers, children = (
            attributes["_parameters"],
            attributes["_buffers"],
            attributes["_modules"],
        )
        for held in attributes.values():
            if type(held) is Tensor and held.grad_fn is not None:
                found.append(held)
        for held in (*parameters.values(), *buffers.values()):
            if held is not None and held.grad_fn is not None:
                found.append(held)
        if children:
            parts += [child for child in children.values() if child is not None]
    return found


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # a cell tells only this way
    except ValueError:
        return True
    return False
