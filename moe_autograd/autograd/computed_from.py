"""Which results of a call it computed from which others: walks over its graph.

        x' ──▶ [   ] ──▶ g ──▶ [   ] ──▶ h ──▶ [   ] ──▶ y        g and h are used: others were computed from them
                                                                  h is next above g, and y next above h

Where one node stands for a whole call, as for that of an expert which is offloaded or elsewhere, the graph does not
show which of its outputs were computed from each other. Such a node has a note of it (`HAVE_USES`, `used_elsewhere`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.autograd.graph import Node

from moe_autograd.autograd.deep import note_seen
from moe_autograd.autograd.walks import Edge

# of nodes that computed some of their outputs from others: for each of these outputs, from which; at any distance
HAVE_USES: weakref.WeakKeyDictionary[Any, dict[int, Collection[int]]] = weakref.WeakKeyDictionary()


def next_above(results: Sequence[Edge], ends: Collection[Edge]) -> dict[int, list[int]]:
    """Return the places of used results, the lowest first, each with those of the results next above it.

    Args:
        results: of a call.
        ends: of its graph.
    """
    bit_of = {edge: 1 << place for place, edge in enumerate(results)}
    if len(bit_of) < len(results):
        return {}
    below = results_below(bit_of, ends)
    place_of = {edge: place for place, edge in enumerate(results)}
    edges_at = _by_node(results)
    above: dict[int, list[int]] = {}
    for node, bits in below.items():
        for edge in edges_at.get(node, ()):
            place = place_of[edge]
            above[place] = []
            for used in _places(bits | _own_bits(edge, bit_of)):
                if used in above:  # else each of them was computed from the other: one tensor, returned twice
                    above[used].append(place)
    return {place: users for place, users in above.items() if users}


def all_below(results: Sequence[Edge | None]) -> dict[int, set[int]]:
    """Return the places of results that were computed from others, each with those of these, at any distance.

    Where one is returned twice, each of the two was computed from the other.

    Args:
        results: of a call; `None` where there is no graph.
    """
    bit_of: dict[Edge, int] = {}
    for place, edge in enumerate(results):
        if edge is not None:
            bit_of[edge] = bit_of.get(edge, 0) | 1 << place
    edges_at = _by_node(bit_of)
    below = results_below(bit_of, ())
    note_seen(below)
    found: dict[int, set[int]] = {}
    for node, bits in below.items():  # the lowest first
        for edge in edges_at.get(node, ()):
            same, direct = _places(bit_of[edge]), _places(bits | _own_bits(edge, bit_of))
            further = {one for used in direct for one in found.get(used, ())}
            for place in same:
                found[place] = {*direct, *further, *same} - {place}
    return {place: used for place, used in found.items() if used}


def results_below(bit_of: Mapping[Edge, int], ends: Collection[Edge]) -> dict[Node, int]:
    """Return for each node a bit for each result that it leads to other than through another; the lowest first."""
    below: dict[Node, int] = {}
    ahead: dict[Node, list[tuple[Node, int]]] = {}  # of nodes that wait for those below
    to_visit = [node for node, _ in bit_of if node is not None]
    while to_visit:
        node = to_visit[-1]
        edges = ahead.pop(node, None)
        if edges is None and node not in below:
            edges = ahead[node] = [(n, nr) for n, nr in node.next_functions if n and (n, nr) not in ends]
            to_visit += [n for n, _ in edges if n not in below]
            continue
        to_visit.pop()
        if edges is not None:
            bits = 0
            for edge in edges:
                bits |= bit_of.get(edge) or below[edge[0]] | _own_bits(edge, bit_of)
            below[node] = bits
    return below


def _by_node(results: Collection[Edge]) -> dict[Node, list[Edge]]:
    """Return the edges of results by their nodes; those of one node with the lowest first."""
    edges_at: dict[Node, list[Edge]] = {}
    for edge in results:
        if edge[0] is not None:
            edges_at.setdefault(edge[0], []).append(edge)
    for edges in edges_at.values():
        edges.sort(key=lambda edge: len(_uses_at(edge)))
    return edges_at


def _uses_at(edge: Edge) -> Collection[int]:
    """Return from which outputs of its node one was computed there, as far as the graph does not show it."""
    node, output_nr = edge
    return HAVE_USES[node].get(output_nr, ()) if HAVE_USES and node in HAVE_USES else ()


def _own_bits(edge: Edge, bit_of: Mapping[Edge, int]) -> int:
    return functools.reduce(operator.or_, [bit_of.get((edge[0], used), 0) for used in _uses_at(edge)], 0)


def leads_of(above: dict[int, list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return which results are to lead to which used ones, so that each leads to all that it was computed from.

    Args:
        above: as `next_above` has it.

    Returns:
        Places of used results, with those of the results that lead to them by one node; the lowest first. From where
        one leads to another it leads on, so this takes as few as will do.
    """
    all_above: dict[int, int] = {}
    depths: dict[int, int] = {}
    grouped: dict[int, list[int]] = {}
    for used in reversed(above):
        further = 0
        for place in above[used]:
            further |= all_above.get(place, 0)
        direct = sum(1 << place for place in above[used])
        all_above[used] = direct | further
        depths[used] = 1 + max(depths.get(place, 0) for place in above[used])
        grouped.setdefault(direct & ~further, []).append(used)
    groups = sorted(grouped.items(), key=lambda group: -depths[group[1][0]])
    return [(used, _places(bits)) for bits, used in groups]


def _places(bits: int) -> list[int]:
    places = []
    while bits:
        places.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return places
