"""Whatever comes to an expert's queue, in whatever order: who is next, what is joined, and that nobody is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from experts_server.hosting.calls import Call, InspectCall
from experts_server.queues.waiting import WaitingCalls

MOST_TOKENS = 6
CLIENTS = (b"a", b"b", b"c")


def ignore(call: Call, result: Any) -> None:
    return None


@dataclass(slots=True)
class Rows(Call):
    """Rows that may be joined with those of the same key; of key `None` with none."""

    key: str | None


def key_of(call: Call) -> str | None:
    return call.key if isinstance(call, Rows) else None


class Story:
    """What became of calls: a `Call` comes, a number gives up the one of that place, a word takes what it says.

    A call's tag is its place. In the end all are taken.
    """

    def __init__(self, events: Sequence[Any]) -> None:
        self.waiting = WaitingCalls(key_of, MOST_TOKENS)
        self.added: list[Call] = []
        self.here: list[Call] = []
        self.batches: list[list[Call]] = []
        self.waited: list[list[Call]] = []  # before each batch was taken
        for event in events:
            self._follow(event)
        while self.here:
            self._follow("take")

    def _follow(self, event: Any) -> None:
        if isinstance(event, Call):
            event.tag = len(self.added)
            self.added.append(event)
            self.here.append(event)
            self.waiting.add(event)
        elif event == "take":
            self._take()
        elif event == "take late":
            late = self.waiting.take_late()
            assert [call.tag for call in self.here if call.is_cancelled] == sorted(call.tag for call in late)
            self._leave(late)
        elif event < len(self.added):
            self.added[event].is_cancelled = True

    def _take(self) -> None:
        self.waited.append(list(self.here))
        batch, late = self.waiting.take()
        assert bool(batch) == any(not call.is_cancelled for call in self.waited[-1])
        assert not any(call.is_cancelled for call in batch)
        assert all(call.is_cancelled for call in late)
        self.batches.append(batch)
        self._leave([*batch, *late])

    def _leave(self, calls: Sequence[Call]) -> None:
        here = {call.tag for call in self.here}
        assert len({call.tag for call in calls} & here) == len(calls)  # each leaves once
        gone = {call.tag for call in calls}
        self.here = [call for call in self.here if call.tag not in gone]
        assert self.waiting.num_calls == len(self.here)
        assert self.waiting.num_tokens == sum(call.num_tokens for call in self.here)


rows = st.builds(
    lambda client, num_tokens, key: Rows(client, ignore, key, num_tokens=num_tokens),
    st.sampled_from(CLIENTS),
    st.sampled_from([0, 1, 2, 3, 4, MOST_TOKENS + 1]),
    st.sampled_from(["x", "x", "y", None]),
)
looks = st.builds(lambda: InspectCall(b"", ignore, lambda hosted: None))
takes = st.sampled_from(["take", "take late"])
stories = st.builds(
    Story, st.lists(st.one_of(rows, rows, rows, looks, takes, st.integers(0, 20)), max_size=40)
)


@given(stories)
def test_calls_of_a_client_begin_in_their_order(story: Story) -> None:
    for client in CLIENTS:
        begun = [call.tag for batch in story.batches for call in batch if call.client_id == client]
        assert begun == sorted(begun)


@given(st.lists(rows, min_size=4, max_size=12), st.integers(0, 3))
def test_what_is_joined_has_one_key_and_fits(calls: list[Call], num_given_up: int) -> None:
    for batch in Story([*calls, *range(num_given_up)]).batches:
        if len(batch) > 1:
            assert {key_of(call) for call in batch} in ({"x"}, {"y"})
            assert sum(call.num_tokens for call in batch) <= MOST_TOKENS


@given(stories)
def test_nothing_passes_by_a_look(story: Story) -> None:
    begun = [call for batch in story.batches for call in batch]
    for place, look in enumerate(begun):
        if isinstance(look, InspectCall):
            assert all(call.tag < look.tag for call in begun[:place])
            assert all(call.tag > look.tag for call in begun[place + 1 :])


@given(st.lists(rows, min_size=4, max_size=12), st.lists(st.integers(0, 11), max_size=4))
def test_whoever_waits_has_a_turn_before_another_has_two(calls: list[Call], given_up: list[int]) -> None:
    """Also where one's calls can be joined and another's cannot, and where nobody waits for some any more."""
    story = Story([*calls, *given_up])
    for place, waited in enumerate(story.waited):
        clients = {call.client_id for call in waited if not call.is_cancelled}
        round_of = [
            {call.client_id for call in batch} for batch in story.batches[place : place + len(clients)]
        ]
        assert clients <= set().union(*round_of)
