"""Calls of what `torch.compile` has made, so that it is compiled as often as in a loop.

Dynamo compiles when a call comes that no compiled version fits: of another shape or dtype, in another grad mode, with
another number of intra-op threads. Of threads that come side by side each compiles one, all alike, until
`torch._dynamo.config.recompile_limit` is reached; from then on such calls run uncompiled, or raise with
`fullgraph=True`. So

1. the forwards of a map, also those that run again, are made one after the other if one may be about to compile: if
   anything was compiled since the last such map, if no map has met what is called, or met it as it is now (`_kind_of`),
   or if there is a shape that no map had before, unless the last new shapes needed nothing new;
2. each call has as many intra-op threads as calls side by side have at least.

Mutable state: `_known` and `_met`; maps that begin at once on several threads may each take turns once more, or once
less.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_autograd._ambient import autocast_state
from moe_autograd._imported import imported
from moe_autograd.autograd.contents.lookups import in_closure

MOST_KINDS, MOST_SHAPES = 256, 4096

_COMPILED_MODULE = "_orig_mod"  # what `torch.compile(module)` returns keeps the module there
_COMPILED_IN_PLACE = "_compiled_call_impl"  # set by `module.compile()`
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"


@dataclasses.dataclass
class _Known:
    """What maps of one kind have met."""

    num_graphs: int = -1  # when the last one began
    shapes: set[Hashable] = dataclasses.field(default_factory=set)
    had_new_shapes: bool = False  # the last one
    takes_any_shape: bool = False  # nothing was compiled for the last new ones

    def meet(self, shapes: set[Hashable]) -> bool:
        """Take note of a map of these shapes; return whether it needs nothing new, as far as those before tell."""
        before, self.num_graphs = self.num_graphs, _num_graphs()
        if self.num_graphs != before:
            self.takes_any_shape = False
        elif self.had_new_shapes:
            self.takes_any_shape = True
        self.had_new_shapes = not shapes <= self.shapes
        if len(self.shapes) > MOST_SHAPES:
            self.shapes.clear()
        self.shapes |= shapes
        return self.num_graphs == before and (self.takes_any_shape or not self.had_new_shapes)


_known: dict[Hashable, _Known] = {}
_met: weakref.WeakSet[Any] = weakref.WeakSet()  # what `torch.compile` has made


def is_compiled(held: Any) -> bool:
    """Whether a module, not counting its parts, or a function is compiled when it is called."""
    own = getattr(held, "__dict__", None)
    if not own:
        return False
    is_in_place = _COMPILED_FUNCTION in own or own.get(_COMPILED_IN_PLACE) is not None
    return is_in_place or _COMPILED_MODULE in own.get("_modules", ())


def meet(compiled: Sequence[Any], args: Iterable[Any]) -> bool:
    """Take note of a map that is about to begin; return whether a call of it may compile something (Rule 1).

    Args:
        compiled: what its calls hold of compiled code.
        args: those of each call.
    """
    leaves = [tree_leaves(own) for own in args]
    if len(_known) > MOST_KINDS:
        _known.clear()
    known = _known.setdefault(_kind_of(compiled, leaves), _Known())
    needs_nothing = known.meet({_shapes_of(own) for own in leaves})
    made = [getattr(one, _COMPILED_IN_PLACE, None) or one for one in compiled]
    are_met = all(one in _met for one in made)
    _met.update(made)
    return not (are_met and needs_nothing)


def _kind_of(compiled: Iterable[Any], leaves: Iterable[Sequence[Any]]) -> Hashable:
    """Return what is compiled for apart, as far as it can be seen before the calls, other than shapes."""
    arguments = frozenset([tuple(map(_kind_of_argument, own)) for own in leaves])
    return frozenset([(_name_of(one), *_modes_of(one)) for one in compiled]), arguments, *_world()


def _name_of(compiled: Any) -> str:
    kind = type(getattr(compiled, _COMPILED_MODULE, compiled))
    return getattr(compiled, "__qualname__", kind.__qualname__)


def _modes_of(compiled: Any) -> Iterator[Hashable]:
    """Return whether parts are in training, and what their parameters are; of a function, the modules around it."""
    around = [compiled]
    if not isinstance(compiled, nn.Module):
        function = getattr(compiled, _COMPILED_FUNCTION)
        around = [getattr(function, "__self__", None), *in_closure(function)]
    for module in around:
        for part in module.modules() if isinstance(module, nn.Module) else ():
            yield part.training
            yield from [(p.dtype, p.requires_grad) for p in [*part._parameters.values()] if p is not None]


def _kind_of_argument(value: Any) -> Any:
    """Return what an argument is; numbers and sizes stand for all others of their kind, but for 0 and 1."""
    if not isinstance(value, Tensor):
        stands_alone = (
            value is None or isinstance(value, bool | str) or (type(value) is int and value in (0, 1))
        )
        return type(value), value if stands_alone else ...
    # one of a jagged tensor is symbolic
    sizes = [min(size, 2) if isinstance(size, int) else ... for size in value.shape]
    is_dense = value.layout is torch.strided and value.is_contiguous()
    kind = type(value), value.dtype, value.device, value.requires_grad, value.is_inference()
    return *kind, tuple(sizes), is_dense


def _world() -> Iterator[Hashable]:
    """Return what dynamo asks of the state of a thread."""
    yield torch.is_grad_enabled()
    yield torch.is_inference_mode_enabled()
    yield torch.get_num_threads()
    yield torch.get_default_dtype()
    yield torch.are_deterministic_algorithms_enabled()
    yield from autocast_state()


def _shapes_of(leaves: Sequence[Any]) -> Hashable:
    """Return the shapes of a call's arguments, and its numbers, which dynamo takes for shapes."""
    return tuple(
        [
            tuple(value.shape) if isinstance(value, Tensor) else value
            for value in leaves
            if isinstance(value, Tensor | int | float)
        ]
    )


def _num_graphs() -> int:
    """Return how many graphs dynamo has compiled in this process."""
    counters = imported("torch._dynamo.utils", "counters")
    return 0 if counters is None else counters["stats"]["unique_graphs"]
