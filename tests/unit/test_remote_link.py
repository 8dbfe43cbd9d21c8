"""The connection to one server: how long its pings are waited for, and under which name it is called."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import pytest

from moe_autograd import _interrupts
from moe_autograd.remote import link
from moe_autograd.remote.link import Link
from tests.support.interrupting import interrupted_everywhere

MISSED = "Stream removed (ping timeout)"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(link, "time", clock)
    return clock


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The options of each gRPC channel that is made."""
    made: list[dict[str, object]] = []
    make = grpc.insecure_channel

    def make_and_note(address: str, options: tuple[tuple[str, object], ...]) -> grpc.Channel:
        made.append(dict(options))
        return make(address, options)

    monkeypatch.setattr(grpc, "insecure_channel", make_and_note)
    return made


@pytest.fixture
def to_server(clock: SimpleNamespace, made: list[dict[str, object]]) -> Iterator[Link]:
    to_server = Link("127.0.0.1:1", "a.example:1", None, None)
    yield to_server
    to_server.close()


def patience_ms(made: list[dict[str, object]]) -> list[object]:
    return [options["grpc.http2.ping_timeout_ms"] for options in made]


def test_with_each_ping_that_is_missed_the_next_connection_waits_longer_up_to_the_longest(
    to_server, clock, made
):
    for _ in range(4):
        to_server.note_failure(MISSED)
        clock.now_s += 20
    assert patience_ms(made) == [900, 4_000, 16_000]


def test_several_calls_that_miss_the_same_ping_count_as_one(to_server, clock, made):
    for _ in range(4):
        to_server.note_failure(MISSED)
        clock.now_s += 1
    assert patience_ms(made) == [900, 4_000]
    to_server.note_failure(MISSED)
    assert patience_ms(made) == [900, 4_000, 16_000]


def test_a_minute_without_it_makes_the_link_quick_again(to_server, clock, made):
    to_server.note_failure(MISSED)
    clock.now_s += 60
    patient = to_server.stubs()
    clock.now_s += 1
    assert to_server.stubs() is to_server.stubs() is not patient
    assert patience_ms(made) == [900, 4_000, 900]


def test_what_else_goes_wrong_says_nothing_of_pings(to_server, made):
    to_server.note_failure("Connection reset by peer")
    assert patience_ms(made) == [900]


def test_only_another_name_takes_another_connection(to_server, made):
    for name in ("a.example:1", "b.example:1", "b.example:1"):
        to_server.call_by(name)
    assert [options["grpc.default_authority"] for options in made] == ["a.example:1", "b.example:1"]
    assert to_server.authority == "b.example:1"


def test_one_that_is_closed_connects_no_more(to_server, clock, made):
    to_server.note_failure(MISSED)
    to_server.close()
    clock.now_s += 100
    to_server.note_failure(MISSED)
    to_server.call_by("b.example:1")
    to_server.stubs()
    assert len(made) == 2


def test_after_ctrl_c_the_connection_is_under_the_name_and_with_the_patience_that_are_noted(
    to_server, clock, made
):
    def change_all() -> None:
        to_server.call_by(f"{clock.now_s}.example:1")
        to_server.note_failure(MISSED)

    num_points = 0
    for point in interrupted_everywhere(change_all, within=[link, _interrupts]):
        num_points += 1
        noted = to_server.authority, to_server._ping_timeout_ms
        assert (made[-1]["grpc.default_authority"], made[-1]["grpc.http2.ping_timeout_ms"]) == noted, point
        clock.now_s += 100
        to_server.stubs()  # quick again
    assert num_points > 10
