"""The calls of one map, as the nodes that tie them see them; `join` explains what for, and has the rules."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from moe_autograd._computed_once import computed_once
from moe_autograd._streams import accelerator_in_use, are_elsewhere, use_here
from moe_autograd.autograd.grad_dtypes import MAY_DECLARE, GradDtypes, may_have_gradient
from moe_autograd.autograd.joining.accumulating import Wanted
from moe_autograd.autograd.joining.boxed import Grads
from moe_autograd.autograd.joining.sums import Shared, Sums, shared_by_many
from moe_autograd.autograd.result_hooks import Arrived, See
from moe_autograd.autograd.runs import Map, run_calls
from moe_autograd.autograd.this_backward import is_wanted, keeps_graph

T = TypeVar("T")

Tensors: TypeAlias = Sequence[Tensor | None]  # mostly gradients; `None` where none flows

ACCUMULATE_GRAD = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


class Call(Protocol):
    """What a join has to know of one call whose forward has run."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What its gradients are asked for."""

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What the join is to tie."""

    @property
    def grad_dtypes(self) -> GradDtypes:
        """Of which dtypes it wants the gradients of `results`; empty if of those that these have."""

    @property
    def to_save(self) -> tuple[Tensor | None, ...]:
        """What the join is to save for it."""

    @property
    def dirty(self) -> tuple[Tensor, ...]:
        """Those of `inputs` that it changed in place."""

    @property
    def non_differentiable(self) -> tuple[Tensor, ...]:
        """Those of `results` that no gradient flows through."""

    def forget_results(self) -> None:
        """Drop every reference to a result, and to what the node saves from now on."""

    def backward(
        self, saved: Tensors, grad_outputs: Tensors, wanted: Sequence[Wanted], keep_graph: bool
    ) -> Tensors:
        """Return one gradient or `None` for each of `inputs`.

        Args:
            saved: what `to_save` was.
            grad_outputs: one for each of `results`, `None` where none flows.
            wanted: for each of `inputs`, whether this backward uses its gradient; empty where nobody asks.
            keep_graph: whether there may be another backward.
        """

    def see_within(self, place: int, see: See) -> None:
        """Let something see what comes to a result within the call.

        Args:
            place: of the result.
            see: makes it, given the number of the result among the outputs of a node.
        """

    def note_arrived(self, place: int, arrived: Arrived) -> None:
        """Note that a result is one of a call around the map, which others were computed from there.

        Args:
            place: of the result.
            arrived: its whole gradient.
        """


class Parts:
    """Which part of a flat list, with some elements for each call, belongs to which call.

    Args:
        counts: how many there are for each call.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts

    @computed_once
    def _starts(self) -> list[int]:
        return [*itertools.accumulate(self.counts, initial=0)]

    @property
    def total(self) -> int:
        """How many elements the list has."""
        return sum(self.counts)

    def of_each(self, flat: Sequence[T]) -> list[Sequence[T]]:
        """Return the part of each call."""
        return split(flat, self.counts)

    def of(self, flat: Sequence[T], call: int) -> Sequence[T]:
        """Return the part of one call; of an empty list an empty one."""
        return flat[self._starts[call] : self._starts[call + 1]]

    def of_some(self, flat: Sequence[T], calls: Sequence[int]) -> dict[int, Sequence[T]]:
        """Return the parts of some calls, mostly of all."""
        if len(calls) == len(self.counts):
            return dict(enumerate(self.of_each(flat)))
        starts = self._starts
        return {call: flat[starts[call] : starts[call + 1]] for call in calls}

    def flat(self, parts: Mapping[int, Sequence[T]], others: T) -> list[T]:
        """Return the list with the parts of some calls, and something else for each element of the others."""
        if len(parts) == len(self.counts):
            return [one for call in range(len(parts)) for one in parts[call]]
        starts = self._starts
        flat = [others] * starts[-1]
        for call, part in parts.items():
            flat[starts[call] : starts[call + 1]] = part
        return flat

    def start(self, call: int) -> int:
        """Return the place of the first element of a call."""
        return self._starts[call]

    def call_at(self, place: int) -> int:
        """Return whose element is at a place."""
        return bisect.bisect_right(self._starts, place) - 1


class Joined:
    """The calls of one map: how many tensors each contributes, and how to run their backwards.

    Args:
        calls: their forwards have run.
        the_map: whose they are.
    """

    can_be_apart = True  # whether calls with different histories may be tied apart
    # whether backwards compute with what the calls saved; if not, it is saved only so that changes of it are noticed
    reads_saved = True
    shared: Sequence[Shared] = ()  # large tensors that many calls take as an input
    is_whole = True  # whether these are all calls of the map
    compiled_arrivals: object = None  # those of a backward that compiled autograd runs (`join._arrivals_of`)
    _has_shared = False  # whether two inputs are the same tensor

    def __init__(self, calls: Sequence[Call], the_map: Map) -> None:
        self.calls = calls
        self.map = the_map
        self.input_parts = Parts([len(call.inputs) for call in calls])
        # of each call's inputs those that the join itself leads to; `deferred` has another node for the leaves
        self.tied_parts = self.input_parts
        self.result_parts = Parts([len(call.results) for call in calls])
        self.saved_parts = Parts([len(call.to_save) for call in calls])
        self.arrivals: list[weakref.ref[Node]] = []  # of calls that are tied apart
        # held while what the calls saved is taken out; re-entrant, as an unpack hook may start a backward
        self.taking = threading.RLock()

    def part(self, places: Sequence[int]) -> Self:
        """Return some of the calls, which are tied apart from the others."""
        part = type(self)([self.calls[i] for i in places], self.map.of_some(places))
        part.is_whole = False
        return part

    def inputs(self) -> list[Tensor]:
        """Return the tensors that the join is to lead to.

        Where calls share some, the last call's come first (`join`, Rule 6): so the engine adds up what they compute for
        one tensor in the order of a loop, to the same bits.
        """
        inputs = [tensor for call in self.calls for tensor in call.inputs]
        if len({*map(id, inputs)}) == len(inputs):
            return inputs
        self._has_shared = True
        self.look_for_shared()
        return self.last_first(inputs)

    def look_for_shared(self) -> None:
        """Find the large tensors that many calls take (`sums`), before the calls forget their inputs."""
        self.shared = shared_by_many([call.inputs for call in self.calls])

    def last_first(self, of_inputs: list[Any]) -> list[Any]:
        """Turn a list with one element for each input, in the order of the calls, into the order of `inputs()`."""
        return _turned_around(of_inputs, self.tied_parts.counts) if self._has_shared else of_inputs

    def in_order(self, nodes: Sequence[Node | None]) -> Sequence[Node | None]:
        """Turn the nodes that the join leads to, the gate's first if there is one, back into the order of the calls."""
        if not self._has_shared:
            return nodes
        start = len(nodes) - self.tied_parts.total
        return [*nodes[:start], *_turned_around(nodes[start:], self.tied_parts.counts[::-1])]

    def pass_gate(self) -> Tensor | None:
        """Return one more tensor for the join to depend on, or `None`."""
        return None

    def reached(self, grad_outputs: Tensors) -> Sequence[int]:
        """Return which calls got a gradient (Rule 3), in time for these alone: there may be a backward for each."""
        if not has_missing(grad_outputs):
            counts = self.result_parts.counts
            return [i for i, count in enumerate(counts) if count] if 0 in counts else range(len(counts))
        call_at = self.result_parts.call_at
        return [*{call_at(place): None for place, grad in enumerate(grad_outputs) if grad is not None}]

    def ask(self, nodes: Sequence[Node | None], reached: Sequence[int]) -> Sequence[Wanted]:
        """Return for each input whether this backward uses its gradient; empty if the calls compute all anyway.

        Args:
            nodes: where the gradients of the inputs go, after that of the gate if there is one.
            reached: the calls that got a gradient.

        Threads: only the engine's, while it runs the join.
        """
        return []

    def refuse_escaped(self, wanted: Sequence[Wanted]) -> None:
        """Raise if this backward comes to the calls by another way than their results.

        Args:
            wanted: one for each input of all calls.

        Raises:
            RuntimeError: it does.
        """

    def collect(self) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor]]:
        """Return the results, and what is to be saved and marked, of all calls."""
        results: list[Tensor] = []
        saved: list[Tensor | None] = []
        dirty: list[Tensor] = []
        non_differentiable: list[Tensor] = []
        for call in self.calls:
            results += call.results
            saved += call.to_save
            dirty += call.dirty
            non_differentiable += call.non_differentiable
        return results, saved, dirty, non_differentiable

    def grad_dtypes(self) -> GradDtypes:
        """Return the dtypes of the results' gradients; empty if all are as usual."""
        if not MAY_DECLARE or not any(call.grad_dtypes for call in self.calls):
            return ()
        dtypes: list[torch.dtype | None] = []
        for call in self.calls:
            marked = call.non_differentiable
            usual = [result.dtype if may_have_gradient(result, marked) else None for result in call.results]
            dtypes += call.grad_dtypes or usual
        return dtypes

    def backward(
        self, saved_of: dict[int, Sequence[Any]], grad_outputs: Grads, wanted: Sequence[Wanted]
    ) -> Grads:
        """Run the backwards of all calls that got a gradient.

        Args:
            saved_of: by call what it saved; emptied on the way.
            grad_outputs: one for each result of all calls; emptied at once.
            wanted: one for each input of all calls.

        Returns:
            One gradient or `None` for each input of all calls.
        """
        reached = self.reached(grad_outputs)
        grads_of = self.result_parts.of_some(grad_outputs, reached)
        wanted_of = self.input_parts.of_some(wanted, reached) if wanted else {}
        grad_outputs.clear()
        grads: dict[int, Tensors] = {}
        keep_graph, has_streams = keeps_graph(), accelerator_in_use() is not None
        sums = Sums(self.shared, reached, wanted_of or None) if self.shared else None

        def run(index: int) -> None:
            i = reached[index]
            own_saved, own_grads = saved_of.pop(i, ()), grads_of.pop(i)  # Rule 2: nobody else holds them
            if has_streams:
                use_here(own_saved)
                use_here(own_grads)
            found = self.calls[i].backward(own_saved, own_grads, wanted_of.get(i, ()), keep_graph)
            grads[i] = found if sums is None else sums.add(i, found)

        of_reached = self.map if len(reached) == len(self.calls) else self.map.of_some(reached)
        computes_elsewhere = has_streams and any(map(are_elsewhere, grads_of.values()))
        try:
            run_calls(run, of_reached, "backward", is_backward=True, computes_elsewhere=computes_elsewhere)
        except BaseException:
            for held in (saved_of, grads_of, grads):
                held.clear()  # `run` holds them, and the traceback that
            raise
        if sums is not None:
            sums.hand_out(grads)
        return _with_memory_of_their_own(self.input_parts.flat(grads, None))

    def call_of(self, place: int) -> tuple[Any, int]:
        """Return the call that a result is of, given its place among those of all calls, and its place there."""
        i = self.result_parts.call_at(place)
        return self.calls[i], place - self.result_parts.start(i)

    def hand_out(self, grads: Grads) -> Tensors:
        """Return what flows to the gate, and after it what flows to `inputs()`.

        Args:
            grads: what `backward` returned.
        """
        return (None, *self.last_first(grads))


def _with_memory_of_their_own(grads: Grads) -> Grads:
    """Copy sparse gradients that share memory with dense ones, to which later backwards add in place.

    PyTorch keeps a dense gradient as `.grad` where nobody else holds the tensor. In a loop, what a sparse one was made
    of still waits in the engine then.
    """
    if not any(grad is not None and grad.is_sparse for grad in grads):
        return grads
    dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
    memory = {grad.untyped_storage().data_ptr() for grad in dense}
    return [
        grad.clone()
        if grad is not None and grad.is_sparse and grad._values().untyped_storage().data_ptr() in memory
        else grad
        for grad in grads
    ]


def has_any(grads: Tensors) -> bool:
    """Whether any gradient flows; written out, since it is asked once for each call."""
    for grad in grads:  # noqa: SIM110  # a generator costs more than the loop
        if grad is not None:
            return True
    return False


def has_missing(grads: Tensors) -> bool:
    """Whether some gradient does not flow; asked once for each backward, of all calls in one go."""
    return type(None) in map(type, grads)


def split(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Cut `flat` into one part for each count."""
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


def _turned_around(flat: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    return [one for part in reversed(split(flat, counts)) for one in part]


def which_are_wanted(nodes: Sequence[Node | None]) -> list[bool]:
    """Return for each node whether this backward uses the gradients that flow there."""
    try:  # in one go: mostly none is asked for by name
        return [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError:
        return [is_wanted(node) for node in nodes]
