"""Recompute, split backward, offload and prefetch inside the server: what is saved, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer, executor
from experts_server.batching import ExpertQueue, QueueLimits
from experts_server.budget import Budget
from experts_server.calls import BackwardCall
from experts_server.config import MemoryConfig, OffloadConfig, ServingConfig
from experts_server.executor import WorkerPool
from experts_server.hosted import HostedExpert, SharedMemory
from experts_server.kept import KeptForwards
from experts_server.service import Service
from experts_server.settings import load_config
from experts_server.training import Training
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.offload.stores import RamStore
from moe_autograd.errors import ConfigError, GradientsLostError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.wire import experts_pb2 as pb
from tests.support.servers import START_S, WireClient, tokens, wait_until

D, NUM_EXPERTS = 8, 4
ALL_FOUR = MemoryConfig(recompute=True, split_backward=True, offload=True)


def make_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class Dropping(nn.Module):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Dropout(0.5), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)  # type: ignore[no-any-return]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def serving(
    modules: dict[str, nn.Module],
    memory: MemoryConfig,
    store: str | Path = "ram",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = make_adam,
    **more: Any,
) -> ExpertsServer:
    """Leave memory for one update: weights, gradients, and with Adam two moments and counts."""
    weights = [tensor.nbytes for tensor in next(iter(modules.values())).parameters()]
    limit = sum(4 * size + 64 for size in weights) if optimizer is make_adam else 2 * sum(weights)
    offload = OffloadConfig(max_resident_bytes=limit, store=store)
    config = ServingConfig(memory=memory, offload=offload, **more)
    return ExpertsServer(modules, optimizer=optimizer, config=config)


def trained(layer: MixtureOfExperts, optimizers: Sequence[Any], num_steps: int = 4) -> list[Tensor]:
    """Return losses, outputs' gradients and, at the end, all weights."""
    generator = torch.Generator().manual_seed(3)
    said: list[Tensor] = []
    for _ in range(num_steps):
        x = torch.randn(16, D, generator=generator).requires_grad_()
        loss = (layer(x) - x.detach().flip(-1)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert x.grad is not None
        said += [loss.detach(), x.grad]
    return [*said, *layer.state_dict().values()]


def layer_of(experts: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(TopKRouter(D, NUM_EXPERTS, top_k=2), experts)


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


def resident(server: ExpertsServer) -> Any:
    assert server._server is not None
    assert server._server.memory.offload is not None
    return server._server.memory.offload.residency


def test_a_checkpoint_of_offloaded_experts_is_that_of_plain_ones(tmp_path: Path) -> None:
    """Saved in the middle of a step: gradients of answered backwards, optimizer state and weights are all there."""

    def start(memory: MemoryConfig, folder: Path) -> tuple[ExpertsServer, dict[str, nn.Module]]:
        torch.manual_seed(0)
        hosted: dict[str, nn.Module] = {f"e.{i}": FeedForwardExpert(D) for i in range(2)}
        return serving(hosted, memory, checkpoint_dir=folder), hosted

    def give(client: WireClient) -> None:
        for i in range(2):
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
            assert client.num_updates() == {"e.0": 2, "e.1": 2}
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


def test_a_module_that_changes_its_input_is_refused_and_not_recomputed_from_it() -> None:
    hosted = {"e": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D))}
    with serving(hosted, MemoryConfig(recompute=True)) as server, WireClient(server.address) as client:
        answer = client.forward("e", tokens(3, D))
        assert answer.code == "EXPERT_FAILED"
        assert "change in place" in answer.text


# ---- split backward


class AtWeights(torch.autograd.Function):
    """The identity on a weight; its backward calls a function with the gradient and returns what that returns."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.function(grad), None


class Scale(nn.Module):
    """Multiplies by a weight; `function` sees the weight's gradient, in the second part of a backward."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * AtWeights.apply(self.weight, self.function)  # type: ignore[no-any-return, no-untyped-call]


class Split:
    """A server with one expert that splits its backwards, and a client."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.module = Scale(function)
        config = ServingConfig(memory=MemoryConfig(split_backward=True))
        self.server = ExpertsServer({"e": self.module}, optimizer=sgd, config=config)

    def __enter__(self) -> WireClient:
        self.server.start()
        self._client = WireClient(self.server.address)
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.channel.close()
        self.server.stop()


def give(client: WireClient, sequence: int | None = None) -> Any:
    client.forward("e", torch.ones(2, D))
    return client.backward("e", torch.ones(2, D), sequence=sequence)


def test_the_answer_leaves_before_the_weight_gradients_are_computed_and_a_step_waits_for_them() -> None:
    may_compute = threading.Event()

    def wait(grad: Tensor) -> Tensor:
        assert may_compute.wait(START_S)
        return grad

    with Split(wait) as client:
        answer = give(client)
        assert answer.code == "OK"
        torch.testing.assert_close(answer.tensors[0], torch.ones(2, D))
        assert not may_compute.is_set()
        threading.Timer(0.05, may_compute.set).start()
        client.step()
        assert client.num_updates() == {"e": 1}
        torch.testing.assert_close(client.get_state()["e"]["weight"], torch.full((D,), -1.0))


def test_all_experts_answer_before_the_weight_gradients_of_any_are_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker, and the backwards of three experts that came together."""
    monkeypatch.setattr(executor, "SHORT_S", START_S)  # one lane for all, which has one worker
    monkeypatch.setattr(executor, "STALL_S", START_S)  # and none of them is taken for a long one
    events: list[str] = []

    def note(name: str, grad: Tensor) -> Tensor:
        events.append(f"weights of {name}")
        return grad

    pool, queues = WorkerPool(), []
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, ""), Budget(1 << 20, ""))
    limits = QueueLimits(Budget(10, "calls"), Budget(1 << 20, "bytes"))
    for name in "abc":
        module = Scale(functools.partial(note, name))
        training = Training(sgd(module.parameters()), "on_step")
        expert = HostedExpert(name, module, training, memory, saving=MemoryConfig(split_backward=True))
        x, grad = torch.ones(2, D), torch.ones(2, D)
        answered = functools.partial(lambda name, call, result: events.append(f"answer of {name}"), name)
        call = BackwardCall(b"", answered, 1, 1, 0, (grad,), (True,), inputs=(x,))
        queues.append(ExpertQueue(expert, pool, limits))
        limits.take([call])
        assert queues[-1].add(call)
    pool.put(queues)
    wait_until(lambda: len(events) == 6)
    assert pool.close(START_S)
    order = [f"{what} of {name}" for what in ("answer", "weights") for name in "abc"]
    assert events == order


def test_a_repeated_backward_counts_once() -> None:
    with Split(lambda grad: grad) as client:
        answers = [give(client, sequence=4)] + [
            client.backward("e", torch.ones(2, D), sequence=4) for _ in range(3)
        ]
        assert [answer.code for answer in answers] == ["OK"] * 4
        client.step(sequence=5)
        torch.testing.assert_close(client.get_state()["e"]["weight"], torch.full((D,), -1.0))


@pytest.mark.parametrize("fault", ["raises", "is not finite"])
def test_gradients_that_are_refused_after_the_answer_are_told_at_the_step_and_change_nothing(
    fault: str,
) -> None:
    is_faulty = threading.Event()
    is_faulty.set()

    def go_wrong(grad: Tensor) -> Tensor:
        if not is_faulty.is_set():
            return grad
        if fault == "raises":
            raise LookupError("no such weight")
        return grad * torch.inf

    with Split(go_wrong) as client:
        assert give(client).code == "OK"
        for _ in range(2):  # until zero_grad
            (update,) = client.step().updates
            assert pb.Code.Name(update.status.code) == "GRADIENTS_LOST"
            assert (
                "no such weight" if fault == "raises" else "expected finite values"
            ) in update.status.message
        assert client.num_updates() == {"e": 0}
        torch.testing.assert_close(client.get_state()["e"]["weight"], torch.ones(D))
        is_faulty.clear()
        client.zero_grad()
        assert give(client).code == "OK"
        assert not client.step().updates[0].HasField("status")
        torch.testing.assert_close(client.get_state()["e"]["weight"], torch.full((D,), -1.0))


def test_the_remote_optimizer_raises_what_was_refused_after_the_answer() -> None:
    config = ServingConfig(memory=MemoryConfig(split_backward=True))
    hosted = {"e": Scale(lambda grad: grad * torch.nan)}
    with ExpertsServer(hosted, optimizer=sgd, config=config) as server, connect(server.address) as there:
        there["e"](torch.ones(2, D)).sum().backward()
        with pytest.raises(GradientsLostError, match="refused after the answer"):
            RemoteOptimizer(there).step()


# ---- hints


@pytest.fixture
def hinted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What servers are told to expect."""
    told: list[list[str]] = []
    own = Service._expect

    async def expect(self: Service, request: pb.ExpectRequest) -> pb.ExpectReply:
        told.append(list(request.experts))
        return await own(self, request)

    monkeypatch.setattr(Service, "_expect", expect)
    return told


class Waits(torch.autograd.Function):
    """The identity; its backward waits for a condition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, condition: Callable[[], bool]) -> Tensor:
        ctx.condition = condition
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.condition()
        return grad, None


def test_a_server_reads_what_the_layer_below_needs_while_the_layer_above_goes_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but a hint can bring `low` into memory before its backward."""
    read: dict[str, threading.Event] = {"e.low.weights": threading.Event()}
    own_read = RamStore.read

    def note_read(self: RamStore, name: str, flat: Tensor) -> None:
        own_read(self, name, flat)
        if name in read:
            read[name].set()

    monkeypatch.setattr(RamStore, "read", note_read)
    names = ("e.low", "e.high", "e.other.0", "e.other.1")
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in names}
    memory = MemoryConfig(recompute=True, offload=True)
    with serving(hosted, memory, optimizer=sgd) as server, connect(server.address) as there:
        h = there["e.low"](torch.randn(3, D))
        h = Waits.apply(h, lambda: read["e.low.weights"].wait(START_S))  # type: ignore[no-untyped-call]
        y = there["e.high"](h)
        with torch.no_grad():  # there is room for two
            for name in names[2:]:
                there[name](torch.randn(3, D))
        read["e.low.weights"].clear()
        y.sum().backward()
        RemoteOptimizer(there).step()
        assert (server.num_updates["e.low"], server.num_updates["e.high"]) == (1, 1)


def test_each_layer_is_announced_once_and_the_last_ones_chain_ends_with_its_backward(
    hinted: list[list[str]],
) -> None:
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a.0", "a.1", "b.0", "c.0")}
    with (
        serving(hosted, MemoryConfig(recompute=True, offload=True)) as server,
        connect(server.address) as there,
    ):
        for _ in range(2):
            h = torch.randn(3, D)
            h = sum(parallel_apply([there["a.0"], there["a.1"]], [(h,), (h,)]))
            there["c.0"](there["b.0"](h)).sum().backward()
        wait_until(lambda: len(hinted) == 4)  # nobody else waits for a hint
    assert sorted(hinted) == sorted([["b.0"], ["a.0", "a.1"]] * 2)


def test_nobody_is_told_of_experts_that_do_not_come_and_go(hinted: list[list[str]]) -> None:
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a", "b")}
    for memory in (MemoryConfig(), MemoryConfig(recompute=True, offload=True, prefetch=False)):
        with serving(hosted, memory) as server, connect(server.address) as there:
            there["b"](there["a"](torch.randn(3, D))).sum().backward()
    assert hinted == []


def test_a_hint_that_fails_harms_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    async def fail(self: Service, request: pb.ExpectRequest) -> pb.ExpectReply:
        failed.set()
        raise LookupError("hints are out of order")

    monkeypatch.setattr(Service, "_expect", fail)
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a", "b")}
    with (
        serving(hosted, MemoryConfig(recompute=True, offload=True)) as server,
        connect(server.address) as there,
    ):
        x = torch.randn(3, D, requires_grad=True)
        there["b"](there["a"](x)).sum().backward()
        assert failed.wait(START_S)
        assert x.grad is not None
        RemoteOptimizer(there).step()
        assert server.num_updates == {"a": 1, "b": 1}


def test_an_expert_that_is_not_hosted_cannot_be_expected() -> None:
    with serving({"e": FeedForwardExpert(D)}, MemoryConfig()) as server, WireClient(server.address) as client:
        with pytest.raises(grpc.RpcError, match="got 'x'"):
            client.expect("x")
        client.expect("e")


# ---- configuration


FFN: dict[str, Any] = {"class": "ffn", "args": {"d_model": D}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"memory": {"recompute": True, "offload": True}},
            "key 'experts.e.memory.offload': expected a table [offload] with max_resident_bytes",
        ),
        (
            {"memory": {"offload": True}, "offload": {"max_resident_bytes": 1000}},
            "key 'experts.e.memory.recompute': expected true with offload = true, got false",
        ),
        (
            {"memory": {"split_backward": True}, "update": "on_backward"},
            "key 'experts.e.memory.split_backward': expected false with update = 'on_backward', got true",
        ),
        ({"memory": {"recompute": "maybe"}}, "key 'memory.recompute': expected true or false"),
        ({"memory": {"recompte": True}}, "expected one of offload, prefetch, recompute, split_backward"),
        (
            {"offload": {"max_resident_bytes": 0}},
            "key 'offload.max_resident_bytes': expected greater than 0, got 0",
        ),
        ({"offload": {"store": "ram"}}, "key 'offload.max_resident_bytes': expected a value, got none"),
        ({"offload": {"max_resident_bytes": 5, "store": 3}}, "key 'offload.store"),
    ],
)
def test_a_mistake_in_the_configuration_names_key_value_and_what_is_allowed(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(flags={"experts": {"e": FFN}, **settings}, environment={})
    assert text in str(refused.value)


def test_an_expert_says_key_by_key_how_it_differs_from_the_others() -> None:
    config = load_config(
        flags={
            "memory": {"recompute": True, "offload": True},
            "offload": {"max_resident_bytes": 1 << 20},
            "experts": {"a": FFN, "b": {**FFN, "memory": {"offload": False, "split_backward": True}}},
        },
        environment={},
    )
    a, b = (config.memory_of(config.experts[name]) for name in "ab")
    assert (a.recompute, a.offload, a.split_backward) == (True, True, False)
    assert (b.recompute, b.offload, b.split_backward) == (True, False, True)


def test_an_embedded_server_refuses_the_same() -> None:
    config = ServingConfig(memory=MemoryConfig(split_backward=True))
    with pytest.raises(
        ConfigError, match=r"memory.split_backward: expected false with update = 'on_backward'"
    ):
        ExpertsServer({"e": nn.Linear(2, 2)}, optimizer=sgd, update="on_backward", config=config)


def test_an_expert_for_which_there_will_never_be_room_is_refused_at_the_start() -> None:
    memory, offload = MemoryConfig(recompute=True, offload=True), OffloadConfig(max_resident_bytes=100)
    with pytest.raises(ConfigError, match=r"expert 'e', key 'offload.max_resident_bytes': .* of at least"):
        ExpertsServer(
            {"e": nn.Linear(20, 20)}, optimizer=sgd, config=ServingConfig(memory=memory, offload=offload)
        ).start()
