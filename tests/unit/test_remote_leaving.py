"""Forwards whose graph is gone, where their server cannot be told of them: `moe_autograd.remote.leaving`."""

from __future__ import annotations

from collections.abc import Callable

from moe_autograd.remote.leaving import _MOST_KEPT_BACK, LeftForwards
from moe_autograd.remote.parts import Call, Freeze


def call(call_id: int) -> Call:
    made = Call(0, "ffn.0", call_id, 1, evaluate=False, keep_graph=True, is_trained=True, freeze=Freeze())
    made.address, made.is_kept = "127.0.0.1:1", True
    return made


def test_what_is_kept_back_for_servers_that_are_lost_does_not_grow_without_end() -> None:
    told: list[int] = []

    def lose(address: str, calls: list[tuple[str, int]], if_lost: Callable[[], None]) -> None:
        told.append(len(calls))
        if_lost()

    left = LeftForwards(lose)
    for call_id in range(1, 2 * _MOST_KEPT_BACK):
        left.node_of([call(call_id)])
    for _ in range(3):
        left.tell()
        assert len(left) == _MOST_KEPT_BACK
    assert told == [2 * _MOST_KEPT_BACK - 1, _MOST_KEPT_BACK, _MOST_KEPT_BACK]


def test_what_comes_back_from_a_server_that_is_lost_when_there_is_no_room_goes() -> None:
    losses: list[Callable[[], None]] = []
    left = LeftForwards(lambda address, calls, if_lost: losses.append(if_lost))
    for call_id in range(1, 100):
        left.node_of([call(call_id)])
    left.tell()
    for call_id in range(100, 110 + _MOST_KEPT_BACK):  # of these nobody has been told yet: they stay
        left.node_of([call(call_id)])
    losses[0]()
    assert len(left) == 10 + _MOST_KEPT_BACK
