"""Tensors that have memory of others are told from those beside them, at once where none is within another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts_server.checkpoints.shared_memory import first_that_shares, is_within_itself

FLAT = torch.zeros(64)
SQUARE = FLAT.view(8, 8)

APART: dict[str, list[Tensor]] = {
    "of their own": [torch.zeros(3), torch.zeros(3)],
    "slices": [FLAT[:8], FLAT[8:24], FLAT[24:]],
    "columns": [SQUARE[:, column] for column in range(8)],
    "a number and columns": [FLAT[0], SQUARE[1:, 0], SQUARE[:, 1:5]],
    "numbers of other sizes": [FLAT[:1].view(torch.int16)[:1], FLAT[:1].view(torch.int16)[1:], FLAT[1:2]],
    "nothing": [FLAT[:0], FLAT[:0], torch.zeros(0)],
    "without memory": [torch.zeros(2, device="meta")] * 2,
    "sparse": [torch.eye(2).to_sparse()] * 2,
}
SHARING: dict[str, list[Tensor]] = {
    "the same": [FLAT, FLAT],
    "a part": [FLAT, FLAT[3]],
    "expanded": [FLAT[5].expand(1000, 1000), FLAT[4:6]],
    "a row and a column": [SQUARE[2], SQUARE[:, 7]],
    "the bytes of others": [FLAT[:2], FLAT.view(torch.uint8)[7:8]],
    "behind one that is apart": [FLAT[:4], FLAT[8:], FLAT[20:30:3]],
}


@pytest.mark.parametrize("tensors", APART.values(), ids=APART)
def test_those_that_are_apart(tensors: list[Tensor]) -> None:
    for order in (tensors, tensors[::-1]):
        assert first_that_shares((str(place), tensor) for place, tensor in enumerate(order)) is None


@pytest.mark.parametrize("tensors", SHARING.values(), ids=SHARING)
def test_the_later_one_is_named(tensors: list[Tensor]) -> None:
    for order in (tensors, tensors[::-1]):
        named = [(str(place), tensor) for place, tensor in enumerate(order)]
        assert first_that_shares(named) in {"1", "2"}


def test_those_without_a_name_may_share() -> None:
    assert first_that_shares([(None, FLAT), (None, FLAT), ("own", torch.zeros(2))]) is None
    assert first_that_shares([(None, FLAT[:9]), (None, FLAT[5:]), ("their", FLAT[3:4])]) == "their"


def test_those_with_a_name_may_share_if_that_is_asked() -> None:
    of_flat = [("row", SQUARE[2]), ("column", SQUARE[:, 7])]
    assert first_that_shares([(None, torch.zeros(2)), *of_flat], only_with_nameless=True) is None
    assert first_that_shares([(None, FLAT[23:24]), *of_flat], only_with_nameless=True) == "row"
    assert first_that_shares([(None, FLAT[15:16]), *of_flat], only_with_nameless=True) == "column"


def test_large_slices_take_no_memory_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("it was compared number by number")

    monkeypatch.setattr(torch, "zeros", refuse)
    slices = torch.empty(1 << 10).split(1 << 5)
    assert first_that_shares((None, tensor) for tensor in slices * 2) is None
    assert first_that_shares((str(place), tensor) for place, tensor in enumerate(slices)) is None


WITHIN_THEMSELVES = {
    "expanded": FLAT[:8].expand(3, 8),
    "expanded within": FLAT[:8, None].expand(8, 3),
    "a number": FLAT[0].expand(2),
    "windows": FLAT.unfold(0, 4, 2),
    "interleaved": FLAT.as_strided((3, 2), (2, 4)),
}
NOT_WITHIN_THEMSELVES = {
    "its own": torch.zeros(3, 4),
    "a number": torch.zeros(()),
    "transposed": torch.zeros(3, 4).t(),
    "columns": SQUARE[:, ::3],
    "one that is expanded to one": FLAT[:8].expand(1, 8),
    "expanded to nothing": FLAT[:1].expand(0),
    "as in channels": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "interleaved, and apart": FLAT.as_strided((2, 2), (3, 2)),
    "without memory": torch.zeros(1, device="meta").expand(3),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("tensor", WITHIN_THEMSELVES.values(), ids=WITHIN_THEMSELVES)
def test_one_whose_elements_share_memory(tensor: Tensor) -> None:
    assert is_within_itself(tensor)


@pytest.mark.parametrize("tensor", NOT_WITHIN_THEMSELVES.values(), ids=NOT_WITHIN_THEMSELVES)
def test_one_whose_elements_do_not(tensor: Tensor) -> None:
    assert not is_within_itself(tensor)
