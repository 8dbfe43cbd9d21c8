"""Which results are led to which, so that each leads to all that it was computed from, by as few nodes as will do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_autograd.autograd.used_results import leads_of

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
