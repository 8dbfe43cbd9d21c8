"""A server that is started anew with another configuration: clients take what it says now, or say what has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import GradientsLostError, InvalidCallError
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.remote.calls import Request
from moe_autograd.remote.jobs import Job
from moe_autograd.wire.heads import BackwardHead
from tests.support.hosting import sgd
from tests.support.servers import WireClient

D = 4


@dataclass
class Place:
    """An address at which one server after the other is started, between a client's calls."""

    address: str = "127.0.0.1:0"
    _server: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def host(self, module: nn.Module, optimizer: Any = sgd) -> None:
        """Stop the server there, and start one of this expert."""
        self._server.close()
        server = ExpertsServer({"e": module}, optimizer=optimizer, listen=self.address)
        self.address = self._server.enter_context(server).address


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place._server.close()


def train(optimizer: RemoteOptimizer, expert: Any, x: torch.Tensor) -> bool:
    """Make a step; return whether the weights were to be trained."""
    optimizer.zero_grad()
    y = expert(x)
    if y.requires_grad:
        y.sum().backward()
    optimizer.step()
    return bool(y.requires_grad)


def test_an_expert_that_is_trained_from_now_on_is_trained(place: Place) -> None:
    module = nn.Linear(D, D)
    place.host(module)
    with connect(place.address) as experts:
        optimizer = RemoteOptimizer(experts)
        place.host(module, None)
        experts.info()
        place.host(module)
        experts["e"](torch.ones(2, D))  # the first that the new server answers
        assert experts["e"].is_trained
        before = module.bias.detach().clone()
        assert train(optimizer, experts["e"], torch.ones(2, D))
        assert not torch.equal(module.bias, before)


def test_an_expert_that_was_not_trained_when_the_optimizer_was_made_is_trained_from_now_on(
    place: Place,
) -> None:
    module = nn.Linear(D, D)
    place.host(module, None)
    with (
        ExpertsServer({"other": nn.Linear(D, D)}, optimizer=sgd) as server,
        connect([place.address, server.address]) as experts,
    ):
        optimizer = RemoteOptimizer(experts)
        place.host(module)
        experts.info()
        before = module.bias.detach().clone()
        assert train(optimizer, experts["e"], torch.ones(2, D))
        assert not torch.equal(module.bias, before)


@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_an_expert_that_is_trained_no_more_is_an_error_at_the_step(
    place: Place, input_requires_grad: bool
) -> None:
    module = nn.Linear(D, D)
    place.host(module)
    x = torch.ones(2, D, requires_grad=input_requires_grad)
    with connect(place.address) as experts:
        optimizer = RemoteOptimizer(experts)
        train(optimizer, experts["e"], x)
        place.host(module, None)
        message = (
            r"expert 'e' at .*, step: expected to be trained, as it was, got a server .* without an optimizer"
        )
        for _ in range(2):
            with pytest.raises(InvalidCallError, match=message):
                train(optimizer, experts["e"], x)
            optimizer.zero_grad()


def test_experts_of_other_servers_are_not_stepped_beside_one_that_is_trained_no_more(place: Place) -> None:
    module, other = nn.Linear(D, D), nn.Linear(D, D)
    place.host(module)
    with (
        ExpertsServer({"other": other}, optimizer=sgd) as server,
        connect(server.address) as others,
        connect(place.address) as experts,
    ):
        optimizer = RemoteOptimizer([others["other"], experts["e"]])
        before = other.weight.detach().clone()
        others["other"](torch.ones(2, D)).sum().backward()
        place.host(module, None)
        experts.info()
        with pytest.raises(InvalidCallError, match="Nothing was changed"):
            optimizer.step()
        assert torch.equal(other.weight, before)


def test_a_server_refuses_to_step_with_gradients_that_an_untrained_expert_cannot_have(place: Place) -> None:
    place.host(nn.Linear(D, D), None)
    with connect(place.address) as experts:
        connection = experts.connection
        request = Request("e", BackwardHead(b"", 1, 1, 1, "e", True, ()), ())
        connection._updates.note_backwards([Job(request, place.address)], True, {})
        with pytest.raises(GradientsLostError, match="of 1 backwards, got an expert that is not trained"):
            connection.update("Step", ["e"])


@pytest.mark.parametrize(
    ("after", "x"),
    [(nn.Linear(6, 6), torch.ones(2, 6)), (nn.Linear(D, D).double(), torch.ones(2, D).double())],
    ids=["shape", "dtype"],
)
def test_what_the_new_server_takes_is_taken(place: Place, after: nn.Module, x: torch.Tensor) -> None:
    place.host(nn.Linear(D, D))
    with connect(place.address) as experts:
        experts["e"](torch.ones(2, D))
        place.host(after)
        torch.testing.assert_close(experts["e"](x), after(x))


def test_what_it_takes_no_more_names_the_expert_and_what_it_took_before(place: Place) -> None:
    place.host(nn.Linear(D, D))
    with connect(place.address) as experts:
        x = torch.ones(2, D)
        y = experts["e"](x)
        place.host(nn.Linear(6, 6))
        message = (
            r"expert 'e' at .*: expected shape \(\.\.\., 6\), got \(2, 4\) .* Its server was started anew "
            r"with another configuration \(inputs: \(\.\.\., 4\) float32, now "
            r"\(\.\.\., 6\) float32; num_parameters: 20, now 42\)\."
        )
        with pytest.raises(InvalidCallError, match=message):
            y.sum().backward()
        for _ in range(2):
            with pytest.raises(InvalidCallError, match=message):
                experts["e"](x)


def test_a_call_that_was_always_wrong_says_nothing_of_changes(place: Place) -> None:
    place.host(nn.Linear(D, D))
    with connect(place.address) as experts, pytest.raises(InvalidCallError) as refused:
        experts["e"](torch.ones(2, 6))
    assert "started anew" not in str(refused.value)


def test_an_expert_that_draws_from_now_on_draws_from_the_callers_stream(place: Place) -> None:
    place.host(nn.Linear(D, D))
    with connect(place.address) as experts:
        experts["e"](torch.ones(2, D))
        place.host(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5)))
        drawn = []
        for _ in range(3):
            torch.manual_seed(3)
            drawn.append(experts["e"](torch.ones(8, D)))
        assert torch.equal(drawn[1], drawn[2])


def test_a_state_of_another_layout_is_fetched_as_it_is_now(place: Place) -> None:
    place.host(nn.Linear(D, D))
    with connect(place.address) as experts:
        place.host(nn.Linear(D, D, bias=False))
        assert list(experts.state_dict()) == ["e.weight"]


def test_each_result_tells_which_server_gave_it(place: Place) -> None:
    marks = []
    for _ in range(2):
        place.host(nn.Linear(D, D))
        with WireClient(place.address) as client:
            answers = [client.forward("e", torch.ones(2, D)), client.forward("e", torch.ones(2, 9))]
            marks += [answer.result.server for answer in answers]
    assert marks[0] == marks[1] != marks[2] == marks[3]
    assert 0 not in marks


def test_of_replicas_the_one_that_answers_is_believed() -> None:
    first, second = (
        ExpertsServer({"e": nn.Linear(D, D)}).start(),
        ExpertsServer({"e": nn.Linear(6, 6)}).start(),
    )
    with connect([first.address, second.address]) as experts:
        first.stop()
        try:
            assert experts["e"](torch.ones(2, 6)).shape == (2, 6)
        finally:
            second.stop()
