"""Weights that freeze or thaw after they were hosted are trained as in torch, or it is said that they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import ExpertFailedError, GradientsLostError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.server.test_joining import backward_call, forward_call, hosted, rows, step
from tests.support.hosting import sgd

D = 4
NUM_STEPS = 5


class Changing(nn.Module):
    """Freezes or thaws one of its layers before its third step."""

    def __init__(self, *, thaws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(not thaws)
        self.thaws, self.num_steps = thaws, 0

    def forward(self, x: Tensor) -> Tensor:
        self.second.requires_grad_((self.num_steps >= 2) is self.thaws)
        y: Tensor = self.second(self.first(x).tanh())
        return y


def xs() -> list[Tensor]:
    return list(torch.randn(NUM_STEPS, 3, D, generator=torch.Generator().manual_seed(1)).requires_grad_())


@pytest.mark.parametrize("memory", [{}, {"recompute": True}, {"split_backward": True}], ids=str)
@pytest.mark.parametrize("thaws", [True, False])
def test_a_weight_that_freezes_or_thaws_between_steps_is_trained_as_in_torch(
    thaws: bool, memory: dict[str, Any]
) -> None:
    module, plain = (Changing(thaws=thaws) for _ in range(2))
    own = sgd(plain.parameters())
    for plain.num_steps, x in enumerate(xs()):
        plain(x).square().mean().backward()
        own.step()
        own.zero_grad()
    with (
        ExpertsServer(
            {"e": module},
            optimizer=lambda _: sgd(module.parameters()),
            config={"memory": memory},
        ) as server,
        connect(server.address) as experts,
    ):
        optimizer = RemoteOptimizer(experts)
        for module.num_steps, x in enumerate(xs()):
            experts["e"](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_joined_backwards_train_a_weight_that_has_thawed() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double()
    module[0].requires_grad_(False)
    expert = hosted(module, weights=list(module.parameters()))
    module[0].requires_grad_()
    grads = [rows(2, seed=client) for client in (1, 2)]
    plain = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    expected = torch.autograd.grad(module(rows(2, seed=0)), list(module.parameters()), sum(grads))
    expert.forward([forward_call(client, rows(2, seed=0)) for client in (1, 2)])
    expert.backward_joined([backward_call(client, grad) for client, grad in zip((1, 2), grads, strict=True)])
    for client in (1, 2):
        step(expert, client)
    moved = plain - torch.nn.utils.parameters_to_vector(module.parameters())
    torch.testing.assert_close(moved, 0.1 * torch.cat([grad.flatten() for grad in expected]))


@pytest.mark.parametrize("split", [False, True])
def test_a_weight_that_thaws_and_no_optimizer_has_is_told_of_and_nothing_changes(split: bool) -> None:
    expert = hosted(Changing(thaws=True).double(), split=split)
    before = {key: value.clone() for key, value in expert.module.state_dict().items()}
    expert.module.num_steps = 2
    text = "expected weights that its optimizer has not got to stay frozen, got 'second.weight' thawed. Nothing was"
    expert.forward([forward_call(1, rows(2, seed=0))])
    if split:
        expert.backward(backward_call(1, rows(2, seed=1)))
        expert.finish()
        with pytest.raises(GradientsLostError, match=text):
            step(expert, 1)
    else:
        with pytest.raises(ExpertFailedError, match=text):
            expert.backward(backward_call(1, rows(2, seed=1)))
        assert step(expert, 1) == 0
    torch.testing.assert_close(dict(expert.module.state_dict()), before, rtol=0, atol=0)
