"""Free what nodes saved, one node at a time.

The engine frees the saved tensors of all nodes it has run, or with `retain_graph=True` those of none. This
frees those of some.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import checkpoint

from moe_autograd.autograd.borders import is_python

_OF_PYTHON = ("_raw_saved_tensors",)


def drop_saved_tensors(node: Node) -> None:
    """Do to a node of C++ what an engine pass without `retain_graph` does to those it has run.

    Only the engine can free a saved tensor, but a hook set later replaces it: here by nothing. A tensor
    that somebody else's hook has packed stays packed as long as its node.
    """
    for one in _saved_of(node):
        if one.unpack_hook is None and one.data is not None:
            one.register_hooks(_pack_nothing, _refuse_to_unpack)


def is_checkpointed(node: Node) -> bool:
    """Whether what a node saved is computed again by a `torch.utils.checkpoint`, once for each pass that asks."""
    return any(getattr(one.unpack_hook, "__module__", None) == checkpoint.__name__ for one in _saved_of(node))


def is_packed(node: Node) -> bool:
    """Whether a hook is to give back what a node saved, which it may do once, or at some expense."""
    return any(one.unpack_hook is not None for one in _saved_of(node))


def drop_in_python(nodes: Iterable[Any]) -> None:
    """Do the same to contexts of Python functions; call it inside an engine pass without `retain_graph`."""
    for node in nodes:
        node.maybe_clear_saved_tensors()


def _saved_of(node: Node) -> Iterator[Any]:
    """Yield what a node saved, as torch has it."""
    for name in _OF_PYTHON if is_python(node) else _saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if one is not None:
                yield one


@functools.cache  # torch's own classes, which stay: a user's class of nodes is not to be kept
def _saved_names(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def _pack_nothing(_: torch.Tensor) -> None:
    return None


def _refuse_to_unpack(_: None) -> torch.Tensor:
    raise RuntimeError(
        "split_backward: expected a graph to be used once, got a second backward through it. Its saved "
        "tensors are freed. Compute the outputs again."
    )
