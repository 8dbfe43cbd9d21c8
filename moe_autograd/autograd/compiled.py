"""Calls of what `torch.compile` has made, so that it is compiled as often as in a loop.

Dynamo compiles when a call comes that no compiled version fits: of another shape, or with another number of intra-op
threads. Of threads that come side by side each compiles one, all alike, until `torch._dynamo.config.recompile_limit` is
reached; from then on such calls run uncompiled, or raise with `fullgraph=True`. So

1. the forwards of a map, also those that run again, are made one after the other if one may be about to compile: if
   anything was compiled since the last such map, or if there is a shape that no map had before, unless the last new
   shapes needed nothing new;
2. each call has as many intra-op threads as calls side by side have at least.

Mutable state: `_known`; maps that begin at once on several threads may each take turns once more, or once less.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

MOST_SHAPES = 4096

_COMPILED_MODULE = "_orig_mod"  # what `torch.compile(module)` returns keeps the module there
_COMPILED_IN_PLACE = "_compiled_call_impl"  # set by `module.compile()`
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"


@dataclasses.dataclass
class _Known:
    """What maps of one kind of compiled code have met."""

    num_graphs: int = -1  # when the last one began
    shapes: set[tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=set)
    had_new_shapes: bool = False  # the last one
    takes_any_shape: bool = False


_known: dict[frozenset[str], _Known] = {}


def is_compiled(held: Any) -> bool:
    """Whether a module, not counting its parts, or a function is compiled when it is called."""
    own = getattr(held, "__dict__", None)
    if not own:
        return False
    is_in_place = _COMPILED_FUNCTION in own or own.get(_COMPILED_IN_PLACE) is not None
    return is_in_place or _COMPILED_MODULE in own.get("_modules", ())


def may_compile(compiled: Iterable[Any], args: Iterable[Any]) -> bool:
    """Whether a call of a map that is about to begin may compile something (Rule 1).

    Args:
        compiled: what its calls hold of compiled code.
        args: those of each call.
    """
    known = _known.setdefault(frozenset(map(_name_of, compiled)), _Known())
    before, known.num_graphs = known.num_graphs, _num_graphs()
    if known.num_graphs != before:
        known.takes_any_shape = False
    elif known.had_new_shapes:
        known.takes_any_shape = True
    shapes = {_shapes_of(own) for own in args}
    known.had_new_shapes = not shapes <= known.shapes
    if len(known.shapes) > MOST_SHAPES:
        known.shapes.clear()
    known.shapes |= shapes
    return known.num_graphs != before or (known.had_new_shapes and not known.takes_any_shape)


def _name_of(compiled: Any) -> str:
    kind = type(getattr(compiled, _COMPILED_MODULE, compiled))
    return getattr(compiled, "__qualname__", kind.__qualname__)


def _shapes_of(args: Any) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(value.shape) for value in tree_leaves(args) if isinstance(value, Tensor)])


def _num_graphs() -> int:
    """Return how many graphs dynamo has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
