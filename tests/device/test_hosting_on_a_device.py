"""Experts whose modules are on a GPU, hosted by a server in the process of the test, or in one of its own.

What clients get is what the same module gives where it is trained on the same device. Inputs are on the CPU, as those
of clients elsewhere are for a server, but where a test says so.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from experts_server import ExpertsServer
from experts_server.hosting.modules import TransformerExpert
from moe_autograd import FeedForwardExpert, SwiGLUExpert, parallel_apply
from moe_autograd.errors import InvalidCallError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.server.test_joining_clients import at_once
from tests.support.devices import DEVICE, HAS_GPU, hold_up, needs_gpu
from tests.support.hosting import Changes
from tests.support.servers import ServerProcess, WireClient, tokens
from tests.support.training_with_servers import (
    ALIKE,
    ROWS,
    UP_TO_ROUNDING,
    D,
    adam,
    here,
    randoms,
    steps,
)

pytestmark = pytest.mark.gpu


class Slow(FeedForwardExpert):
    """Holds its stream up before it reads anything, in both passes."""

    def forward(self, x: Tensor) -> Tensor:
        hold_up()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: hold_up())
        return y


def assert_trains_alike(
    module: nn.Module, make_optimizer: Any, *, make: Any = None, alike: Any = ALIKE, **options: Any
) -> None:
    """Assert that clients train a module on a server as it is trained here."""
    module = module.to(DEVICE)
    twin = copy.deepcopy(module)
    expected = steps(here(twin), make_optimizer(twin.parameters()), make=make)
    with (
        ExpertsServer({"e": module}, optimizer=make_optimizer, **options) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        got = steps(experts["e"], RemoteOptimizer(experts), make=make)
    torch.testing.assert_close(got, expected, **alike)
    weights, twins = ([p.detach() for p in one.parameters()] for one in (module, twin))
    torch.testing.assert_close(weights, twins, **alike)


# ---- training


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        adam,
        partial(torch.optim.Adam, lr=0.01, fused=True, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.01, foreach=True),
        partial(torch.optim.AdamW, lr=0.01, foreach=False),
        pytest.param(
            partial(torch.optim.AdamW, lr=0.01, capturable=True),
            marks=[
                needs_gpu,
                pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),
            ],
        ),
    ],
    ids=lambda made: f"{made.func.__name__} {made.keywords}",
)
def test_optimizers_on_a_server_step_as_they_do_here(make_optimizer: Any) -> None:
    assert_trains_alike(FeedForwardExpert(D), make_optimizer)


def places(seed: int) -> Tensor:
    return torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:ROWS]


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "swiglu": (lambda: SwiGLUExpert(D, 16), None),
    "slow": (lambda: Slow(D), None),
    "double": (lambda: FeedForwardExpert(D).double(), randoms(torch.float64, ROWS, D)),
    "bfloat16": (lambda: FeedForwardExpert(D).bfloat16(), randoms(torch.bfloat16, ROWS, D)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU()), None),
    "in place": (lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)), None),
    "changes its input": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)), None),
    "multiplies its input": (lambda: Changes(D), None),
    "embedding": (lambda: nn.Embedding(20, D), places),
    "sparse embedding": (lambda: nn.Embedding(20, D, sparse=True), places),
    "transformer": (lambda: TransformerExpert(D), randoms(torch.float32, 2, ROWS, D)),
}


@pytest.mark.parametrize("memory", [{}, {"recompute": True}, {"split_backward": True}], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_on_a_server_train_as_they_do_here(kind: str, memory: dict[str, Any]) -> None:
    make_module, make = MODULES[kind]
    sgd, alike = (
        partial(torch.optim.SGD, lr=0.01),
        UP_TO_ROUNDING if kind in ("transformer", "sparse embedding") else ALIKE,
    )
    assert_trains_alike(make_module(), sgd, make=make, alike=alike, config={"memory": memory})


@pytest.mark.parametrize("samples", [None, 2 * ROWS])
def test_updates_without_steps_of_the_client_are_those_of_a_loop_here(samples: int | None) -> None:
    module = FeedForwardExpert(D).to(DEVICE)
    twin = copy.deepcopy(module)
    optimizer, expected = adam(twin.parameters()), []
    for n in range(4):
        x = tokens(ROWS, D, seed=n).requires_grad_()
        y = here(twin)(x)
        y.square().sum().backward()
        expected += [y.detach(), x.grad]
        if samples is None or n % 2:
            optimizer.step()
            optimizer.zero_grad()
    update: Any = "on_backward" if samples is None else "on_samples"
    with (
        ExpertsServer({"e": module}, optimizer=adam, update=update, samples_per_update=samples) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        got = steps(experts["e"], RemoteOptimizer(experts))
    torch.testing.assert_close(got, expected, **ALIKE)
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), **ALIKE)


def test_experts_that_compute_at_once_on_one_device_do_not_mix_their_numbers() -> None:
    modules = {f"e.{n}": Slow(D).to(DEVICE) for n in range(6)}
    xs = [tokens(ROWS, D, seed=n).requires_grad_() for n in range(6)]
    twins = copy.deepcopy(modules)
    outputs = [here(twin)(x) for twin, x in zip(twins.values(), xs, strict=True)]
    expected = [*outputs, *torch.autograd.grad(torch.stack(outputs).square().sum(), xs)]
    with ExpertsServer(modules, optimizer=adam) as server, connect(server.address, timeout_s=20) as experts:
        outputs = parallel_apply([experts[name] for name in modules], [(x,) for x in xs])
        got = [*outputs, *torch.autograd.grad(torch.stack(outputs).square().sum(), xs)]
    torch.testing.assert_close(got, expected, **ALIKE)


def test_gradients_that_are_not_finite_change_no_weight_on_the_device() -> None:
    module = nn.Linear(D, D).to(DEVICE)
    before = copy.deepcopy(module.state_dict())
    with ExpertsServer({"e": module}, optimizer=adam) as server, connect(server.address) as experts:
        x = torch.full((2, D), 1e30, requires_grad=True)
        with pytest.raises(InvalidCallError, match="finite"):
            experts["e"](x).backward(torch.full((2, D), 1e30))
        RemoteOptimizer(experts).step()
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_a_module_whose_only_tensors_are_buffers_gets_its_inputs_on_their_device() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.arange(float(D)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with ExpertsServer({"e": Scales().to(DEVICE)}) as server, connect(server.address) as experts:
        x = tokens(ROWS, D).requires_grad_()
        y = experts["e"](x)
        y.sum().backward()
    torch.testing.assert_close(
        [y, x.grad], [x * torch.arange(float(D)), torch.arange(float(D)).expand(ROWS, D)]
    )


# ---- joined calls


def test_joined_clients_get_their_own_rows_and_their_own_weight_gradients() -> None:
    module = FeedForwardExpert(D).double().to(DEVICE)
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with ExpertsServer({"e": module}, optimizer=partial(torch.optim.SGD, lr=0.1)) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        for turn in range(2):
            xs, grads = ([tokens(2 + n, D, seed=turn + s).double() for n in range(3)] for s in (0, 10))
            sent = list(zip(clients, xs, grads, strict=True))
            forwards = at_once(server, [partial(c.forward, "e", x) for c, x, _ in sent])
            backwards = at_once(server, [partial(c.backward, "e", g) for c, _, g in sent])
            weights = []
            for x, grad, forward, backward in zip(xs, grads, forwards, backwards, strict=True):
                leaf = x.clone().requires_grad_()
                y = here(twin)(leaf)
                expected, *own = torch.autograd.grad(y, [leaf, *twin.parameters()], grad)
                torch.testing.assert_close([forward.tensors[0], backward.tensors[0]], [y.detach(), expected])
                weights.append(own)
            for client, own in zip(clients, weights, strict=True):
                client.step()
                client.zero_grad()
                for parameter, grad in zip(twin.parameters(), own, strict=True):
                    parameter.grad = grad
                optimizer.step()
        assert server._server is not None
        kinds = server._server.registry["e"].stats.kinds
        assert {k: kinds[k].batch_calls.buckets()[-1] for k in ("forward", "backward")} == {
            "forward": ("+Inf", 2),
            "backward": ("+Inf", 2),
        }
        for client in clients:
            client.channel.close()
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


# ---- clients on the device


def test_a_client_on_the_device_trains_with_a_server_of_its_process_there() -> None:
    """Both have backwards on the one thread that the engine has for a device: the client's waits for the server's."""
    module = FeedForwardExpert(D).to(DEVICE)
    twin = copy.deepcopy(module)
    expected = steps(twin, adam(twin.parameters()), make=lambda seed: tokens(ROWS, D, seed=seed).to(DEVICE))
    with (
        ExpertsServer({"e": module}, optimizer=adam) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        optimizer = RemoteOptimizer(experts)
        got = steps(experts["e"], optimizer, make=lambda seed: tokens(ROWS, D, seed=seed).to(DEVICE))
    torch.testing.assert_close(got, expected, **ALIKE)


def test_a_backward_that_waits_for_a_server_on_its_own_thread_holds_up_no_other_of_the_device() -> None:
    """On the one that the engine has for a device it would, as docs/limits.md says."""

    class WaitsInBackward(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            has_begun.set()
            others_are_done.append(is_done.wait(4))
            return grad

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            waiting: Tensor = WaitsInBackward.apply(x)  # type: ignore[no-untyped-call]
            return waiting

    def other() -> None:
        assert has_begun.wait(20)
        x = torch.ones(D, device=DEVICE, requires_grad=True)
        (x * 2).sum().backward()
        is_done.set()

    has_begun, is_done, others_are_done = threading.Event(), threading.Event(), list[bool]()
    thread = threading.Thread(target=other)
    with ExpertsServer({"e": Waits()}) as server, connect(server.address, timeout_s=20) as experts:
        thread.start()
        x = torch.ones(2, D, device=DEVICE, requires_grad=True)
        with torch.autograd.set_multithreading_enabled(False):
            experts["e"](x).sum().backward()
        thread.join(20)
    assert others_are_done == [True]


CONFIG = """
listen = "127.0.0.1:0"

[optimizer]
name = "adam"
lr = 0.01

[experts.e]
class = "ffn"
args = {{ d_model = {width}, device = "{device}" }}
"""


def test_a_server_that_is_told_the_device_in_its_file_trains_there(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(CONFIG.format(width=D, device=DEVICE))
    with (
        ServerProcess("--config", str(file), is_warm=not HAS_GPU) as server,
        connect(server.address, timeout_s=60) as experts,
    ):
        twin = FeedForwardExpert(D)
        twin.load_state_dict({k.removeprefix("e."): v for k, v in experts.state_dict().items()})
        twin.to(DEVICE)
        make = partial(torch.optim.Adam, lr=0.01, fused=True)

        def on_device(seed: int) -> Tensor:
            return tokens(ROWS, D, seed=seed).to(DEVICE)

        expected = steps(twin, make(twin.parameters()), make=on_device)
        got = steps(experts["e"], RemoteOptimizer(experts), make=on_device)
        weights = {k.removeprefix("e."): v.to(DEVICE) for k, v in experts.state_dict().items()}
    torch.testing.assert_close(got, expected, **ALIKE)
    torch.testing.assert_close(weights, dict(twin.state_dict()), **ALIKE)
