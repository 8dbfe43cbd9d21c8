"""Deferred weight gradients where some experts are offloaded, remote or compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from experts_server import ExpertsServer
from moe_autograd import parallel_apply, split_backward
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.comparison import one_after_another

deferring = functools.partial(parallel_apply, defer_weight_grads=True)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def steps_of(experts: list[nn.Module], others: list[nn.Module], update: Callable[[], object]) -> list[Tensor]:
    """Two steps of SGD through experts whose weights are elsewhere, beside others; return the inputs' gradients."""
    grads = []
    optimizer = sgd([weight for module in others for weight in module.parameters()])
    for _ in range(2):
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).requires_grad_()
        modules = [*experts, *others]
        outputs = deferring(modules, [(2 * x,)] * len(modules))
        torch.stack(outputs).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
        update()
    return grads


def steps_of_a_loop(experts: list[nn.Module], others: list[nn.Module]) -> list[Tensor]:
    grads = []
    optimizer = sgd([weight for module in (*experts, *others) for weight in module.parameters()])
    for _ in range(2):
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).requires_grad_()
        torch.stack([module(2 * x) for module in (*experts, *others)]).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return grads


def assert_all_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def weights_of(modules: list[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in module.state_dict().values()]


def test_offloaded_experts_beside_plain_ones_get_the_gradients_of_their_weights() -> None:
    offloaded, plain = [two_layers() for _ in range(2)], [two_layers() for _ in range(2)]
    theirs, others = copy.deepcopy(offloaded), copy.deepcopy(plain)
    experts = OffloadedExperts(offloaded, sgd, max_resident_bytes=1 << 20)

    def update() -> None:
        experts.step()
        experts.zero_grad()

    grads = steps_of(list(experts), plain, update)
    assert_all_close(grads, steps_of_a_loop(theirs, others))
    assert_all_close([t for i in range(2) for t in experts.state_dict(i).values()], weights_of(theirs))
    assert_all_close(weights_of(plain), weights_of(others))


def test_remote_experts_beside_plain_ones_get_the_gradients_of_their_weights() -> None:
    hosted, plain = {f"e.{i}": two_layers() for i in range(2)}, [two_layers() for _ in range(2)]
    theirs, others = copy.deepcopy([*hosted.values()]), copy.deepcopy(plain)
    with ExpertsServer(hosted, optimizer=sgd) as server, connect(server.address) as experts:
        optimizer = RemoteOptimizer(experts)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        grads = steps_of(list(experts.values()), plain, update)
        assert_all_close(grads, steps_of_a_loop(theirs, others))
        assert_all_close([*experts.state_dict().values()], weights_of(theirs))
    assert_all_close(weights_of(plain), weights_of(others))


def test_a_first_part_that_no_hosted_weight_waits_for_gathers_nothing() -> None:
    experts = OffloadedExperts([two_layers()], sgd, max_resident_bytes=1 << 20)
    before = [tensor.clone() for tensor in experts.state_dict(0).values()]
    x, scale = (
        torch.ones(3, 4, dtype=torch.float64, requires_grad=True),
        nn.Parameter(torch.tensor(2.0).double()),
    )
    (x_grad,), pending = split_backward(experts[0](x * scale).sum(), None, [x], [scale])
    assert x_grad is not None
    pending.run()
    experts.step()
    assert_all_close([*experts.state_dict(0).values()], before)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_compiled_experts_beside_plain_ones_get_the_gradients_of_their_weights() -> None:
    """What a backward has compiled as one that frees its graph refuses a pass after which it would still be there."""
    torch._dynamo.reset()
    plain, to_compile = [two_layers() for _ in range(2)], [two_layers() for _ in range(2)]
    theirs = copy.deepcopy([*to_compile, *plain])
    compiled: list[nn.Module] = [torch.compile(module, backend="aot_eager") for module in to_compile]
    for module in compiled:
        module(torch.ones(5, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
        module.zero_grad()
    grads = steps_of([], [*compiled, *plain], lambda: None)
    assert_all_close(grads, steps_of_a_loop([], theirs))
    assert_all_close(weights_of([*compiled, *plain]), weights_of(theirs))

    x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    weights = [*compiled[0].parameters()]
    expected = torch.autograd.grad(theirs[0](x).sum(), [x, *theirs[0].parameters()])
    input_grads, pending = split_backward(compiled[0](x).sum(), None, [x], weights)
    assert_all_close([*input_grads, *pending.run()], [*expected])


class Watches(nn.Linear):
    """Has a hook on what it computed that waits for all gradients there."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        z = y.sin()
        register_multi_grad_hook([y, z], lambda grads: self.seen.append(sum(g is not None for g in grads)))
        return z


def test_a_hook_that_waits_for_several_gradients_within_a_call_runs_once() -> None:
    def run(apply: Any) -> list[int]:
        seen: list[int] = []
        x = torch.randn(3, 4, requires_grad=True)
        sum(apply([Watches(seen) for _ in range(2)], [(x * 1,)] * 2)).sum().backward()
        return seen

    assert run(deferring) == run(one_after_another) == [2, 2]
