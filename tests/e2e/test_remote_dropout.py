"""Random numbers of experts on servers: a gradient is of the mask that its forward drew, whatever was lost since."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, MemoryConfig, ServingConfig
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import sgd

NAMES = [f"dropout.{index}" for index in range(4)]


def make_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)) for name in NAMES}


def forwards(experts: RemoteExperts, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Call all experts in one pass; return their inputs, and what they made of them."""
    xs = [torch.ones(rows, 4, requires_grad=True) for _ in NAMES]
    modules = [experts[name] for name in NAMES]
    return xs, modules[0].call_group.call_together(modules, [(x,) for x in xs], [{}] * len(xs))


def check_gradients(experts: RemoteExperts, xs: list[Tensor], ys: list[Tensor]) -> None:
    """Of ones, each output tells its mask: it is the sum of the weights that were let through."""
    state = experts.state_dict()
    for name, grad, y in zip(NAMES, torch.autograd.grad(sum(y.sum() for y in ys), xs), ys, strict=True):
        weight, bias = state[f"{name}.1.weight"], state[f"{name}.1.bias"]
        mask = torch.linalg.solve(2 * weight.double(), (y - bias).detach().double().T).T.round()
        torch.testing.assert_close(grad, (2 * mask * weight.sum(0)).float())


@pytest.mark.parametrize("rows", [8, 3000])
@pytest.mark.parametrize(
    "config",
    [
        ServingConfig(),
        ServingConfig(limits=LimitsConfig(kept_forward_bytes=1)),
        ServingConfig(memory=MemoryConfig(recompute=True)),
        ServingConfig(memory=MemoryConfig(recompute=True), limits=LimitsConfig(kept_forward_bytes=1)),
    ],
    ids=["kept", "let go", "recomputed", "recomputed and let go"],
)
def test_a_gradient_is_of_the_mask_of_its_forward(config: ServingConfig, rows: int) -> None:
    with (
        ExpertsServer(make_modules(), optimizer=sgd, config=config) as server,
        connect(server.address) as experts,
    ):
        one, other = forwards(experts, rows), forwards(experts, rows)
        check_gradients(experts, *other)
        check_gradients(experts, *one)


def test_also_where_the_server_was_restarted_in_between() -> None:
    modules = make_modules()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        address = server.enter_context(ExpertsServer(modules, optimizer=sgd)).address
        experts = stack.enter_context(connect(address))
        xs, ys = forwards(experts, 8)
        server.close()
        server.enter_context(ExpertsServer(modules, optimizer=sgd, listen=address))
        check_gradients(experts, xs, ys)


def test_each_call_draws_other_numbers_and_so_does_each_expert() -> None:
    with ExpertsServer(make_modules(), optimizer=sgd) as server, connect(server.address) as experts:
        for name in NAMES[1:]:
            experts[name].load_state_dict(experts[NAMES[0]].state_dict())
        ys = [*forwards(experts, 64)[1], *forwards(experts, 64)[1]]
        for index, y in enumerate(ys):
            assert not any(torch.equal(y, other) for other in ys[:index])


def test_after_an_update_too() -> None:
    with ExpertsServer(make_modules(), optimizer=sgd) as server, connect(server.address) as experts:
        xs, ys = forwards(experts, 8)
        before = experts.state_dict()
        forwards(experts, 8)[1][0].sum().backward()
        RemoteOptimizer(experts).step()
        experts.load_state_dict(before)
        check_gradients(experts, xs, ys)


def test_a_client_that_connects_once_a_hook_draws_sends_what_it_draws_from() -> None:
    layer, x = nn.Linear(16, 16, bias=False), torch.ones(8, 16, requires_grad=True)
    with ExpertsServer({"e": layer}, optimizer=sgd) as server:
        layer.register_forward_hook(lambda _, __, y: torch.dropout(y, 0.5, True))
        with connect(server.address) as experts:
            # It draws twice: with what the client has restored.
            y = checkpoint(experts["e"], x, use_reentrant=True)
            y.sum().backward()
    torch.testing.assert_close(x.grad, (2.0 * (y != 0)) @ layer.weight.detach())
