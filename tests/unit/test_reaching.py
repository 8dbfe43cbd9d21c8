"""Containers of users are read though other threads change them, which they may do between any two steps."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from moe_autograd.autograd.contents.reaching import MOST_LOOKED_AT, at_once, first

CHANGES: list[tuple[Any, Callable[[Any], Iterable[Any]], Callable[[Any], object]]] = [
    (dict.fromkeys(range(3)), dict.keys, lambda held: held.setdefault(3)),
    (set(range(3)), set.__iter__, lambda held: held.add(3)),
    (collections.deque(range(3)), collections.deque.__iter__, lambda held: held.append(3)),
    (list(range(3)), list.__iter__, lambda held: held.append(3)),
]


@pytest.mark.parametrize(
    ("held", "iterate", "change"), CHANGES, ids=[type(held).__name__ for held, *_ in CHANGES]
)
def test_what_changes_just_after_somebody_has_begun_to_read_it_is_read_once_more(
    held: Any, iterate: Callable[[Any], Iterable[Any]], change: Callable[[Any], object]
) -> None:
    own, times = held.copy(), list[int]()

    def iterate_and_change(container: Any) -> Iterable[Any]:
        begun = iter(iterate(container))
        if not times:
            change(container)
        times.append(len(container))
        return begun

    assert at_once(iterate_and_change, own) == (0, 1, 2, 3)


def test_of_a_huge_one_only_the_first_are_read() -> None:
    assert first(iter, range(10**9)) == tuple(range(MOST_LOOKED_AT))


def test_who_is_too_deep_to_read_anything_is_told() -> None:
    def too_deep(_: object) -> Iterable[Any]:
        raise RecursionError

    with pytest.raises(RecursionError):
        at_once(too_deep, [])
