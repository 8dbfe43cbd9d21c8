"""Which results of a call it computed from which others: walks over its graph.

        x' ──▶ [   ] ──▶ g ──▶ [   ] ──▶ h ──▶ [   ] ──▶ y        g and h are used: others were computed from them
                                                                  h is next above g, and y next above h

Where one node stands for a whole call, as for that of an expert which is offloaded or elsewhere, the graph does not
show which of its outputs were computed from each other. Such a node has a note of it (`HAVE_USES`, `used_elsewhere`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd.autograd.deep import note_seen
from moe_autograd.autograd.walks import Edge

# of nodes that computed some of their outputs from others: for each of these outputs those next below it
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
            for used in places_in(bits | _own_bits(edge, bit_of)):
                if used in above:  # else each of them was computed from the other: one tensor, returned twice
                    above[used].append(place)
    return {place: users for place, users in above.items() if users}


def uses_of(results: Sequence[Edge | None]) -> dict[int, list[int]]:
    """Return the places of results that were computed from others, the lowest first, each with those next below it.

    Where one tensor is returned twice, each of the two was computed from the other.

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
    found: dict[int, list[int]] = {}
    for node, bits in below.items():
        for edge in edges_at.get(node, ()):
            same = bit_of[edge]
            for place in places_in(same):
                found[place] = places_in((bits | _own_bits(edge, bit_of) | same) & ~(1 << place))
    return {place: used for place, used in found.items() if used}


def turned(above: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return `next_above` the other way round: the places of results, each with those of the used ones below it."""
    below: dict[int, list[int]] = {}
    for used, places in above.items():
        for place in places:
            below.setdefault(place, []).append(used)
    return below


def at_any_distance(uses: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Return for each of `uses_of` a bit for each result that it was computed from, also by way of others."""
    below = {place: sum(1 << used for used in {*own}) for place, own in uses.items()}
    before: dict[int, int] = {}
    while below != before:  # twice, where the lowest come first
        before = dict(below)
        for place, own in uses.items():
            for used in own:
                below[place] |= below.get(used, 0)
    return {place: bits & ~(1 << place) for place, bits in below.items()}


def note_uses(results: Sequence[Tensor], uses: Mapping[int, Collection[int]]) -> None:
    """Note which results of one node it computed from which others; as `uses_of` has it."""
    for place, used in uses.items():
        of_node = HAVE_USES.setdefault(results[place].grad_fn, {})
        of_node[results[place].output_nr] = [results[one].output_nr for one in used]


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
    for node, edges in edges_at.items():
        if HAVE_USES and node in HAVE_USES and len(edges) > 1:
            order = _lowest_first([nr for _, nr in edges], HAVE_USES[node])
            edges.sort(key=lambda edge: order[edge[1]])
    return edges_at


def _lowest_first(output_nrs: Sequence[int], uses: Mapping[int, Collection[int]]) -> Mapping[int, int]:
    """Return numbers for outputs, lower ones for those that others were computed from."""
    order: dict[int, int] = {}
    met: set[int] = set()
    to_visit = [*output_nrs]
    while to_visit:
        output_nr = to_visit[-1]
        met.add(output_nr)
        ahead = [used for used in uses.get(output_nr, ()) if used not in met]
        if ahead:
            to_visit += ahead
        else:
            order.setdefault(to_visit.pop(), len(order))
    return order


def _own_bits(edge: Edge, bit_of: Mapping[Edge, int]) -> int:
    """Return a bit for each result that an output was computed from within its node, other than through another."""
    node, output_nr = edge
    if not HAVE_USES or node not in HAVE_USES:
        return 0
    uses = HAVE_USES[node]
    bits, met, to_visit = 0, {output_nr}, [*uses.get(output_nr, ())]
    while to_visit:
        used = to_visit.pop()
        if used not in met:
            met.add(used)
            bits |= bit_of.get((node, used), 0)
            to_visit += () if (node, used) in bit_of else uses.get(used, ())
    return bits


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
    return [(used, places_in(bits)) for bits, used in groups]


def places_in(bits: int) -> list[int]:
    """Return the places for which there is a bit."""
    places = []
    while bits:
        places.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return places
