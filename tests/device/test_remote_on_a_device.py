"""Remote experts called from a GPU: the layer is where its inputs are, its experts somewhere else.

The experts are on the CPU here, and what clients get is what these give there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter
from moe_autograd.errors import InvalidCallError
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect
from tests.support.devices import DEVICE, needs_gpu
from tests.support.hosting import ShowsItsMask, sgd
from tests.support.servers import tokens
from tests.support.training_with_servers import ffns, served

pytestmark = pytest.mark.gpu

NUM_EXPERTS, WIDTH = 4, 16


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("is_default", [False, True])
def test_a_layer_on_a_gpu_with_experts_on_a_server(is_default: bool, on_failure: str) -> None:
    hosted = ffns()
    router = TopKRouter(WIDTH, NUM_EXPERTS, top_k=2).to(DEVICE)
    local = MixtureOfExperts(router, copy.deepcopy(list(hosted.values()))).to(DEVICE)
    with (
        ExpertsServer(hosted) as server,
        torch.device(DEVICE if is_default else "cpu"),
        connect(server.address, timeout_s=20) as experts,
    ):
        remote = MixtureOfExperts(router, experts, on_failure=on_failure)  # type: ignore[arg-type]
        x = torch.randn(50, WIDTH, device="cpu").to(DEVICE)
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for layer, found in ((remote, theirs), (local, ours)):
            own = x.clone().requires_grad_()
            y = layer(own)
            found += [y, *torch.autograd.grad(y.square().sum(), [own, router.weight])]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_layer_goes_on_without_the_experts_of_a_server_that_is_gone() -> None:
    """As a layer on the CPU does."""
    hosted = ffns()
    router = TopKRouter(WIDTH, NUM_EXPERTS, top_k=2)
    some = {name: module for name, module in hosted.items() if name != "ffn.1"}
    with ExpertsServer(some, optimizer=sgd) as stays:
        goes = ExpertsServer({"ffn.1": hosted["ffn.1"]}, optimizer=sgd).start()
        retry = RetryPolicy(patience_s=0)
        with connect([stays.address, goes.address], timeout_s=20, retry=retry) as experts:
            goes.stop()
            found = []
            for device in (DEVICE, "cpu"):
                x = tokens(50, WIDTH).to(device).requires_grad_()
                layer = MixtureOfExperts(router.to(device), experts, on_failure="drop")
                y = layer(x)
                (grad,) = torch.autograd.grad(y.square().sum(), x)
                assert {y.device.type, grad.device.type} == {device}
                found.append([y.detach().cpu(), grad.cpu()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


# ---- devices


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y.sum(), y + 1


@pytest.mark.parametrize("devices", [(DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, DEVICE)])
def test_outputs_are_on_the_first_inputs_device_and_gradients_on_their_own_ones(
    devices: tuple[str, str],
) -> None:
    with served({"two": TwoInputs()}) as experts:
        x, y = (tokens(3, WIDTH, seed=n).to(device).requires_grad_() for n, device in enumerate(devices))
        first, second = experts["two"](x, y)
        assert {first.device.type, second.device.type} == {devices[0]}
        grads = torch.autograd.grad(first.sum() + (second * 2).sum(), [x, y])
        assert tuple(grad.device.type for grad in grads) == devices
        with torch.no_grad():
            assert experts["two"](x, y)[0].device.type == devices[0]
    expected = [y.detach().sum().cpu().expand(3, WIDTH), (x.detach().sum().cpu() + 2).expand(3, WIDTH)]
    torch.testing.assert_close([grad.cpu() for grad in grads], expected)


FORMS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: tokens(WIDTH, 5).to(DEVICE).t(),
    "every second": lambda: tokens(10, 2 * WIDTH).to(DEVICE)[::2, ::2],
    "expanded": lambda: tokens(1, WIDTH).to(DEVICE).expand(5, WIDTH),
    "conjugate": lambda: torch.view_as_complex(tokens(5, WIDTH, 2).to(DEVICE)).conj(),
    "negative bit": lambda: torch.view_as_complex(tokens(5, WIDTH, 2).to(DEVICE)).conj().imag,
    "no rows": lambda: tokens(0, WIDTH).to(DEVICE),
    "one number": lambda: tokens(1).to(DEVICE)[0],
    "double": lambda: tokens(5, WIDTH).double().to(DEVICE),
    "half": lambda: tokens(5, WIDTH).half().to(DEVICE),
    "integers": lambda: torch.arange(-10, 10).to(DEVICE).view(4, 5).t(),
    "booleans": lambda: (tokens(5, WIDTH) > 0).to(DEVICE),
    "several messages": lambda: tokens(300_000, WIDTH).to(DEVICE),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_the_device_arrive_whatever_their_form(form: str) -> None:
    with served({"same": nn.Identity()}) as experts:
        x = FORMS[form]().detach()
        x.requires_grad_(x.is_floating_point() or x.is_complex())
        y = experts["same"](x)
        torch.testing.assert_close(y.detach(), x.detach().resolve_conj(), rtol=0, atol=0)
        assert y.device == x.device
        if x.requires_grad:
            grad = (x.detach() * 2).resolve_conj()
            (found,) = torch.autograd.grad(y, x, grad)
            torch.testing.assert_close(found, grad, rtol=0, atol=0)
            assert found.device == x.device


@pytest.mark.parametrize("compression", ["none", "bfloat16", "float16", "int8"])
def test_tensors_of_the_device_are_compressed_as_those_of_the_cpu(compression: str) -> None:
    with served({"same": nn.Identity()}, compression=compression) as experts:
        found = []
        for device in (DEVICE, "cpu"):
            x = tokens(WIDTH, 300).to(device).t().requires_grad_()
            y = experts["same"](x)
            found.append([y.detach().cpu(), torch.autograd.grad(y, x, y.detach() * 3)[0].cpu()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_inputs_that_are_sent_again_for_a_backward_are_those_of_the_device() -> None:
    module = FeedForwardExpert(WIDTH)
    with (
        ExpertsServer({"e": module}, optimizer=sgd, config={"limits": {"kept_forward_bytes": 1}}) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        x = tokens(5, WIDTH).to(DEVICE).requires_grad_()
        y = experts["e"](x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
    leaf = x.detach().cpu().requires_grad_()
    (expected,) = torch.autograd.grad(module(leaf).square().sum(), leaf)
    torch.testing.assert_close(grad.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_autocast_of_the_device_sends_what_the_expert_takes() -> None:
    module = FeedForwardExpert(WIDTH)
    with served({"e": module}) as experts, torch.autocast(DEVICE, dtype=torch.bfloat16):
        x = tokens(5, WIDTH).to(DEVICE, torch.bfloat16).requires_grad_()
        y = experts["e"](x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert (y.dtype, y.device.type) == (torch.float32, DEVICE)
    assert (grad.dtype, grad.device.type) == (torch.bfloat16, DEVICE)
    torch.testing.assert_close(y.detach().cpu(), module(x.detach().cpu().float()).detach())


def test_gradients_of_the_device_that_are_not_finite_are_refused_and_the_next_ones_are_not() -> None:
    with served({"e": FeedForwardExpert(WIDTH)}) as experts:
        x = tokens(5, WIDTH).to(DEVICE).requires_grad_()
        with pytest.raises(InvalidCallError, match="finite"):
            experts["e"](x).backward(torch.full((5, WIDTH), float("inf"), device=DEVICE))
        experts["e"](x).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


def test_dropout_on_a_server_is_the_same_for_a_client_on_the_device() -> None:
    masks = []
    with served({"e": ShowsItsMask(WIDTH)}) as experts:
        for device in (DEVICE, "cpu"):
            torch.manual_seed(4)
            x = torch.ones(20, WIDTH, device=device, requires_grad=True)
            y = experts["e"](x)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y.detach(), rtol=0, atol=0)
            masks.append(y.detach().cpu())
    torch.testing.assert_close(masks[0], masks[1], rtol=0, atol=0)


# ---- training


@needs_gpu
def test_steps_leave_nothing_on_the_device() -> None:
    with served({"e": nn.Identity()}) as experts:
        used = []
        for _ in range(4):
            x = tokens(16384, 64).to(DEVICE).requires_grad_()
            experts["e"](x).square().sum().backward()
            del x
            used.append(torch.cuda.memory_allocated())
    assert used[-1] - used[0] < (1 << 20), "one input has 4 MiB"


def test_a_training_of_a_layer_on_the_device_is_one_of_local_experts() -> None:
    hosted = ffns()
    router = TopKRouter(WIDTH, NUM_EXPERTS, top_k=2).double().to(DEVICE)
    for module in hosted.values():
        module.double()
    twin = MixtureOfExperts(copy.deepcopy(router), copy.deepcopy(list(hosted.values()))).to(DEVICE)
    with served(hosted, 2) as experts:
        layer = MixtureOfExperts(router, experts)
        trainings: list[tuple[MixtureOfExperts, list[Any]]] = [
            (layer, [sgd(router.parameters()), RemoteOptimizer(experts)]),
            (twin, [sgd(twin.parameters())]),
        ]
        losses: list[list[Tensor]] = []
        for model, optimizers in trainings:
            losses.append([])
            for seed in range(3):
                x = tokens(50, WIDTH, seed=seed).double().to(DEVICE)
                loss = (model(x) - x.flip(0)).square().mean()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                losses[-1].append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    for module, own in zip(hosted.values(), twin.experts, strict=True):
        torch.testing.assert_close(module.state_dict(), own.cpu().state_dict())
