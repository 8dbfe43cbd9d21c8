"""Experts whose modules are on a GPU: their random numbers, weights and memory.

As in `test_hosting_on_a_device`, inputs are on the CPU.
"""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.hosting.calls import Call, Outputs
from experts_server.serving.streams import PassStream
from moe_autograd import FeedForwardExpert
from moe_autograd.errors import ConfigError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.server.test_joining_clients import at_once
from tests.support.devices import DEVICE, HAS_GPU, needs_gpu
from tests.support.hosting import ShowsItsMask
from tests.support.servers import WireClient, tokens, wait_until
from tests.support.training_with_servers import ALIKE, ROWS, D, adam, here, hosted, randoms, steps

pytestmark = pytest.mark.gpu


class Optimizers:
    """Makes optimizers, and remembers the last one."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self._make = make

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.last = self._make(parameters)
        return self.last


# ---- random numbers


def test_a_module_that_draws_on_its_device_is_found_out_where_calls_are_joined() -> None:
    with ExpertsServer({"e": ShowsItsMask(D).to(DEVICE)}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(2)]
        x = torch.ones(20, D)
        masks = [a.tensors[0] for a in at_once(server, [partial(c.forward, "e", x) for c in clients])]
        grads = [client.backward("e", x).tensors[0] for client in clients]
        for client in clients:
            client.channel.close()
        assert not torch.equal(*masks)
        torch.testing.assert_close(grads, masks, rtol=0, atol=0)
        joiner = hosted(server).joiner
        assert (joiner.draws_random_numbers, joiner.can_join) == (True, True)


class Rechecks(ShowsItsMask):
    """Computes itself again in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return masked


OPTIONS: list[dict[str, Any]] = [{}, {"memory": {"recompute": True}}, {"limits": {"kept_forward_bytes": 1}}]


@pytest.mark.parametrize("config", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [ShowsItsMask, Rechecks])
def test_a_backward_sees_the_dropout_of_its_forward_and_the_seed_decides_both(make: Any, config: Any) -> None:
    masks: list[Tensor] = []
    with (
        ExpertsServer({"e": make(D).to(DEVICE)}, optimizer=adam, config=config) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            for _ in range(2):
                x = torch.ones(20, D, requires_grad=True)
                y = experts["e"](x)
                torch.rand(5, device=DEVICE)
                y.sum().backward()
                torch.testing.assert_close(x.grad, y.detach(), rtol=0, atol=0)
                masks.append(y.detach())
    torch.testing.assert_close(masks[:2], masks[4:], rtol=0, atol=0)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4


class DrawsLater(Function):
    """Multiplies its gradient by random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = self.linear(DrawsLater.apply(x))  # type: ignore[no-untyped-call]
        return noisy


@pytest.mark.parametrize("memory", [{}, {"split_backward": True}], ids=str)
def test_what_a_backward_draws_follows_from_the_seed_of_its_call(memory: dict[str, Any]) -> None:
    found: list[Tensor | None] = []
    with (
        ExpertsServer({"e": Noisy().to(DEVICE)}, optimizer=adam, config={"memory": memory}) as server,
        connect(server.address, timeout_s=20) as experts,
    ):
        for num_others in (1, 2):
            torch.manual_seed(3)
            x = torch.ones(20, D, requires_grad=True)
            y = experts["e"](x)
            for _ in range(num_others):
                torch.rand(1, device=DEVICE)
            y.sum().backward()
            found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_backward_without_the_seed_of_its_forward_is_refused_where_the_module_draws_on_its_device() -> None:
    with ExpertsServer({"e": ShowsItsMask(D).to(DEVICE)}) as server, WireClient(server.address) as client:
        x = torch.ones(20, D)
        assert client.forward("e", x, keep_graph=False).code == "OK"
        assert "expected the random seed" in client.backward("e", x, inputs=(x,)).text


def test_an_experts_own_random_numbers_on_the_device_go_on_after_a_restart(tmp_path: Path) -> None:
    masks: list[Any] = []
    module = ShowsItsMask(D).to(DEVICE)
    for folder in ("saved", "one", "other"):
        with (
            ExpertsServer({"e": module}, config={"checkpoint_dir": str(tmp_path / folder)}) as server,
            WireClient(server.address) as client,
        ):
            masks.append(client.forward("e", torch.ones(20, D), keep_graph=False).tensors[0])
        if folder == "saved":
            for other in ("one", "other"):
                shutil.copytree(tmp_path / folder, tmp_path / other)
    assert not torch.equal(masks[0], masks[1])
    torch.testing.assert_close(masks[1], masks[2], rtol=0, atol=0)


# ---- weights


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_goes_on_after_a_restart_with_all_its_state_on_the_device(
    fused: bool, tmp_path: Path
) -> None:
    made = Optimizers(partial(torch.optim.Adam, lr=0.01, fused=fused))
    module = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, D))
    straight: Any = copy.deepcopy(module).to(DEVICE)
    expected = steps(here(straight), made(straight.parameters()))
    got = []
    for seeds in ((0, 1), (2, 3)):
        own: Any = copy.deepcopy(module).to(DEVICE)
        config = {"checkpoint_dir": str(tmp_path)}
        with (
            ExpertsServer({"e": own}, optimizer=made, config=config) as server,
            connect(server.address, timeout_s=20) as experts,
        ):
            got += steps(experts["e"], RemoteOptimizer(experts), seeds=seeds)
    torch.testing.assert_close(got, expected, **ALIKE)
    torch.testing.assert_close(own.state_dict(), straight.state_dict(), **ALIKE)
    state = made.last.state[own[1].weight]
    assert {state[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {DEVICE}


def test_gradients_that_were_gathered_before_a_restart_are_applied_on_the_device(tmp_path: Path) -> None:
    module, config = FeedForwardExpert(D), {"checkpoint_dir": str(tmp_path)}
    x, grad = tokens(ROWS, D), tokens(ROWS, D, seed=1)
    with (
        ExpertsServer({"e": copy.deepcopy(module).to(DEVICE)}, optimizer=adam, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", x)
        client.backward("e", grad, sequence=7)
    restarted, twin = copy.deepcopy(module).to(DEVICE), module.to(DEVICE)
    with (
        ExpertsServer({"e": restarted}, optimizer=adam, config=config) as server,
        WireClient(server.address) as client,
    ):
        assert [u.num_updates for u in client.step(sequence=8).updates] == [1]
    optimizer = adam(twin.parameters())
    twin(x.to(DEVICE)).backward(grad.to(DEVICE))
    optimizer.step()
    torch.testing.assert_close(restarted.state_dict(), twin.state_dict(), **ALIKE)


def test_weights_travel_to_the_device_and_back_and_stay_where_they_are(tmp_path: Path) -> None:
    module, other = (nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).to(DEVICE) for _ in range(2))
    file, at = tmp_path / "e.safetensors", next(module.parameters()).data_ptr()
    with ExpertsServer({"e": module}, optimizer=adam) as server, connect(server.address) as experts:
        fetched = experts.state_dict()
        assert {tensor.device.type for tensor in fetched.values()} == {"cpu"}
        expected = {f"e.{key}": value.cpu() for key, value in module.state_dict().items()}
        torch.testing.assert_close(fetched, expected, rtol=0, atol=0)
        experts.load_state_dict({f"e.{key}": value for key, value in other.state_dict().items()})
        exported = CliRunner().invoke(main, ["export", server.address, "e", str(file)])
        assert exported.exit_code == 0, exported.output
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)
    written = {key: value.to(DEVICE) for key, value in safetensors.torch.load_file(file).items()}
    torch.testing.assert_close(written, other.state_dict(), rtol=0, atol=0)
    assert next(module.parameters()).data_ptr() == at


# ---- memory


@needs_gpu
def test_an_expert_on_the_device_is_not_offloaded_and_says_so() -> None:
    with pytest.raises(ConfigError, match="expected an expert on the CPU"):
        ExpertsServer(
            {"e": nn.Linear(D, D).to(DEVICE)},
            config={
                "memory": {"offload": True, "recompute": True},
                "offload": {"max_resident_bytes": 1 << 20},
            },
        ).start()


def test_what_is_kept_on_the_device_for_backwards_that_never_come_is_given_back() -> None:
    # It has no products, which take memory for themselves.
    module = nn.Sequential(nn.LayerNorm(64), nn.GELU()).to(DEVICE)
    with ExpertsServer({"e": module}, optimizer=adam) as server, connect(server.address) as experts:
        assert server._server is not None
        kept = server._server.memory.kept
        steps(experts["e"], RemoteOptimizer(experts), make=randoms(torch.float32, 4, 64))
        before = torch.cuda.memory_allocated()
        y = experts["e"](torch.randn(16384, 64))
        assert len(kept) == 1
        assert torch.cuda.memory_allocated() > before + (6 << 20) or not HAS_GPU
        del y
        gc.collect()
        with torch.no_grad():
            experts["e"](torch.randn(4, 64))
        wait_until(lambda: len(kept) == 0, 20)
        wait_until(lambda: torch.cuda.memory_allocated() < before + (1 << 20), 20)


@needs_gpu
def test_training_takes_no_more_memory_of_the_device_with_each_step() -> None:
    module = nn.LayerNorm(256).to(DEVICE)
    with ExpertsServer({"e": module}, optimizer=adam) as server, connect(server.address) as experts:
        optimizer, used = RemoteOptimizer(experts), []
        for _ in range(2):
            steps(experts["e"], optimizer, seeds=range(6), make=randoms(torch.float32, 4096, 256))
            gc.collect()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert abs(used[1] - used[0]) < (5 << 20), "one answer has 4 MiB"


@pytest.mark.parametrize("memory", [{}, {"split_backward": True}], ids=str)
def test_answers_leave_their_turn_on_the_cpu(memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    take_result = PassStream.take_result

    def look(stream: PassStream, call: Call, result: Any) -> None:
        tensors = result.tensors if isinstance(result, Outputs) else result
        found.extend(tensor.device.type for tensor in tensors)
        take_result(stream, call, result)

    monkeypatch.setattr(PassStream, "take_result", look)
    module = FeedForwardExpert(D).to(DEVICE)
    with ExpertsServer({"e": module}, optimizer=adam, config={"memory": memory}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(2)]
        x = tokens(ROWS, D)
        for those in (clients[:1], clients):  # alone, and joined
            at_once(server, [partial(client.forward, "e", x) for client in those])
            at_once(server, [partial(client.backward, "e", x) for client in those])
        for client in clients:
            client.channel.close()
    assert found == ["cpu"] * 6
