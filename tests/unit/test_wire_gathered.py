"""A digest tells which backwards were gathered, also where some may be among them or not."""

from __future__ import annotations

from moe_autograd.wire.gathered import digest_of, is_digest_of


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
