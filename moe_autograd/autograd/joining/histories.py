"""Tell whether a backward through one call's results may pass through what the other calls' inputs were computed with.

The engine walks all that lies behind a node, with a gradient or without. Most nodes hand on that there is none. But a
function written in Python, or by an extension, is given zeros and computes with them, and the leaves behind it get
`.grad`s of zeros instead of `None`; a hook is given `None`; and a node that stands for a missing derivative raises. If
such a node lies behind some calls and not behind others, the calls have to be tied apart::

        leaf ◀── shared ◀──┬── only call 0 ◀── x0
                           └── only call 1 ◀── x1         which nodes are to be looked at: those to the right

They are met in the order in which the engine would run them, the last made first: so who leads to a node is known when
its turn comes, and what lies behind a node that all calls lead to is theirs as well.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.autograd.graph import Node

from moe_autograd.autograd.borders import is_python
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD, Call

# Nodes looked at for each call. Beyond that calls are tied apart unseen: behind so many nodes there is likely a reason
# to, and being apart costs a call but two nodes more.
_NUM_LOOKS = 4

# Torch's names of nodes that do not just hand on a missing gradient: extensions' own, and those that raise.
_MINDING = frozenset(["CppFunction", "Error", "NotImplemented"])


def apart(calls: Sequence[Call]) -> Sequence[list[int]]:
    """Return the places of the calls, neighbours with the same history together; nothing if all may be tied together.

    Only neighbours, since what calls save is to be saved in their order, however they are tied: for hooks that count,
    as those of `torch.utils.checkpoint` do, which makes the calls again when there may be other hooks.

    Two kinds of things are not seen: hooks of tensors that are no inputs, and hooks that come later.
    """
    everything = {tensor.grad_fn for call in calls for tensor in call.inputs}
    if len(everything) == 1:  # mostly
        return ()
    histories = [
        frozenset([tensor.grad_fn for tensor in call.inputs if tensor.grad_fn is not None]) for call in calls
    ]
    different = list(dict.fromkeys(histories))
    if len(different) == 1 or not _must_be_apart(calls, different, _NUM_LOOKS * len(calls)):
        return ()
    return [list(run) for _, run in itertools.groupby(range(len(calls)), key=histories.__getitem__)]


def _must_be_apart(calls: Sequence[Call], histories: Sequence[frozenset[Node]], num_looks: int) -> bool:
    if any(t._backward_hooks for call in calls for t in call.inputs if t.grad_fn is not None):
        return True
    return any(i == num_looks or _minds(node) for i, node in enumerate(_nodes_of_some(histories)))


def _nodes_of_some(histories: Sequence[frozenset[Node]]) -> Iterator[Node]:
    """Yield the nodes that some histories lead to, and others do not, in the order in which the engine runs them."""
    led_to: dict[Node, int] = {}  # for each node a bit for each history that leads there
    to_visit: list[tuple[int, int, Node]] = []

    def meet(node: Node, bits: int) -> None:
        if node not in led_to:
            # The engine's numbers rise; leaves, which have none of their own, come last.
            order = 1 if type(node) is ACCUMULATE_GRAD else -node._sequence_nr()
            heapq.heappush(to_visit, (order, id(node), node))
        led_to[node] = led_to.get(node, 0) | bits

    for i, history in enumerate(histories):
        for node in history:
            meet(node, 1 << i)
    of_all = (1 << len(histories)) - 1
    while to_visit:
        node = heapq.heappop(to_visit)[-1]
        bits = led_to[node]
        if bits == of_all:
            continue
        yield node
        for below, _ in node.next_functions:
            if below is not None:
                meet(below, bits)


def _minds(node: Node) -> bool:
    """Whether a node that gets no gradient does more than hand on that there is none."""
    if type(node) is ACCUMULATE_GRAD:
        leaf: Any = node
        return bool(leaf.variable._backward_hooks or leaf.variable._post_accumulate_grad_hooks)
    return is_python(node) or type(node).__name__ in _MINDING
