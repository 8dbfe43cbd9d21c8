"""A digest tells which backwards were gathered, also where some may be among them or not."""

from __future__ import annotations

from moe_autograd.remote.updates import _Gathered
from moe_autograd.wire.gathered import MAX_UNSURE, digest_of, is_digest_of


def test_a_digest_is_of_these_backwards_in_any_order() -> None:
    assert digest_of([3, 1, 2]) == digest_of([1, 2]) ^ digest_of([3])
    assert len({digest_of(some) for some in ([], [1], [2], [1, 2], [1, 3], [2**64 - 1])}) == 6


def test_some_of_the_unsure_ones_may_be_among_them_and_none_of_the_sure_ones_may_be_missing() -> None:
    sure, unsure = digest_of([1, 2]), (5, 7)
    assert is_digest_of(digest_of([1, 2]), sure, unsure, 0)
    assert is_digest_of(digest_of([1, 7, 2]), sure, unsure, 1)
    assert is_digest_of(digest_of([1, 2, 5, 7]), sure, unsure, 2)
    assert not is_digest_of(digest_of([1, 5]), sure, unsure, 0)
    assert not is_digest_of(digest_of([1, 5, 7]), sure, unsure, 1)


def test_a_client_tells_no_more_unsure_ones_than_show_that_they_are_too_many() -> None:
    gathered = _Gathered()
    for sequence in range(100):
        gathered.note(sequence, is_certain=False)
    assert (gathered.count.at_least, gathered.count.at_most, len(gathered.count.unsure)) == (
        0,
        100,
        MAX_UNSURE + 1,
    )
