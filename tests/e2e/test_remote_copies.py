"""Copies of remote experts: further modules of the same hosted ones, otherwise as torch copies a module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.remote import connect

X = torch.ones(1, 4)


@pytest.fixture
def expert():
    with (
        ExpertsServer({"e": nn.Linear(4, 4)}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as server,
        connect(server.address) as experts,
    ):
        yield experts["e"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_hooks_attributes_and_mode(expert, copied):
    expert.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    expert.register_forward_hook(lambda module, inputs, output: output * module.scale)
    expert.register_full_backward_hook(lambda module, grad_inputs, grad_outputs: (grad_inputs[0] * 3,))
    expert.scale = 10
    expert.eval()
    twin = copied(expert)
    assert (twin.scale, twin.training, twin.name) == (10, False, "e")
    x, y = (X.clone().requires_grad_() for _ in range(2))
    before, after = expert(x), twin(y)
    before.sum().backward()
    after.sum().backward()
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(y.grad, x.grad)


def test_what_is_done_to_a_deep_copy_is_not_done_to_the_original(expert):
    expert.scales = [1.0]
    twin = copy.deepcopy(nn.ModuleList([expert, expert]))
    assert twin[0] is twin[1]
    twin[0].register_forward_hook(lambda module, inputs, output: output * 0)
    twin[0].requires_grad_(False).eval().scales.append(2.0)
    assert expert(X).count_nonzero()
    assert (expert.is_trained, expert.training, expert.scales) == (True, True, [1.0])
    assert not twin[0].is_trained


def test_a_shallow_copy_has_the_same_weights_to_freeze(expert):
    here = nn.Linear(4, 4)
    for module in (here, expert):
        copy.copy(module).requires_grad_(False)
    assert not here.weight.requires_grad
    assert not expert.is_trained
