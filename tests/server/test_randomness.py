"""Experts draw from streams of their own: which expert draws first changes nothing, nor does a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting.randomness import RandomStream
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.checkpointing import served
from tests.support.hosting import ShowsItsMask
from tests.support.servers import WireClient


def masks(order: list[int]) -> dict[int, Tensor]:
    """What the streams of three experts give when they are made, and draw, in this order."""
    torch.manual_seed(7)
    streams = {index: RandomStream(f"e{index}", nn.Dropout()) for index in order}
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


def test_what_an_expert_draws_follows_from_the_seed_of_the_process() -> None:
    def drawn(seed: int) -> int:
        torch.manual_seed(seed)
        return RandomStream("e", nn.Dropout()).next_seed()

    assert drawn(7) == drawn(7) != drawn(2**64 - 1)


def test_a_server_in_the_process_draws_nothing_from_its_generator() -> None:
    expert = ShowsItsMask(64)
    before = torch.get_rng_state()
    with ExpertsServer({"e": expert}) as server, WireClient(server.address) as client:
        client.forward("e", torch.ones(2, 64), call_id=1, keep_graph=True)
        client.backward("e", torch.ones(2, 64), call_id=1, wants_input_grads=[True])
        assert torch.equal(torch.get_rng_state(), before)


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def with_a_hook() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.register_forward_hook(lambda _, __, y: noisy(y))
    return layer


@pytest.mark.parametrize("make", [with_a_hook, lambda: FeedForwardExpert(4, activation=noisy)])
def test_what_is_drawn_in_a_part_known_to_draw_nothing_is_drawn_again_for_the_backward(
    make: Callable[[], nn.Module],
) -> None:
    with ExpertsServer({"e": make()}) as server, WireClient(server.address) as client:
        x, grad = torch.ones(2, 4), torch.ones(2, 4)
        client.forward("e", x, call_id=1, random_seed=5, keep_graph=True)
        again = {"inputs": [x], "random_seed": 5}
        answers = [client.backward("e", grad, call_id=n, wants_input_grads=[True], **again) for n in (1, 2)]
    assert answers[0].tensors[0] is not None
    torch.testing.assert_close(answers[1].tensors, answers[0].tensors)


@pytest.mark.parametrize("seed", [0, 5])
def test_what_a_hook_draws_that_comes_once_it_is_served_is_drawn_again_for_the_backward(seed: int) -> None:
    layer, x = nn.Linear(16, 16, bias=False), torch.ones(8, 16)
    with ExpertsServer({"e": layer}, config={"memory": {"recompute": True}}) as server:
        layer.register_forward_hook(lambda _, __, y: torch.dropout(y, 0.5, True))
        with WireClient(server.address) as client:
            (y,) = client.forward("e", x, call_id=1, random_seed=seed, keep_graph=True).tensors
            (grad,) = client.backward("e", x, call_id=1, wants_input_grads=[True]).tensors
    torch.testing.assert_close(grad, (2.0 * (y != 0)) @ layer.weight.detach())


def test_after_a_restart_an_expert_draws_on_from_where_it_was(tmp_path: Path) -> None:
    def draw(folder: Path, num_calls: int, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        with served(folder, {"e": ShowsItsMask(64)}) as server, WireClient(server.address) as client:
            return [client.forward("e", torch.ones(2, 64), call_id=i).tensors[0] for i in range(num_calls)]

    expected = draw(tmp_path / "without", 3, seed=7)
    found = draw(tmp_path / "with", 1, seed=7) + draw(tmp_path / "with", 2, seed=8)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len({tuple(mask.flatten().tolist()) for mask in expected}) == 3
