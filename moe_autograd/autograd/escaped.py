"""Tensors with history that have left a call otherwise than as its result: kept by a module, a closure, a hook.

They lead to the entries of the call's own graph (`entry`), and not to what its inputs were computed with. A backward
that goes there says so, as an entry has no backward. But one that is asked for some tensors by name does not come to
an entry, which leads to none of them: without a look, what flows there would be missing in a sum. And where a call's
backward has freed the graph already, it is this that PyTorch complains of.

So the look is from where the backward begins, once for all maps: at each that is asked by name; else only where an
entry is still there, though the calls that it leads to are done and nobody keeps their graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

from torch.autograd.graph import Node

from moe_autograd.autograd.entry import ESCAPED, is_entry
from moe_autograd.autograd.this_backward import asked_for_by_name, begins_and_ends, kept_by_this_backward
from moe_autograd.autograd.walks import walk


def refuse_escaped(entries: Sequence[Node]) -> None:
    """Raise if a backward that is asked for tensors by name comes to one of these entries, but by way of results.

    Raises:
        RuntimeError: it does.
    """
    if entries and asked_for_by_name():
        _refuse(entries)


class Escaping:
    """The entries of some calls, of which none is there any longer when these are done, or something has escaped."""

    def __init__(self, entries: Iterable[Node]) -> None:
        self._entries = [weakref.ref(entry) for entry in {*entries}]

    def refuse(self) -> None:
        """Raise if this backward, which is not asked for tensors by name, comes to one of them.

        Raises:
            RuntimeError: it does.
        """
        left = [entry for reference in self._entries if (entry := reference()) is not None]
        if left and not asked_for_by_name():
            _refuse(left)


def _refuse(entries: Sequence[Node]) -> None:
    met = kept_by_this_backward(_refuse, _entries_met)
    if any(entry in met for entry in entries):
        raise RuntimeError(ESCAPED)


def _entries_met() -> Collection[Node]:
    begins, ends = begins_and_ends()
    return {node for node, _ in walk(begins, ends) if node is not None and is_entry(node)}
