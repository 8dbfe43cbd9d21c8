"""Which outputs a server says were computed from which others, where it keeps no graph of a forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.remote import RemoteExperts, connect
from tests.support.hosting import sgd

D = 4


class States(nn.Module):
    """Returns its state after each step of a sequence: as many tensors as there are steps, or one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in x.unbind(1):
            state = torch.tanh(self.step(step + state))
            states.append(state)
        return tuple(states) if len(states) > 1 else state


class Doubled(nn.Module):
    """Computes its second output from its first, which has no weight in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled, self.layer(doubled)


@pytest.fixture
def experts() -> Iterator[RemoteExperts]:
    modules = {"states": States(), "doubled": Doubled()}
    config = {"memory": {"recompute": True}}
    with (
        ExpertsServer(modules, optimizer=sgd, listen="127.0.0.1:0", config=config) as server,
        connect(server.address) as experts,
    ):
        yield experts


def assert_refuses_to_look(looked_at: Tensor, loss: Tensor) -> None:
    with pytest.raises(RuntimeError, match="expected nobody to look"):
        torch.autograd.grad(loss, looked_at)


def test_each_number_of_outputs_has_uses_of_its_own(experts: RemoteExperts) -> None:
    for num_steps in (3, 2, 1, 4, 2):
        x = torch.ones(2, num_steps, D, requires_grad=True)
        states = experts["states"](x)
        if num_steps > 1:
            assert_refuses_to_look(states[0], states[-1].sum())
            states = experts["states"](x)[-1]
        states.sum().backward()
        assert x.grad is not None


def test_a_call_whose_inputs_want_no_gradient_says_nothing_of_one_whose_do(experts: RemoteExperts) -> None:
    experts["doubled"](torch.ones(2, D))[1].sum().backward()
    doubled, last = experts["doubled"](torch.ones(2, D, requires_grad=True))
    assert_refuses_to_look(doubled, last.sum())


def test_an_evaluation_says_nothing_of_a_training_call(experts: RemoteExperts) -> None:
    expert = experts["doubled"].eval()
    with torch.no_grad():
        expert(torch.ones(2, D))
    for module in (expert, expert.train()):
        doubled, last = module(torch.ones(2, D, requires_grad=True))
        assert_refuses_to_look(doubled, last.sum())
