"""What is called while, or after, its connection is closed ends at once, with an error of ours."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import CallCancelledError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect, ends
from moe_autograd.remote.asking import ask, upload
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.forking import GATE
from moe_autograd.remote.operations import Operation
from moe_autograd.wire import experts_pb2 as pb
from tests.support.hosting import sgd
from tests.support.servers import wait_until
from tests.support.subprocesses import assert_prints

ENDLESS = RetryPolicy(patience_s=1e6)  # a call that waits for a closed connection would not return
PASSAGE = GATE.passage(may_interrupt=False)


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with (
        ExpertsServer({"ffn.0": nn.Linear(4, 4)}, optimizer=sgd) as first,
        ExpertsServer({"ffn.1": nn.Linear(4, 4)}, optimizer=sgd) as second,
    ):
        yield [first.address, second.address]


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return sum("moe_autograd" in thread.name for thread in threading.enumerate())


def call_all(experts: RemoteExperts) -> None:
    outputs = parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * 2)
    sum(y.sum() for y in outputs).backward()


@pytest.mark.parametrize("address_count", [1, 2])
def test_ctrl_c_while_it_closes_leaves_nothing_open(addresses, address_count, monkeypatch):
    """It would come as the end of a stream is awaited, which nobody else would do then."""

    def num_after_another() -> int:
        experts = connect(addresses[:address_count])
        with torch.no_grad():  # else servers are to be told of it, on another thread
            for expert in experts.values():
                expert(torch.ones(1, 4))
        with pytest.raises(KeyboardInterrupt):
            experts.close()
        assert not experts._connection._closing.alive
        del experts
        return num_open()

    end = ends.end

    def end_interrupted(stream) -> None:
        signal.raise_signal(signal.SIGINT)
        end(stream)

    monkeypatch.setattr(ends, "end", end_interrupted)
    first = num_after_another()
    wait_until(lambda: num_after_another() <= first)
    few = num_open()
    for _ in range(5):
        num_after_another()
    wait_until(lambda: num_open() <= few)


def test_nothing_stays_open_behind_close(addresses):
    """The first connections start what grpc keeps for all of them; files that others close meanwhile do not count."""

    def num_after_another() -> int:
        with connect(addresses) as experts:
            call_all(experts)
        return num_open()

    first = num_after_another()
    rest = [num_after_another() for _ in range(20)]
    assert min(rest[-5:]) <= first + 5, rest


@pytest.mark.parametrize("hedge", [False, True])
@pytest.mark.parametrize("kept", ["nothing", "an expert", "a graph"])
def test_a_connection_that_nobody_holds_any_more_is_closed(addresses, no_gc, kept, hedge):
    with connect(addresses) as experts:
        call_all(experts)
    threads, files = num_threads(), num_open()
    for _ in range(5):
        experts = connect(addresses, hedge=hedge)
        call_all(experts)
        connection = weakref.ref(experts.connection)
        last = {
            "nothing": None,
            "an expert": experts["ffn.0"],
            "a graph": experts["ffn.0"](torch.ones(1, 4)),
        }[kept]
        del experts
        if kept == "an expert":
            assert last(torch.ones(1, 4)).shape == (1, 4)
        if kept == "a graph":
            last.sum().backward()
        del last
        assert connection() is None
    wait_until(lambda: num_threads() <= threads)
    wait_until(lambda: num_open() <= files + 2)  # what others open meanwhile


COLLECTED_AT_A_BAD_MOMENT = """
import gc, socket, threading
from torch import nn
from experts_server import ExpertsServer
from moe_autograd.remote import connect
from moe_autograd.wire import experts_pb2 as pb

gc.disable()
with ExpertsServer({{"ffn.0": nn.Linear(4, 4)}}) as server:
    experts = connect(server.address)
channel = experts.connection._delivery._channel(server.address)
experts.itself = experts
del experts
host, port = server.address.split(":")
with socket.create_server((host, int(port))):  # which says nothing: calls are under way until they are cancelled
    channel._link._reconnect(3_000)
    for _ in range(2):
        channel.tell("Expect", pb.ExpectRequest(experts=["ffn.0"]))
    told = tuple(channel._told)
    {collect}
    print(*(call.code().name for call in told))
"""
ON_GRPCS_THREAD = """
    call, is_collected = channel._link.stubs().unary["Expect"].future(b""), threading.Event()
    call.add_done_callback(lambda _: (gc.collect(), is_collected.set()))
    call.cancel()
    is_collected.wait()
"""
UNDER_A_LOCK = """
    with channel._link._lock:
        gc.collect()
"""


@pytest.mark.parametrize("collect", [ON_GRPCS_THREAD, UNDER_A_LOCK], ids=["grpc's", "lock"])
def test_a_connection_is_closed_wherever_the_garbage_collector_comes_upon_it(collect):
    """It waited for the thread that it was on, or for one that waited for a lock of it, and nothing was collected."""
    program = COLLECTED_AT_A_BAD_MOMENT.format(collect=collect.strip())
    assert_prints(program, "CANCELLED CANCELLED", limit_s=30)


@pytest.fixture
def closed_in_between(addresses, monkeypatch) -> Iterator[Channel]:
    """One that another thread closes after a call has looked whether it is open, and before it begins."""
    with connect(addresses[0]) as experts:
        channel = experts.connection._delivery._channel(addresses[0])
        stubs_now = channel._stubs_now

        def close_in_between() -> object:
            stubs = stubs_now()
            channel.close()
            return stubs

        monkeypatch.setattr(channel, "_stubs_now", close_in_between)
        yield channel


@pytest.mark.parametrize(
    "call",
    [
        lambda channel, op: ask(channel, "Info", pb.InfoRequest(), pb.InfoReply, op),
        lambda channel, op: upload(channel, "SetState", iter([b""]), pb.UpdateReply, op),
        lambda channel, op: channel.stream("GetState", b"", None, op.deadline, PASSAGE),
        lambda channel, op: channel.stream("Forward", b"", iter([b""]), op.deadline, PASSAGE),
    ],
    ids=["one message", "upload", "stream", "stream both ways"],
)
def test_a_channel_that_is_closed_in_between_says_so(closed_in_between, call):
    with pytest.raises(ServerUnavailableError, match="expected an open connection, got a closed one"):
        call(closed_in_between, Operation(Deadline(60.0), Cancellation()))


def test_what_nothing_depends_on_is_not_told_to_a_channel_that_is_closed_in_between(closed_in_between):
    is_lost = threading.Event()
    closed_in_between.tell("Expect", pb.ExpectRequest(experts=["ffn.0"]), is_lost.set)
    assert is_lost.is_set()


def forward(experts: RemoteExperts) -> list[torch.Tensor]:
    return parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * len(experts))


def train(experts: RemoteExperts) -> None:
    optimizer = RemoteOptimizer(experts)
    sum(forward(experts)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CALLS: dict[str, Callable[[RemoteExperts], object]] = {
    "forward": forward,
    "training": train,
    "info": lambda experts: experts.info(),
    "state_dict": lambda experts: experts.state_dict(),
    "load_state_dict": lambda experts: experts.load_state_dict(
        {"ffn.0.weight": torch.eye(4), "ffn.0.bias": torch.zeros(4)}
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("hedge", [False, True])
def test_after_close_a_call_ends_at_once(addresses, name, hedge):
    experts = connect(addresses, timeout_s=1e6, retry=ENDLESS, hedge=hedge)
    experts.close()
    with pytest.raises(ServerUnavailableError, match="expected an open connection, got a closed one"):
        CALLS[name](experts)


def test_an_update_after_close_ends_at_once(addresses):
    experts = connect(addresses, timeout_s=1e6, retry=ENDLESS)
    optimizer = RemoteOptimizer(experts)
    sum(forward(experts)).sum().backward()
    experts.close()
    for update in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ServerUnavailableError, match="expected an open connection, got a closed one"):
            update()


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_an_update_after_close_says_so_where_there_is_nothing_to_send(addresses, on_failure):
    experts = connect(addresses)
    optimizer = RemoteOptimizer(experts, on_failure=on_failure)
    experts.close()
    closed = re.escape(f"connection to {', '.join(addresses)}: expected an open connection, got a closed")
    for update in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ServerUnavailableError, match=closed):
            update()
        assert not optimizer.failures


class Caller(threading.Thread):
    """Calls over and over until it gets an error."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.has_called = threading.Event()
        self.became: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                self.call()
                self.has_called.set()
        except BaseException as error:
            self.became = error


@pytest.mark.parametrize("name", CALLS)
def test_calls_beside_close_end_with_our_error(addresses, name):
    num_threads = 1 if name == "training" else 4  # an optimizer is for one thread at a time
    for _ in range(5):
        experts = connect(addresses, timeout_s=1e6, retry=ENDLESS)
        callers = [Caller(functools.partial(CALLS[name], experts)) for _ in range(num_threads)]
        for caller in callers:
            caller.start()
        assert callers[0].has_called.wait(120)
        experts.close()
        for caller in callers:
            caller.join(120)
        assert [type(caller.became) for caller in callers] == [CallCancelledError] * num_threads


def test_what_was_told_on_a_connection_that_was_replaced_ends_with_it():
    """The server says nothing: without `close` it would be told for 5 s, by a thread of grpc."""
    with ExpertsServer({"ffn.0": nn.Linear(4, 4)}) as server:
        experts = connect(server.address)
    channel = experts.connection._delivery._channel(server.address)
    host, port = server.address.split(":")
    with socket.create_server((host, int(port))):
        channel._link._reconnect(3_000)
        before = set(threading.enumerate())
        channel.tell("Expect", pb.ExpectRequest(experts=["ffn.0"]))
        channel._link._reconnect(20_000)
        assert set(threading.enumerate()) - before
        experts.close()
        wait_until(lambda: not set(threading.enumerate()) - before, patience_s=3.0)
