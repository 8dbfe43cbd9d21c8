"""Clients that call one expert of a server at the same time are joined, and each trains as if alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, ServingConfig
from experts_server.hosting.calls import InspectCall
from experts_server.hosting.hosted import HostedExpert
from moe_autograd.errors import ExpertFailedError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.server.test_joining import forward_call, hosted
from tests.support.hosting import ShowsItsMask
from tests.support.servers import START_S, WireClient, tokens

D = 4


def test_an_expert_that_draws_random_numbers_is_found_out_and_backwards_see_the_masks_of_their_forwards() -> (
    None
):
    with ExpertsServer({"e": ShowsItsMask(D)}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(2)]
        for attempt in range(2):
            forwards = at_once(
                server, [lambda c=c, a=attempt: c.forward("e", torch.ones(20, D), call_id=a) for c in clients]
            )
            masks = [answer.tensors[0] for answer in forwards]
            assert all(0 < int((mask == 0).sum()) < mask.numel() for mask in masks)
            assert not torch.equal(*masks)
            for client, mask in zip(clients, masks, strict=True):
                backward = client.backward("e", torch.ones(20, D), call_id=attempt)
                torch.testing.assert_close(backward.tensors[0], mask)
        for client in clients:
            client.channel.close()


class Mixing(nn.Module):
    """Its rows depend on each other, in a way of its own."""

    def __init__(self, mix: Callable[[Tensor], Tensor], width: int = D) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(width, width), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linear(x))


@pytest.mark.parametrize("kept_bytes", [1 << 20, 1], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "mix",
    [
        *(lambda x: x - x.mean(0), lambda x: x.cumsum(0), lambda x: x.flip(0).cumsum(0)),
        *(lambda x: x.softmax(0), lambda x: 1e-4 * x.softmax(0)),
    ],
    ids=["mean", "those before", "those after", "softmax", "small results"],
)
def test_an_expert_whose_rows_depend_on_each_other_is_found_out(
    mix: Callable[[Tensor], Tensor], kept_bytes: int
) -> None:
    module, config = Mixing(mix), ServingConfig(limits=LimitsConfig(kept_forward_bytes=kept_bytes))
    twin = copy.deepcopy(module)
    with ExpertsServer({"e": module}, config=config) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        for attempt in range(3):
            xs = [tokens(2 + n, D, seed=10 * attempt + n).requires_grad_() for n in range(3)]
            own = [(c, x.detach()) for c, x in zip(clients, xs, strict=True)]
            if kept_bytes > 1:  # else only the backwards meet
                forwards = at_once(server, [lambda c=c, x=x: c.forward("e", x) for c, x in own])
                for answer, x in zip(forwards, xs, strict=True):
                    torch.testing.assert_close(answer.tensors[0], twin(x).detach())
            backwards = at_once(
                server,
                [lambda c=c, x=x: c.backward("e", x, inputs=(x,), wants_weight_grads=False) for c, x in own],
            )
            for answer, x in zip(backwards, xs, strict=True):
                (expected,) = torch.autograd.grad(twin(x), x, x.detach())
                torch.testing.assert_close(answer.tensors[0], expected)
        for client in clients:
            client.channel.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_expert_whose_rows_are_alike_up_to_rounding_goes_on_being_joined(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(D, 512), Mixing(torch.tanh, 512), nn.Linear(512, D)).to(dtype)
    with ExpertsServer({"e": module}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        for attempt in range(5):
            xs = [tokens(7 * n + 1, D, seed=attempt).to(dtype) for n in range(3)]
            at_once(
                server,
                [lambda c=c, x=x: c.forward("e", x) for c, x in zip(clients, xs, strict=True)],
            )
        for client in clients:
            client.channel.close()
        assert server._server is not None
        joiner = server._server.registry["e"].hosted.joiner
        assert joiner.can_join
        assert joiner._num_joined == 5


@pytest.mark.parametrize(
    ("mix", "can_join"),
    [
        *((lambda x: x.argsort(0), False), (lambda x: x @ x.T, False)),
        *((lambda x: x.argmax(1), True), (lambda x: x[:, :0], True)),
    ],
    ids=["ranks among rows", "pairs of rows", "ranks in a row", "nothing"],
)
def test_results_that_are_no_floating_ones_or_of_another_shape_are_compared_as_well(
    mix: Callable[[Tensor], Tensor], can_join: bool
) -> None:
    expert = hosted(Mixing(mix), None)
    xs = [tokens(2 + n, D, seed=n) for n in range(3)]
    calls = [forward_call(client, x) for client, x in enumerate(xs)]
    if can_join:
        for outputs, x in zip(expert.forward(calls), xs, strict=True):
            torch.testing.assert_close(outputs.tensors[0], expert.module(x).detach())
    else:
        with pytest.raises(ExpertFailedError, match="depend on no other row"):
            expert.forward(calls)
    assert expert.joiner.can_join == can_join


def at_once(server: ExpertsServer, calls: list[Callable[[], Any]]) -> list[Any]:
    """Make these calls of the expert called e while it is held, and then let it go on: it finds all of them."""
    assert server._server is not None
    registry, results = server._server.registry, {}
    is_held, may_go = threading.Event(), threading.Event()

    def hold(_: HostedExpert) -> None:
        is_held.set()
        assert may_go.wait(START_S)

    registry.submit([InspectCall(b"", lambda *_: None, hold, expert="e")])
    assert is_held.wait(START_S)
    threads = [
        threading.Thread(target=lambda n=n, call=call: results.update({n: call()}))
        for n, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    while len(registry["e"]) < len(calls):
        threading.Event().wait(0.001)
    may_go.set()
    for thread in threads:
        thread.join(START_S)
    return [results[n] for n in range(len(calls))]


class Unlucky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert not (grads[0] == 13).any(), "unlucky"
        return grads[0]


def test_of_backwards_that_are_joined_one_that_fails_fails_alone() -> None:
    module = nn.Sequential(nn.Linear(D, D), Mixing(Unlucky.apply))
    with ExpertsServer({"e": module}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        clients[0].forward("e", tokens(1, D), keep_graph=False)
        answers = at_once(
            server,
            [
                lambda c=c, g=g: c.backward("e", g * torch.ones(1, D), inputs=(tokens(1, D),))
                for c, g in zip(clients, (1, 13, 2), strict=True)
            ],
        )
        assert [answer.code for answer in answers] == ["OK", "EXPERT_FAILED", "OK"]
        assert "expert 'e', backward: its module raised AssertionError: unlucky" in answers[1].text
        torch.testing.assert_close(2 * answers[0].tensors[0], answers[2].tensors[0])
        assert server._server is not None
        assert server._server.registry["e"].hosted.joiner._num_joined == 1
        for client in clients:
            client.channel.close()


def test_clients_that_train_one_expert_together_are_joined_both_ways_and_each_step_is_one_update() -> None:
    module = FeedForwardExpert(D)
    local = copy.deepcopy(module)
    num_rows = [2, 3, 4]
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    with ExpertsServer({"e": module}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        for turn in range(3):
            xs = [tokens(num, D, seed=turn) for num in num_rows]
            grads = [tokens(num, D, seed=20 + num) for num in num_rows]
            at_once(server, [lambda c=c, x=x: c.forward("e", x) for c, x in zip(clients, xs, strict=True)])
            backwards = at_once(
                server, [lambda c=c, g=g: c.backward("e", g) for c, g in zip(clients, grads, strict=True)]
            )
            by_client = []
            for x, grad, backward in zip(xs, grads, backwards, strict=True):
                leaf = x.clone().requires_grad_()
                expected, *weights = torch.autograd.grad(local(leaf), [leaf, *local.parameters()], grad)
                torch.testing.assert_close(backward.tensors[0], expected)
                by_client.append(weights)
            for client, weights in zip(clients, by_client, strict=True):
                client.step()
                client.zero_grad()
                for parameter, gradient in zip(local.parameters(), weights, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        assert server.num_updates == {"e": 9}
        assert server._server is not None
        kinds = server._server.registry["e"].stats.kinds
        for kind in ("forward", "backward"):
            assert kinds[kind].num_calls == 9
            assert kinds[kind].batch_calls.buckets()[-1] == ("+Inf", 3), f"{kind}s went three at a time"
            assert kinds[kind].num_tokens == 3 * sum(num_rows)
        for client in clients:
            client.channel.close()
    torch.testing.assert_close(module.state_dict(), local.state_dict(), rtol=1e-4, atol=1e-6)
