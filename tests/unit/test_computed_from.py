"""Which results were computed from which; and which lead to which, so that each leads to all that, by few nodes."""

from __future__ import annotations

import random
from collections.abc import Collection

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_autograd.autograd.modules.computed_from import at_any_distance, leads_of, places_in, uses_of
from moe_autograd.autograd.modules.used_elsewhere import tie_uses
from moe_autograd.autograd.walks import Edge

NUM_RESULTS = 7


@st.composite
def relations(draw: st.DrawFn) -> dict[int, list[int]]:
    """Results are numbered from the lowest on; each used one has some above it."""
    above = {i: draw(st.sets(st.integers(i + 1, NUM_RESULTS - 1))) for i in range(NUM_RESULTS - 1)}
    return {used: sorted(users) for used, users in above.items() if users}


def above_by(relation: dict[int, list[int]], used: int) -> set[int]:
    direct = relation.get(used, [])
    return set(direct).union(*[above_by(relation, place) for place in direct])


@given(relations())
def test_each_result_leads_to_what_it_was_computed_from_and_to_no_other(above: dict[int, list[int]]) -> None:
    led = {used: users for group, users in leads_of(above) for used in group}
    assert led.keys() == above.keys()
    for used in above:
        assert above_by(led, used) == above_by(above, used)
        for user in led[used]:
            others = {**led, used: [place for place in led[used] if place != user]}
            assert user not in above_by(others, used)  # none too many


@given(relations())
def test_what_leads_to_a_result_is_tied_before_what_that_leads_to(above: dict[int, list[int]]) -> None:
    leads = leads_of(above)
    place_of = {used: place for place, (group, _) in enumerate(leads) for used in group}
    for place, (_, users) in enumerate(leads):
        assert all(place_of.get(user, len(leads)) > place for user in users)


def test_all_of_a_dense_stack_take_one_step_each() -> None:
    above = {i: list(range(i + 1, 10)) for i in range(9)}
    assert leads_of(above) == [([i], [i + 1]) for i in range(9)]


def test_many_heads_on_many_results_take_one_node() -> None:
    assert leads_of({0: [3, 4], 1: [3, 4], 2: [3, 4]}) == [([2, 1, 0], [3, 4])]


class _OneNode(torch.autograd.Function):
    """Two outputs; whether the second was computed from the first is for its caller to say."""

    @staticmethod
    def forward(ctx, x):
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, one, other):
        return one + other


def _edge(tensor: Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


@given(st.randoms(use_true_random=False))
def test_of_each_result_all_are_found_that_it_was_computed_from(draw: random.Random) -> None:
    values = [torch.ones(2, requires_grad=True).clone()]
    sources: list[set[int]] = [{0}]  # of each value, all that it was computed from, and itself
    for _ in range(draw.randint(1, 8)):
        place, other = draw.randrange(len(values)), draw.randrange(len(values))
        if draw.random() < 0.3:
            one, two = _OneNode.apply(values[place])  # type: ignore[no-untyped-call]
            tie_uses("one", [one, two], {1: [0]})
            values += [one, two]
            sources += [sources[place] | {len(sources)}, sources[place] | {len(sources), len(sources) + 1}]
        else:
            values.append(values[place] * values[other])
            sources.append(sources[place] | sources[other] | {len(sources)})
    returned = draw.sample(range(len(values)), draw.randint(1, len(values)))
    expected: dict[int, Collection[int]] = {
        i: {j for j, other in enumerate(returned) if other != place and other in sources[place]}
        for i, place in enumerate(returned)
    }
    found = at_any_distance(uses_of([_edge(values[place]) for place in returned]))
    assert {place: {*places_in(bits)} for place, bits in found.items()} == {
        place: used for place, used in expected.items() if used
    }


def test_results_without_a_graph_were_computed_from_none() -> None:
    x = torch.ones(2, requires_grad=True)
    assert uses_of([None, _edge(x.sin()), None]) == {}


def test_results_that_are_next_to_each_other_in_a_long_chain_are_all_that_is_noted() -> None:
    values = [torch.ones(2, requires_grad=True)]
    for _ in range(50):
        values.append(values[-1].sin())
    uses = uses_of([_edge(value) for value in values[1:]])
    assert uses == {place: [place - 1] for place in range(1, 50)}
    assert at_any_distance(uses)[49] == (1 << 49) - 1


def test_of_uses_that_go_in_a_circle_each_has_all_others() -> None:
    """A server may say so."""
    assert at_any_distance({0: [1], 1: [2], 2: [0], 3: [3]}) == {0: 0b110, 1: 0b101, 2: 0b011, 3: 0}
