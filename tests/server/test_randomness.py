"""Experts draw from streams of their own: which expert draws first changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experts_server.hosting.randomness import RandomStream


def masks(order: list[int]) -> dict[int, Tensor]:
    """What each of three streams, made in the same way, gives when they draw in this order."""
    torch.manual_seed(7)
    streams = [RandomStream(nn.Dropout()) for _ in range(3)]
    drawn = {}
    for index in order:
        with streams[index].drawing():
            drawn[index] = torch.dropout(torch.ones(64), 0.5, True)
    return drawn


def test_what_an_expert_draws_does_not_depend_on_who_draws_first() -> None:
    one, other = masks([0, 1, 2]), masks([2, 0, 1])
    for index in range(3):
        assert torch.equal(one[index], other[index])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[1], one[2])
