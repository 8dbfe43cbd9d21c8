"""What a server keeps and queues stays within its limits: calls, kept forwards, gathered gradients, clients, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import LimitsConfig, ServingConfig
from experts_server.hosting import gathered as gathered_module
from experts_server.hosting.gathered import Gathered, GatheredGradients
from experts_server.hosting.kept import RECORD_BYTES, SAVED_BYTES
from experts_server.serving import service as service_module
from experts_server.serving import streams as streams_module
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal
from moe_autograd.wire.options import MAX_MESSAGE_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.status import RETRY_AFTER_KEY
from tests.support.gated import D, Gated, Waiting, serving
from tests.support.hosting import sgd
from tests.support.parcels import messages_of, packet
from tests.support.servers import (
    START_S,
    WireClient,
    tokens,
    wait_until,
)


def test_kept_forwards_stay_within_their_budget_and_the_oldest_go_first() -> None:
    one_call = 2 * 100 * D * 4 + RECORD_BYTES + 2 * SAVED_BYTES  # its input and its output
    limits = LimitsConfig(kept_forward_bytes=3 * one_call + 2000)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        for call_id in range(6):
            client.forward("e", tokens(100, D), call_id=call_id)
        codes = [client.backward("e", tokens(100, D), call_id=n).code for n in range(6)]
    assert codes == ["INPUTS_NEEDED"] * 3 + ["OK"] * 3


def test_a_small_kept_forward_holds_nothing_of_a_large_one_that_came_with_it() -> None:
    """Nor of a run of small ones; each is counted by itself."""
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        sizes = (1, 2, 1000)
        calls = [
            client.forward_call("e", tokens(rows, D), call_id=rows, keep_graph=rows < 1000) for rows in sizes
        ]
        client.stream("Forward", calls)
        held = [own.inputs[0].untyped_storage().nbytes() for own in kept._kept.values()]
        assert sorted(held) == [1 * D * 4, 2 * D * 4]
        assert kept.num_bytes < 16_000
        for rows in sizes[:2]:
            client.backward("e", tokens(rows, D), call_id=rows)
        assert kept.num_bytes == 0


def test_what_small_kept_forwards_weigh_in_memory_is_counted() -> None:
    num_calls = 20_000
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        process = psutil.Process()

        def forwards(first: int, num: int) -> None:
            for start in range(first, first + num, 100):
                client.stream(
                    "Forward",
                    [client.forward_call("e", tokens(1, D), call_id=n) for n in range(start, start + 100)],
                )

        forwards(0, 1000)
        held, counted = process.memory_info().rss, kept.num_bytes
        forwards(1000, num_calls)
        held, counted = process.memory_info().rss - held, kept.num_bytes - counted
    assert held < 2 * counted, f"{held} bytes held, {counted} counted"


class SelfAttention(nn.Module):
    """Between rows: its graph grows with the square of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.softmax(y @ y.T, -1) @ y


class Masked(nn.Module):
    """Its graph is mostly a product of weights, there for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4000, 4000))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sigmoid()[:D]


@pytest.mark.parametrize(
    ("make", "rows_before", "num_rows"),
    [
        (lambda: nn.Linear(D, 40_000, bias=False), [2], 400),
        (SelfAttention, [2, 8], 4000),
        (SelfAttention, [2, 4600], 4000),
        (Masked, [2000], 1),
        (lambda: nn.Sequential(nn.Linear(D, 4000), nn.GELU(), nn.Linear(4000, D)), [0], 2000),
    ],
    ids=[
        "an output alone",
        "attention",
        "attention between",
        "for any number of rows",
        "after an empty call",
    ],
)
def test_what_a_large_kept_forward_weighs_in_memory_is_counted(
    make: Callable[[], nn.Module], rows_before: list[int], num_rows: int
) -> None:
    with serving({"e": make()}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept, process = server._server.memory.kept, psutil.Process()

        def resident_bytes() -> int:
            give_back_freed_memory()
            return int(process.memory_info().rss)

        for call_id, rows in enumerate(rows_before):
            client.forward("e", tokens(rows, D), call_id=call_id)
        held, counted = resident_bytes(), kept.num_bytes
        client.forward("e", tokens(num_rows, D), call_id=100)
        counted = kept.num_bytes - counted
        assert counted > 50e6
        wait_until(lambda: resident_bytes() - held < 1.2 * counted + 16e6)  # messages may be on their way out
    assert counted < 2 * held + 16e6, "nor is it counted many times over"


def test_gathered_gradients_stay_within_their_budget() -> None:
    num_bytes = sum(p.nbytes for p in FeedForwardExpert(D).parameters())
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_bytes=num_bytes))

    with ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server:
        answers = []
        for number in range(2):
            with WireClient(server.address, client_id=bytes([number])) as client:
                client.forward("e", tokens(3, D))
                answers.append(client.backward("e", tokens(3, D)))
        assert [a.code for a in answers] == ["OK", "BUSY"]
        assert "bytes of gathered gradients" in answers[1].text


def test_gradients_of_a_client_that_went_away_are_let_go_and_one_that_comes_back_is_told() -> None:
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_s=0.01))

    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", tokens(3, D))
        client.backward("e", tokens(3, D))
        assert server._server is not None
        gathered = server._server.memory.gathered
        wait_until(lambda: not gathered.in_use)
        assert client.zero_grad("e").updates[0].status.message == "", "to forget them is no mistake"
        client.forward("e", tokens(3, D))
        client.backward("e", tokens(3, D))
        wait_until(lambda: not gathered.in_use)
        late = client.step("e").updates[0]
        assert "its gradients had been let go" in late.status.message
        assert "Call zero_grad and repeat forward and backward." in late.status.message
        assert client.step("e").updates[0].num_updates == 0


def test_a_server_that_starts_with_less_room_lets_go_of_gradients_that_do_not_fit_and_says_so(
    tmp_path: Path,
) -> None:
    """It would not start, with "Try again later" for a reason."""
    num_bytes = sum(p.nbytes for p in nn.Linear(D, D).parameters())

    def serving_with(room: int) -> ExpertsServer:
        limits = LimitsConfig(gathered_gradient_bytes=room)
        experts = {name: nn.Linear(D, D) for name in "ab"}
        config = ServingConfig(checkpoint_dir=tmp_path, limits=limits)
        return ExpertsServer(experts, optimizer=sgd, config=config)

    with serving_with(2 * num_bytes) as server, WireClient(server.address) as client:
        for name in "ab":
            client.forward(name, tokens(3, D))
            assert client.backward(name, tokens(3, D)).code == "OK"
    with serving_with(num_bytes) as server, WireClient(server.address) as client:
        client.sequence = 10
        codes = [pb.Code.Name(update.status.code) for update in client.step("a", "b").updates]
        assert codes == ["OK", "GRADIENTS_LOST"]
        client.zero_grad("a", "b")
        client.forward("b", tokens(3, D))
        assert client.backward("b", tokens(3, D)).code == "OK"
        assert client.step("b").updates[0].num_updates == 1


def test_gradients_that_trainings_leave_behind_give_room_to_the_next() -> None:
    """Each ends after its step, as most do, and the server has room for one."""
    num_bytes = sum(p.nbytes for p in FeedForwardExpert(D).parameters())
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_bytes=num_bytes))

    with ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server:
        for _ in range(3):
            with connect(server.address) as experts:
                experts["e"](tokens(3, D)).sum().backward()
                RemoteOptimizer(experts).step()
        with WireClient(server.address) as client:
            assert client.num_updates() == {"e": 3}


def test_gradients_that_no_step_has_applied_stay_a_minute_where_others_have_no_room() -> None:
    def num_left(age_s: float) -> int:
        at = [0.0]
        gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: at[0])
        gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
        at[0] = age_s
        gathered.put(b"two", Gathered((torch.ones(1),), 1, 1))
        gathered.forget_stale(is_crowded=True)
        return len(gathered)

    assert (num_left(59.0), num_left(61.0)) == (2, 1)


def test_gradients_that_a_step_has_applied_go_at_once_where_others_have_no_room_and_only_there() -> None:
    def left(*, is_crowded: bool) -> set[bytes]:
        gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: 0.0)
        for name in (b"applied", b"waits"):
            gathered.put(name, Gathered((torch.ones(1),), 1, 1))
        gathered.note_applied(b"applied")
        gathered.forget_stale(is_crowded=is_crowded)
        return {*gathered.by_client()}

    assert left(is_crowded=True) == {b"waits"}
    assert left(is_crowded=False) == {b"applied", b"waits"}, "a second step applies them again, as in torch"


def test_a_client_that_gives_more_after_its_gradients_were_let_go_is_told_at_its_step() -> None:
    at = [0.0]
    gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: at[0])
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    at[0] = 61.0
    gathered.forget_stale(is_crowded=True)
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    assert gathered.has_lost(b"one")
    assert not gathered.has_lost(b"one"), "it is told once"


def test_a_client_that_begins_anew_after_its_gradients_were_let_go_has_all_that_it_gives_then() -> None:
    at = [0.0]
    gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: at[0])
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    at[0] = 3601.0
    gathered.forget_stale(is_crowded=False)
    gathered.forget(b"one")  # its `zero_grad`
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    assert not gathered.has_lost(b"one")


def test_only_so_many_copies_of_weights_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads slowly holds one."""
    monkeypatch.setattr(service_module, "MAX_WEIGHTS_UNDER_WAY", 2)
    with serving({"large": nn.Linear(1, 12_000_000)}) as server, WireClient(server.address) as client:
        get_state = client.channel.unary_stream(methods.path("GetState"))

        def begin() -> Any:
            call = get_state(seal(pb.GetStateRequest()), timeout=START_S)
            next(call)
            return call

        slow = [begin(), begin()]
        with pytest.raises(grpc.RpcError) as refused:
            begin()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "RPCs that fetch or set weights: expected at most 2" in refused.value.details()
        assert RETRY_AFTER_KEY in dict(refused.value.trailing_metadata())
        for call in slow:
            call.cancel()
        assert server._server is not None
        under_way = server._server.service.weights_under_way
        wait_until(lambda: not under_way.in_use)
        begin().cancel()


def test_only_so_many_clients_that_went_away_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_module, "MAX_LOST", 3)
    now = 0.0
    waiting = GatheredGradients(Budget(1 << 20, "gathered"), max_age_s=1.0, clock=lambda: now)
    for number in range(5):
        waiting.put(bytes([number]), Gathered([torch.ones(1)], 1, 1))
        now += 2.0
        waiting.forget_stale(is_crowded=False)
    assert len(waiting) == 0
    assert [waiting.has_lost(bytes([number])) for number in range(5)] == [False, False, True, True, True]


def test_unfinished_calls_of_all_streams_stay_within_one_budget() -> None:
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        writer.add(*client.forward_call("e", torch.zeros(2 << 20 >> 2).reshape(-1, D)))
        first, *rest = messages_of(writer)
        assert server._server is not None
        received, goes_on = server._server.service.received, Event()

        def slowly() -> Iterator[bytes]:
            yield first
            goes_on.wait(START_S)
            yield from rest

        begin = client.channel.stream_stream(methods.path("Forward"))
        slow = begin(slowly(), timeout=START_S)
        wait_until(lambda: received.in_use >= 2 << 20)
        with pytest.raises(grpc.RpcError) as busy:
            list(client.stream_messages("Forward", [first, *rest]))
        goes_on.set()
        assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes of unfinished calls: expected at most 3145728" in busy.value.details()
        assert len(list(slow)) > 1
        assert client.forward("e", tokens(3, D)).code == "OK"
        assert received.in_use == 0


def test_what_is_announced_counts_as_if_it_had_come() -> None:
    """One byte of each of many tensors has memory taken for all of them."""
    header = pb.TensorHeader(dtype=pb.FLOAT32, shape=[1 << 18, 1], num_bytes=1 << 20).SerializeToString()
    numbers = range(4)
    heads = [pb.ForwardCall(client_id=b"x", call_id=number, expert="e") for number in numbers]
    message = packet(
        *[pb.Announcement(parcel=n, tensors=[header], forward_call=heads[n]) for n in numbers],
        parts=tuple(pb.Part(parcel=number, num_bytes=1) for number in numbers),
        payload=bytes(64),
    )
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Identity()}, limits=limits) as server, WireClient(server.address) as client:
        answers = client.stream_messages("Forward", [message])
        refused = dict(next(answers) for _ in range(2))
        assert [(number, answer.code) for number, answer in refused.items()] == [(2, "BUSY"), (3, "BUSY")]
        assert (
            "expected at most 3145728 unfinished bytes in a stream, got 1048576 more than" in refused[2].text
        )
        with pytest.raises(grpc.RpcError, match="expected the rest of 2 parcels"):
            next(answers)
        assert client.forward("e", tokens(3, D)).code == "OK"
        assert server._server is not None
        assert server._server.service.received.in_use == 0


def test_no_more_calls_are_taken_of_a_client_that_leaves_the_answers_until_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 4 << 20
    monkeypatch.setattr(streams_module, "UNTAKEN_BYTES", most)
    receive = streams_module.PassStream._receive_one

    async def noting(stream: streams_module.PassStream) -> None:
        untaken_before.append(stream._num_untaken_bytes())
        streams.append(stream)
        await receive(stream)

    untaken_before: list[int] = []
    streams: list[streams_module.PassStream] = []
    monkeypatch.setattr(streams_module.PassStream, "_receive_one", noting)
    with serving({"e": nn.Identity()}) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        for call_id in range(32):
            writer.add(*client.forward_call("e", torch.zeros(1 << 18), call_id=call_id))
        begin = client.channel.stream_stream(methods.path("Forward"))
        answers = begin(messages_of(writer), timeout=START_S)
        wait_until(lambda: bool(streams) and streams[0]._num_untaken_bytes() > most)
        reader = ParcelReader()
        assert len([parcel for message in answers for parcel in reader.feed(message)]) == 32
    assert max(untaken_before) <= most


def test_calls_of_many_clients_that_leave_their_answers_are_not_all_taken_while_none_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue is emptied as it is computed: each client could fill it anew, and leave all of the answers."""
    most_of_one, most_of_all, num_clients, num_calls = 2 << 20, 8 << 20, 4, 16
    monkeypatch.setattr(streams_module, "UNTAKEN_BYTES", most_of_one)
    monkeypatch.setattr(streams_module, "UNANSWERED_BYTES", most_of_all)
    leaves_too_much = streams_module.PassStream._leaves_too_much

    def noting(stream: streams_module.PassStream) -> bool:
        is_waiting = leaves_too_much(stream)
        (waiting.add if is_waiting else waiting.discard)(stream)
        return is_waiting

    waiting: set[streams_module.PassStream] = set()
    monkeypatch.setattr(streams_module.PassStream, "_leaves_too_much", noting)
    expert = Gated()
    with serving({"e": expert}) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        for call_id in range(num_calls):
            writer.add(*client.forward_call("e", torch.zeros(1 << 15, D), call_id=call_id, keep_graph=False))
        messages = list(messages_of(writer))
        begin = client.channel.stream_stream(methods.path("Forward"))
        streams = [begin(iter(messages), timeout=START_S) for _ in range(num_clients)]
        wait_until(lambda: len(waiting) == num_clients)
        assert server._server is not None
        kept = sum(server._server.service.unanswered.values())
        assert kept <= most_of_all + num_clients * (most_of_one + MAX_MESSAGE_BYTES)
        assert kept < num_clients * num_calls << 20
        expert.let_go()
        for answers in streams:
            reader = ParcelReader()
            assert len([parcel for message in answers for parcel in reader.feed(message)]) == num_calls
        wait_until(lambda: not server._server.service.unanswered)


def test_more_calls_than_a_pass_may_have_are_refused_and_the_others_served() -> None:
    config = {"limits": LimitsConfig(max_calls_per_pass=3)}
    with serving({"e": nn.Linear(D, D)}, **config) as server, WireClient(server.address) as client:
        answers = client.stream(
            "Forward", [client.forward_call("e", tokens(1, D), call_id=n) for n in range(5)]
        )
    assert [a.code for a in answers] == ["OK"] * 3 + ["INVALID_CALL"] * 2


def test_more_passes_than_allowed_are_turned_away() -> None:
    gated = Gated()
    config = {"limits": LimitsConfig(max_concurrent_passes=1)}
    with serving({"e": gated}, **config) as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        with pytest.raises(grpc.RpcError) as busy:
            client.forward("e", tokens(1, D))
        assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(busy.value.trailing_metadata())[RETRY_AFTER_KEY]
        gated.let_go()
        assert first.result().code == "OK"
