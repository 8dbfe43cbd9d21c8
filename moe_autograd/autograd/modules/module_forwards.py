"""The forwards of the module calls of one map, and what they have done to what they share.

The rules, and the words, are those of `module_calls`, which is about one of the calls.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd._streams import accelerator_in_use, are_elsewhere, use_here
from moe_autograd.autograd.contents.closures import LooseCut
from moe_autograd.autograd.contents.in_objects import with_tensors_in_objects
from moe_autograd.autograd.entry import Entrance
from moe_autograd.autograd.modules.changes import (
    base_of,
    memory_held,
    refuse_changed_closures,
    refuse_shared_changes,
    renew_views,
    without_changed,
)
from moe_autograd.autograd.modules.module_calls import ModuleCall, Planned
from moe_autograd.autograd.ordered_hooks import ordered_hooks
from moe_autograd.autograd.runs import Map, run_calls

_NO_HOOKS = contextlib.nullcontext()


class ModuleForwards:
    """The forwards of one map's module calls (step 1 of `parallel`), and what they have done to what they share.

    Args:
        planned: the calls.
        the_map: whose they are.
        shares_graph: whether these are calls of a backward that makes a graph (Rule 6).

    Attributes:
        calls: when they have run.
        entrance: where the callers' tensors enter them.
        changed: what they have changed in place, by its `id`.
    """

    def __init__(self, planned: Sequence[Planned], the_map: Map, shares_graph: bool) -> None:
        self._planned, self._map, self._shares_graph = planned, the_map, shares_graph
        self.calls: list[ModuleCall] = [None] * len(planned)  # type: ignore[list-item]  # each is set by its forward
        self.entrance = Entrance([one.flat[0] for one in planned], the_map)
        self.changed: dict[int, Tensor] = {}
        self._held = memory_held([one.cuts for one in planned])
        self._owners: dict[Node, ModuleCall] = {}
        self._hooks = ordered_hooks(len(planned))
        self._has_streams = accelerator_in_use() is not None

    def run(self) -> list[ModuleCall]:
        """Run all of them; return the calls.

        Raises:
            RuntimeError: they have changed what others take, or where an input is (`changes`).
            BaseException: of the lowest failing call.
        """
        try:
            computes_elsewhere = self._has_streams and any(
                are_elsewhere(one.flat[0]) for one in self._planned
            )
            run_calls(
                self._run_one,
                self._map,
                "forward",
                is_backward=self._shares_graph,  # Rule 6
                computes_elsewhere=computes_elsewhere,
            )
            self._refuse_changes()
        finally:
            self._owners.clear()
            self.entrance.close()
        self._note_shared_leaves()
        return self.calls

    def _run_one(self, i: int) -> None:
        planned = self._planned[i]
        if self._has_streams:
            use_here(with_tensors_in_objects(planned.flat[0]))
        with _NO_HOOKS if self._hooks is None else self._hooks.of(i):
            call = self.calls[i] = ModuleCall(planned, self.entrance.aliases, self._shares_graph)
        if self._hooks is not None:
            call.boxes = self._hooks.boxes(i)
        if any(type(cut) is LooseCut for cut in planned.cuts):
            call.cuts, self._held[i] = without_changed(call.cuts, planned.cuts, self._held[i])
        call.find_leaves(self._owners)

    def _refuse_changes(self) -> None:
        title, names = self._map.title, self._map.names
        if not self._shares_graph:
            refuse_changed_closures(title, names, self._held)
        self.entrance.refuse_replaced(title)
        self.changed = {id(base): base for call in self.calls for base in map(base_of, call.changed)}
        if self.changed:  # Rule 7
            taken = [self._taken_by(call) for call in self.calls]
            refuse_shared_changes(title, names, [call.changed for call in self.calls], taken)
        for call, name in zip(self.calls, names, strict=True):
            call.refuse_changed_results(name)

    def _taken_by(self, call: ModuleCall) -> list[Tensor]:
        reached = [base for base in self.changed.values() if base.requires_grad and call.leads_to(base)]
        return [*[tensor for _, tensor in call.cuts], *reached]

    def _note_shared_leaves(self) -> None:
        counts = collections.Counter([id(leaf) for call in self.calls for leaf in call.leaves])
        shared = frozenset(leaf for leaf, count in counts.items() if count > 1)
        for call in self.calls if shared else ():
            call.shared_leaves = shared

    def renew_views(self) -> None:
        """Renew the callers' views of what was changed in place, once that is tied."""
        if self.changed:
            outer = [
                *[tensor for one in self._planned for _, tensor in one.cuts],
                *[value for one in self._planned for value in one.flat[0]],
            ]
            renew_views(self.changed.values(), [value for value in outer if isinstance(value, Tensor)])
