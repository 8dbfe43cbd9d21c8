"""The leaves of pytrees but for plain values: most of what large lists and dictionaries hold are numbers and strings.

PyTorch's own functions take microseconds for each leaf, and a map asks of each of its calls, which mostly take the same
list. So lists, tuples and dictionaries themselves are looked through here, each once for all calls of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe_autograd.autograd.contents.reaching import at_once

PLAIN_VALUES: frozenset[type] = frozenset([bool, int, float, complex, str, bytes, type(None)])

# Containers by their `id`, each with its leaves; they are kept, so that nothing else gets the `id` of one.
LookedThrough: TypeAlias = "dict[int, tuple[object, list[object]]]"


def leaves_of(tree: Any, known: LookedThrough) -> list[object]:
    """Return the leaves of a pytree but for plain values; `known` is what was found so far, while nothing changes."""
    kind = type(tree)
    if kind in PLAIN_VALUES:
        return []
    if (found := known.get(id(tree))) is not None:
        return found[1]
    if isinstance(tree, Tensor):
        return [tree]
    values = _values_in(tree)
    if values is None:
        return [tree]
    leaves: list[object] = []
    if not PLAIN_VALUES.issuperset(map(type, values)):
        for value in values:
            if type(value) is Tensor:
                leaves.append(value)
            elif type(value) not in PLAIN_VALUES:
                leaves += leaves_of(value, known)
    known[id(tree)] = tree, leaves
    return leaves


def _values_in(tree: Any) -> Sequence[Any] | None:
    """Return what a pytree holds; `None` if it is a leaf."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return tuple(tree)  # at once, as other threads may change it
    if kind is dict:
        return at_once(dict.values, tree)
    values = tree_leaves(tree, is_leaf=lambda value: value is not tree)
    return None if len(values) == 1 and values[0] is tree else values
