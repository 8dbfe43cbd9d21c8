"""Recompute and offload inside the server: what is saved, and that nothing else changes."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import MemoryConfig, OffloadConfig, ServingConfig
from experts_server.hosting.calls import ForwardCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.offloading import OffloadMemory
from moe_autograd import parallel_apply
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.saving_memory import (
    ALL_FOUR,
    NUM_EXPERTS,
    D,
    Dropping,
    layer_of,
    make_adam,
    resident,
    serving,
    sgd,
    trained,
)
from tests.support.servers import START_S, WireClient, tokens


@pytest.mark.parametrize(
    ("memory", "store"),
    [
        (MemoryConfig(recompute=True), "none"),
        (MemoryConfig(split_backward=True), "none"),
        (MemoryConfig(recompute=True, split_backward=True), "none"),
        (MemoryConfig(recompute=True, offload=True), "ram"),
        (MemoryConfig(recompute=True, offload=True), "folder"),
        (ALL_FOUR, "ram"),
        (ALL_FOUR, "folder"),
        (ALL_FOUR.model_copy(update={"prefetch": False}), "folder"),
    ],
    ids=str,
)
def test_training_is_that_of_plain_local_experts(memory: MemoryConfig, store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = [FeedForwardExpert(D) for _ in range(NUM_EXPERTS)]
    hosted = {f"ffn.{i}": copy.deepcopy(expert) for i, expert in enumerate(experts)}
    local = layer_of(experts)
    expected = trained(local, [make_adam(local.parameters())])
    with (
        serving(hosted, memory, tmp_path if store == "folder" else "ram") as server,
        connect(server.address) as there,
    ):
        layer = layer_of(there)
        got = trained(layer, [make_adam(layer.parameters()), RemoteOptimizer(there)])
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one)


def test_dropout_and_buffers_are_those_of_a_server_that_saves_nothing() -> None:
    """Recomputed forwards draw the same numbers, also when the expert left memory in between."""

    def weights(memory: MemoryConfig) -> list[Tensor]:
        torch.manual_seed(0)
        hosted = {f"e.{i}": Dropping() for i in range(NUM_EXPERTS)}
        torch.manual_seed(5)
        with serving(hosted, memory) as server, connect(server.address) as there:
            layer = layer_of(there)
            return trained(layer, [make_adam(layer.parameters()), RemoteOptimizer(there)])

    for one, other in zip(weights(MemoryConfig()), weights(ALL_FOUR), strict=True):
        torch.testing.assert_close(other, one)


class MaskTwice(nn.Module):
    """Checkpoints its own inside, which meets that of another expert between two masks."""

    def __init__(self, meeting: threading.Barrier) -> None:
        super().__init__()
        self.weight, self.meeting = nn.Parameter(torch.ones(D)), meeting

    def inside(self, x: Tensor) -> Tensor:
        y = torch.dropout(x * self.weight, 0.5, True)
        self.meeting.wait(START_S)
        return torch.dropout(y * 1.0, 0.5, True)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "memory",
    [MemoryConfig(), MemoryConfig(recompute=True), MemoryConfig(split_backward=True), ALL_FOUR],
    ids=str,
)
def test_a_module_that_checkpoints_its_inside_draws_the_same_numbers_again_beside_others(
    memory: MemoryConfig,
) -> None:
    """With ones as inputs and weights the gradient of the input is the mask, which is the result."""
    meeting = threading.Barrier(2)
    hosted: dict[str, nn.Module] = {name: MaskTwice(meeting) for name in "ab"}
    config = ServingConfig(memory=memory, offload=OffloadConfig(max_resident_bytes=1 << 16))
    with ExpertsServer(hosted, optimizer=sgd, config=config) as server, connect(server.address) as there:
        xs = [torch.ones(20, D, requires_grad=True) for _ in range(2)]
        ys = parallel_apply([there["a"], there["b"]], [(x,) for x in xs])
        torch.stack(ys).sum().backward()
        RemoteOptimizer(there).step()
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x.grad, y)  # type: ignore[arg-type]
    assert not torch.equal(ys[0], ys[1])


class SquareInTraining(nn.Module):
    """Checkpoints an inside that saves a tensor more in training, and has another gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def inside(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y * y if self.training else y * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("evaluate", [False, True])
def test_what_a_module_computes_again_by_itself_is_in_the_mode_of_its_forward(
    evaluate: bool, split_backward: bool
) -> None:
    config = MemoryConfig(split_backward=split_backward)
    with serving({"e": SquareInTraining()}, config) as server, WireClient(server.address) as client:
        client.forward("e", torch.full((2, D), 3.0), evaluate=evaluate)
        client.forward("e", tokens(2, D), call_id=2, keep_graph=False, evaluate=not evaluate)
        answer = client.backward("e", torch.ones(2, D), evaluate=evaluate)
        assert (answer.code, answer.text) == ("OK", "")
        torch.testing.assert_close(answer.tensors[0], torch.full((2, D), 1.0 if evaluate else 6.0))


def test_an_offloaded_expert_tells_its_shapes_and_weights_while_it_is_absent() -> None:
    hosted: dict[str, nn.Module] = {f"e.{i}": FeedForwardExpert(D) for i in range(4)}
    plain = {name: copy.deepcopy(module.state_dict()) for name, module in hosted.items()}
    num_parameters = sum(p.numel() for p in hosted["e.0"].parameters())
    memory = MemoryConfig(recompute=True, offload=True)
    with serving(hosted, memory, optimizer=sgd) as server, WireClient(server.address) as client:
        assert all(p.isnan().all() for p in hosted["e.0"].parameters())  # the last two that came in are there
        assert [expert.num_parameters for expert in client.info().experts] == [num_parameters] * 4
        torch.testing.assert_close(client.get_state(), plain, rtol=0, atol=0)
        other = {"e.1": {key: value + 1 for key, value in plain["e.1"].items()}}
        assert not any(update.HasField("status") for update in client.set_state(other).updates)
        torch.testing.assert_close(client.get_state(), plain | other, rtol=0, atol=0)
        assert resident(server).peak_bytes <= resident(server).limit_bytes


def test_a_checkpoint_of_offloaded_experts_is_that_of_plain_ones(tmp_path: Path) -> None:
    """Saved in the middle of a step: gradients of answered backwards, optimizer state and weights are all there."""

    def start(memory: MemoryConfig, folder: Path) -> tuple[ExpertsServer, dict[str, nn.Module]]:
        torch.manual_seed(0)
        # more than there is room for, so what is restored has to outlive being put away
        hosted: dict[str, nn.Module] = {f"e.{i}": FeedForwardExpert(D) for i in range(8)}
        return serving(hosted, memory, checkpoint_dir=folder), hosted

    def give(client: WireClient) -> None:
        for i in range(8):
            client.forward(f"e.{i}", tokens(3, D))
            assert client.backward(f"e.{i}", tokens(3, D)).code == "OK"

    states = []
    for memory, name in ((MemoryConfig(), "plain"), (ALL_FOUR, "all four")):
        server, _ = start(memory, tmp_path / name)
        with server, WireClient(server.address) as client:
            give(client)
            client.step()
            client.zero_grad()
            give(client)
            client.save()
            sequence = client.sequence
        server, _ = start(memory, tmp_path / name)
        with server, WireClient(server.address) as client:
            client.sequence = sequence
            client.step()
            assert client.num_updates() == dict.fromkeys([f"e.{i}" for i in range(8)], 2)
            states.append(client.get_state())
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize("memory", [MemoryConfig(recompute=True), ALL_FOUR], ids=str)
def test_a_forward_that_returns_something_else_when_it_runs_again_is_told_with_both_sides(
    memory: MemoryConfig,
) -> None:
    class Fickle(nn.Linear):
        num_calls = 0

        def forward(self, x: Tensor) -> Any:
            self.num_calls += 1
            y = super().forward(x)
            return y if self.num_calls == 1 else (y, y[:, :2])

    config = ServingConfig(memory=memory, offload=OffloadConfig(max_resident_bytes=1 << 16))
    with (
        ExpertsServer({"e": Fickle(D, D)}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", tokens(3, D))
        answer = client.backward("e", tokens(3, D))
    assert answer.code == "EXPERT_FAILED"
    assert (
        "expected its module to return tensors of shapes [(3, 8)] again, got [(3, 8), (3, 2)]" in answer.text
    )


class Telling(nn.Module):
    """Returns a weight of its own, and a buffer, beside what it computes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D,), scale))
        self.register_buffer("count", torch.full((D,), scale))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x * self.weight, self.weight, self.count[1:]


@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_weight_that_an_offloaded_expert_returns_is_sent_though_another_takes_its_memory(
    keep_graph: bool,
) -> None:
    offload = OffloadMemory(3 * D * 4, "ram")  # the weights of one
    memory = SharedMemory(
        KeptForwards(1 << 20, 60), Budget(1 << 20, ""), Budget(1 << 20, ""), offload=offload
    )
    saving = MemoryConfig(recompute=True, offload=True)
    experts = [HostedExpert(f"e.{i}", Telling(float(i)), None, memory, saving=saving) for i in range(2)]
    answers = []
    for i, expert in enumerate(experts):
        call = ForwardCall(b"", lambda *_: None, i, (torch.ones(3, D),), keep_graph=keep_graph)
        with expert.in_memory(for_update=False):
            answers += expert.forward([call])
    for i, answer in enumerate(answers):
        assert [tensor.flatten()[0].item() for tensor in answer.tensors] == [i, i, i]
    offload.close()


@pytest.mark.parametrize(
    "update", [{"update": "on_backward"}, {"update": "on_samples", "samples_per_update": 3}], ids=str
)
def test_the_optimizers_state_of_experts_that_backwards_update_comes_and_goes(
    update: dict[str, Any], tmp_path: Path
) -> None:
    hosted: dict[str, nn.Module] = {f"e.{i}": FeedForwardExpert(D) for i in range(2)}
    local = copy.deepcopy(hosted)
    optimizers = {name: make_adam(module.parameters()) for name, module in local.items()}
    memory = MemoryConfig(recompute=True, offload=True)
    with (
        serving(hosted, memory, tmp_path, of_training=update) as server,
        WireClient(server.address) as client,
    ):
        for name in [*hosted] * 3:
            client.forward(name, tokens(3, D))
            (got,) = client.backward(name, tokens(3, D)).tensors
            leaf = tokens(3, D).requires_grad_()
            local[name](leaf).backward(tokens(3, D))
            optimizers[name].step(), optimizers[name].zero_grad()
            torch.testing.assert_close(got, leaf.grad)
        resident(server).flush()
        assert {"e.0.optimizer", "e.1.optimizer"} <= {
            one.name for one in (tmp_path / "resident-store").iterdir()
        }
        assert resident(server).peak_bytes <= resident(server).limit_bytes


def test_only_what_updates_reads_and_writes_the_optimizers_state(tmp_path: Path) -> None:
    hosted: dict[str, nn.Module] = {f"e.{i}": FeedForwardExpert(D) for i in range(2)}
    with (
        serving(hosted, MemoryConfig(recompute=True, offload=True), tmp_path) as server,
        WireClient(server.address) as client,
    ):

        def written_at() -> dict[str, int]:
            resident(server).flush()
            return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "resident-store").iterdir()}

        def give() -> None:
            for name in hosted:
                client.forward(name, tokens(3, D))
                assert client.backward(name, tokens(3, D)).code == "OK"

        give()
        client.step()
        after_step = written_at()
        assert {f"{name}.{part}" for name in hosted for part in ("weights", "optimizer")} <= after_step.keys()
        give()
        client.zero_grad()
        assert written_at() == after_step
        give()
        client.step()
        assert all(written_at()[name] > when for name, when in after_step.items())
