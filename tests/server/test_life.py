"""Starting, ready, draining, stopped: what was accepted is finished, what was done is saved, nothing stays behind."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from experts_server.hosting.offloading import OffloadMemory
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.gated import Gated, Waiting
from tests.support.hosting import sgd
from tests.support.scarce import no_thread_to_give
from tests.support.servers import START_S, WireClient, tokens, wait_until
from tests.support.subprocesses import assert_prints

D = 8


def _without_return(parameters: Iterable[nn.Parameter]) -> None:
    torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("experts", "optimizer", "text"),
    [
        ([nn.Linear(D, D)], None, "expected modules by name, got list"),
        ({0: nn.Linear(D, D)}, None, "expected names that are texts, got 0"),
        ({"e": 3}, None, "expert 'e': expected an nn.Module, got int"),
        (
            {"e": nn.Linear(D, D)},
            "adam",
            "expected optimizer to make one from an expert's parameters, got str",
        ),
        (
            {"e": nn.Linear(D, D)},
            lambda _: 3,
            "expert 'e': expected optimizer to return a torch.optim.Optimizer, got int",
        ),
        (
            {"frozen": nn.Linear(D, D).requires_grad_(False), "e": nn.Linear(D, D)},
            _without_return,
            "expert 'e': expected optimizer to return a torch.optim.Optimizer, got NoneType",
        ),
        ({"e": nn.Linear}, None, "expert 'e': expected an nn.Module, got type.*of a class, pass an instance"),
    ],
)
def test_what_cannot_be_hosted_is_refused_before_it_starts(experts: Any, optimizer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"ExpertsServer.*{text}"):
        ExpertsServer(experts, optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.LBFGS, "got LBFGS, which wants a closure that computes the loss again"),
        (torch.optim.SparseAdam, "got SparseAdam, which wants sparse gradients"),
        (
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, differentiable=True),
            "got SGD, with 'differentiable', which is for steps that autograd goes through",
        ),
        (
            lambda parameters: torch.optim.Adam([{"params": list(parameters), "capturable": True}]),
            "got Adam, with 'capturable', which wants weights on a GPU",
        ),
    ],
)
def test_an_optimizer_whose_steps_would_all_fail_is_refused_before_it_starts(
    optimizer: Any, text: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"expert 'e': expected an optimizer that a server can step, {text}"
    ):
        ExpertsServer({"e": nn.Linear(D, D)}, optimizer=optimizer)


OTHER = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "weights",
    [lambda own: [*own, OTHER], lambda own: [own[0], OTHER, nn.Parameter(torch.ones(2))]],
    ids=["one more", "others for one"],
)
def test_an_optimizer_of_more_weights_than_the_modules_is_refused_before_it_starts(weights: Any) -> None:
    text = r"expert 'e': expected an optimizer of weights of this module, got one with . that are not .*s: .*\(3,\)"
    with pytest.raises(ConfigError, match=text):
        ExpertsServer(
            {"e": nn.Linear(D, D)}, optimizer=lambda own: torch.optim.SGD(weights(list(own)), lr=0.1)
        )


@pytest.mark.parametrize(
    "weights",
    [lambda own: own[:1], lambda own: [p.detach().double() for p in own], lambda own: [own[1], OTHER]],
    ids=["fewer", "copies of all", "one in place of another"],
)
def test_an_optimizer_may_have_fewer_weights_or_copies_of_them(weights: Any) -> None:
    """As one that steps copies of more bits has, and writes them to the module itself."""
    ExpertsServer({"e": nn.Linear(D, D)}, optimizer=lambda own: torch.optim.SGD(weights(list(own)), lr=0.1))


def test_a_hook_of_gathered_gradients_is_refused_before_the_start_and_before_an_update() -> None:
    """It would never run: clipping in it was left out."""
    module = nn.Linear(D, D)
    text = "expected weights without post-accumulate-grad hooks, got one on"
    with ExpertsServer({"e": module}, optimizer=sgd) as server, WireClient(server.address) as client:
        assert client.forward("e", tokens(2, D)).code == "OK"
        assert client.backward("e", tokens(2, D)).code == "OK"
        before = client.get_state()
        module.weight.register_post_accumulate_grad_hook(lambda weight: None)
        assert text in client.step().updates[0].status.message
        torch.testing.assert_close(client.get_state(), before, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=f"expert 'e': {text} 'weight'"):
        ExpertsServer({"e": module}, optimizer=sgd)
    for optimizer, is_frozen in ((None, False), (sgd, True)):
        module.weight.requires_grad_(not is_frozen)
        ExpertsServer({"e": module}, optimizer=optimizer)


@pytest.mark.parametrize("name", ["../e", "", "a/b", ".e", "e" * 129])
def test_an_expert_after_which_no_file_could_be_named_is_refused_before_it_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"server: expert name .*: expected letters, .* Rename it\."):
        ExpertsServer({"good": nn.Linear(D, D), name: nn.Linear(D, D)})


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_server_is_neither_copied_nor_pickled(take: Any) -> None:
    with ExpertsServer({"e": nn.Linear(D, D)}) as server:
        with pytest.raises(
            TypeError, match=r"<ExpertsServer ready 1 expert>: expected to stay in its process"
        ):
            take(server)
        with WireClient(server.address) as client:
            assert client.forward("e", tokens(3, D)).code == "OK"


def test_weights_that_two_experts_use_are_refused_if_one_of_them_trains_them() -> None:
    """Their calls run side by side: a step of one would change the weights under the other's forward."""
    shared = nn.Linear(D, D)
    experts = {"a": shared, "b": nn.Sequential(shared, nn.ReLU())}
    with (
        pytest.raises(
            ConfigError, match=r"expert 'b': expected weights that no other expert uses, got '0\.weight'"
        ),
        ExpertsServer(experts, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ):
        pass
    with ExpertsServer(experts) as server, WireClient(server.address) as client:
        assert len(client.info().experts) == 2


SHARED = [nn.Linear(D, D).requires_grad_(False), nn.BatchNorm1d(D, affine=False), nn.Dropout(0.5)]


@pytest.mark.parametrize("shared", SHARED, ids=str)
def test_modules_that_two_experts_use_are_refused_if_one_of_them_is_trained(shared: nn.Module) -> None:
    """Of a dropout, that of the one was off once the other had evaluated; statistics were added up side by side."""
    activation = nn.ReLU()
    experts = {name: nn.Sequential(shared, nn.Linear(D, D), activation) for name in "ab"}
    with (
        pytest.raises(
            ConfigError, match=r"'b': expected (weights|modules) that no other .*, got '0(\.weight)?', .* 'a'"
        ),
        ExpertsServer(experts, optimizer=sgd),
    ):
        pass
    with ExpertsServer(experts):
        pass
    experts["b"][0] = copy.deepcopy(shared)
    with ExpertsServer(experts, optimizer=sgd):
        pass


def test_a_server_is_started_once_at_a_time_and_may_be_started_again() -> None:
    server = ExpertsServer({"e": nn.Linear(D, D)})
    with pytest.raises(RuntimeError, match="expected a started server"):
        server.num_updates
    with server, pytest.raises(RuntimeError, match=f"expected one start, got a second at {server.address}"):
        server.start()
    with server, WireClient(server.address) as client:
        assert client.forward("e", tokens(3, D)).code == "OK"
    assert repr(server) == "<ExpertsServer stopped 1 expert>"


def test_stopping_finishes_what_is_in_flight_and_refuses_what_comes_after() -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}).start()
    with WireClient(server.address) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.state == "draining"
        gated.let_go()
        assert first.result().code == "OK"
        stopping.join(START_S)
        assert server.state == "stopped"
        with pytest.raises(grpc.RpcError) as refused:
            client.info()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_what_outlasts_the_drain_timeout_is_cut_off() -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}, config=ServingConfig(drain_timeout_s=0.05)).start()
    with WireClient(server.address) as client:
        call = client.forward_call("e", tokens(1, D))
        failed: list[grpc.StatusCode] = []

        def send() -> None:
            try:
                client.stream("Forward", [call])
            except grpc.RpcError as error:
                failed.append(error.code())

        sender = threading.Thread(target=send)
        sender.start()
        assert gated.started.acquire(timeout=START_S)
        server.stop()
        sender.join(START_S)
        gated.let_go()
    assert len(failed) == 1


def test_a_server_is_started_and_stopped_inside_a_running_event_loop_as_in_a_notebook() -> None:
    async def cell() -> str:
        with ExpertsServer({"e": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
            return client.forward("e", tokens(2, 8)).code

    assert asyncio.run(cell()) == "OK"


def test_a_server_that_is_refused_leaves_no_threads_and_no_lock(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    offload = {"max_resident_bytes": 1 << 20, "store": tmp_path}
    config = {"memory": {"recompute": True, "offload": True}, "offload": offload}
    refused = ExpertsServer({"e": nn.LazyLinear(D)}, config=config)
    with pytest.raises(
        ConfigError, match=r"^expert 'e': expected weights with values, got 'weight' without a shape"
    ):
        refused.start()  # what it raised stays, as it does in a notebook
    wait_until(lambda: not has_threads_since(before))
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=config):
        pass


def test_a_servers_offload_folder_is_free_again_where_no_thread_was_to_be_had(tmp_path: Path) -> None:
    """The traceback kept it locked."""
    with no_thread_to_give(), pytest.raises(RuntimeError, match="can't start new thread") as kept:
        OffloadMemory(1000, tmp_path)
    OffloadMemory(1000, tmp_path).close()
    assert kept.tb is not None


def together(do: Callable[[], object], num_threads: int = 4) -> list[object]:
    """Do it in several threads at once; return what came of each, or what it raised."""
    ready = threading.Barrier(num_threads)

    def one(_: int) -> object:
        ready.wait(START_S)
        try:
            return do()
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(one, range(num_threads)))


def test_of_threads_that_start_a_server_one_does_and_all_may_stop_it() -> None:
    """Others left a server behind that nobody could stop, or raised what was no concern of theirs."""
    before = set(threading.enumerate())
    for _ in range(3):
        server = ExpertsServer({"e": nn.Linear(4, 4)})
        came = together(server.start)
        assert came.count(server) == 1
        assert ["expected one start, got a second" in str(other) for other in came].count(True) == 3
        assert together(server.stop) == [None] * 4
        assert server.state == "stopped"
        wait_until(lambda: not has_threads_since(before))


ON_THE_LOOPS_THREAD = """
import gc
from torch import nn
from experts_server import ExpertsServer
from tests.support.servers import WireClient, tokens, wait_until

class Holder:
    def __init__(self):
        self.server, self.itself = ExpertsServer({"e": nn.Linear(8, 8)}).start(), self

    def __del__(self):
        self.server.stop()

def start():
    try:
        ExpertsServer({"e": nn.Linear(8, 8)}).start()
    except RuntimeError as error:
        print(str(error).partition(", got ")[2], flush=True)

gc.disable()
other = ExpertsServer({"e": nn.Linear(8, 8)}).start()
server = Holder().server
for do in (start, gc.collect):
    other._loop_thread._loop.call_soon_threadsafe(do)
wait_until(lambda: server._loop_thread is None)
with WireClient(other.address) as client:
    print(server.state, client.forward("e", tokens(1, 8)).code)
other.stop()
left = Holder()  # until the interpreter takes itself apart, which has no thread for the loop any more
"""


def test_on_the_loops_own_thread_a_start_is_refused_and_a_finalizer_may_stop_a_server() -> None:
    """It waited for itself, and no server of the process answered any more."""
    assert_prints(ON_THE_LOOPS_THREAD, "that loop's own. Start it from another one. stopped OK", limit_s=60)


def has_threads_since(before: set[threading.Thread]) -> bool:
    names = [thread.name for thread in set(threading.enumerate()) - before]
    return any(name.startswith(("expert-", "experts-")) for name in names)


def test_threads_and_ports_of_a_stopped_server_are_free_again() -> None:
    before = set(threading.enumerate())  # other tests make servers that they never start
    for _ in range(2):
        with ExpertsServer({"e": FeedForwardExpert(D)}) as server, WireClient(server.address) as client:
            client.forward("e", tokens(1, D))
            address = server.address
        wait_until(lambda: not has_threads_since(before))  # one was told to end, and may be about to
        with ExpertsServer({"e": FeedForwardExpert(D)}, listen=address):
            pass
