"""The server's split backward: the answer first, the weights' gradients after it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import MemoryConfig, ServingConfig
from experts_server.hosting.calls import BackwardCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.training import Training
from experts_server.queues import executor
from experts_server.queues.batching import ExpertQueue, QueueLimits
from experts_server.queues.executor import WorkerPool
from moe_autograd.errors import GradientsLostError
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.wire import experts_pb2 as pb
from tests.support.saving_memory import D, Scale, sgd
from tests.support.servers import START_S, WireClient, wait_until


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
        queues.append(ExpertQueue(expert, pool, limits, call_later=cast(Any, None)))
        limits.take([call])
        assert queues[-1].add(call)
    pool.put(queues)
    wait_until(lambda: len(events) == 6)
    assert pool.close(START_S)
    order = [f"{what} of {name}" for what in ("answer", "weights") for name in "abc"]
    assert events == order


def test_a_forward_stays_as_long_as_more_backwards_may_come_and_no_longer() -> None:
    split = Split(lambda grad: grad)
    with split as client:
        assert split.server._server is not None
        kept = split.server._server.memory.kept
        client.forward("e", torch.ones(2, D))
        for keep_graph in (True, True, False):
            answer = client.backward("e", torch.ones(2, D), keep_graph=keep_graph)
            assert answer.code == "OK"
            torch.testing.assert_close(answer.tensors[0], torch.ones(2, D))
            assert len(kept) == keep_graph


def test_a_repeated_backward_counts_once() -> None:
    with Split(lambda grad: grad) as client:
        answers = [give(client, sequence=4)] + [
            client.backward("e", torch.ones(2, D), sequence=4) for _ in range(3)
        ]
        assert [answer.code for answer in answers] == ["OK"] * 4
        client.step(sequence=5)
        torch.testing.assert_close(client.get_state()["e"]["weight"], torch.full((D,), -1.0))


def test_what_experts_refuse_alike_shows_once_in_the_log_where_it_came_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def go_wrong(grad: Tensor) -> Tensor:
        raise LookupError("no such weight")

    config = {"memory": {"split_backward": True}}
    experts = {f"e.{index}": Scale(go_wrong) for index in range(3)}
    with (
        ExpertsServer(experts, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        for name in experts:
            x = torch.ones(2, D)
            client.backward(name, x, inputs=(x,))
            client.step(name)
    refused = [record for record in caplog.records if "were refused" in record.getMessage()]
    assert [record.getMessage()[:11] for record in refused] == [f"expert 'e.{index}" for index in range(3)]
    assert [bool(record.exc_info) for record in refused] == [True, False, False]


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


REASONS = {
    "raises": "LookupError: no such weight",
    "raises without a text": "WithoutText, whose text cannot be had",
    "exits": "SystemExit: no such weight",
    "is not finite": "expected finite values",
}


@pytest.mark.parametrize("fault", REASONS)
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
        if fault == "raises without a text":
            raise WithoutText
        if fault == "exits":
            raise SystemExit("no such weight")
        return grad * torch.inf

    with Split(go_wrong) as client:
        assert give(client).code == "OK"
        for _ in range(2):  # until zero_grad
            (update,) = client.step().updates
            assert pb.Code.Name(update.status.code) == "GRADIENTS_LOST"
            assert REASONS[fault] in update.status.message
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


class Sparse(nn.Module):
    """Adds a row that each token names; the gradient of these rows is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(3, D, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.rows(torch.tensor([2, 0])) * x
        return added


def test_sparse_gradients_that_come_after_the_answer_train_as_in_torch() -> None:
    local, hosted = Sparse(), Sparse()
    config = ServingConfig(memory=MemoryConfig(split_backward=True))
    with (
        ExpertsServer({"e": hosted}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        for _ in range(2):
            assert give(client).code == "OK"
            local(torch.ones(2, D)).backward(torch.ones(2, D))
        assert not client.step().updates[0].HasField("status")
    sgd(local.parameters()).step()
    torch.testing.assert_close(hosted.rows.weight, local.rows.weight)
