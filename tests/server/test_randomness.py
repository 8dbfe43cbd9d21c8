"""Experts draw from streams of their own: which expert draws first changes nothing, nor does a restart."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting.randomness import RandomStream
from tests.support.checkpointing import served
from tests.support.hosting import ShowsItsMask
from tests.support.servers import WireClient


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


def test_what_a_hook_draws_is_drawn_again_for_the_backward() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.register_forward_hook(lambda _, __, y: y * torch.rand_like(y))
    with ExpertsServer({"e": layer}) as server, WireClient(server.address) as client:
        x = torch.ones(2, 4)
        y = client.forward("e", x, random_seed=5).tensors[0]
        again = {"inputs": [x], "random_seed": 5, "wants_input_grads": [True]}
        given = client.backward("e", torch.ones(2, 4), call_id=2, **again).tensors[0]
    assert y is not None
    noise = y / (x @ layer.weight.detach().T)
    torch.testing.assert_close(given, noise @ layer.weight.detach())


def test_after_a_restart_an_expert_draws_on_from_where_it_was(tmp_path: Path) -> None:
    def draw(folder: Path, num_calls: int, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        with served(folder, {"e": ShowsItsMask(64)}) as server, WireClient(server.address) as client:
            return [client.forward("e", torch.ones(2, 64), call_id=i).tensors[0] for i in range(num_calls)]

    expected = draw(tmp_path / "without", 3, seed=7)
    found = draw(tmp_path / "with", 1, seed=7) + draw(tmp_path / "with", 2, seed=8)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len({tuple(mask.flatten().tolist()) for mask in expected}) == 3
