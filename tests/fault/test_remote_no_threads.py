"""A client whose system has no thread or no file descriptor to give: it goes on with those it has, or says so;
nothing hangs afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import RemoteError, ServerUnavailableError
from moe_autograd.remote import HedgePolicy, RemoteExperts, RemoteOptimizer, RetryPolicy, connect, in_thread
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.fanout import Fanout
from tests.support.hosting import LR, sgd
from tests.support.scarce import few_threads_to_give, no_descriptor_to_give, no_thread_to_give
from tests.support.servers import START_S

ONCE = RetryPolicy(max_retries=0)


@pytest.fixture
def modules() -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4, bias=False) for name in ("a", "b", "c")}


@pytest.fixture
def addresses(modules: dict[str, nn.Module]) -> Iterator[list[str]]:
    servers = [ExpertsServer({name: module}, optimizer=sgd).start() for name, module in modules.items()]
    yield [server.address for server in servers]
    for server in servers:
        server.stop()


def train(experts: RemoteExperts) -> None:
    optimizer = RemoteOptimizer(experts)
    optimizer.zero_grad()
    sum(parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * len(experts))).sum().backward()
    optimizer.step()


def test_servers_are_served_one_after_the_other(modules: dict[str, nn.Module], addresses: list[str]) -> None:
    before = [module.weight.detach().clone() for module in modules.values()]
    with no_thread_to_give(), connect(addresses, timeout_s=START_S) as experts:
        for _ in range(2):
            train(experts)
        assert [hosted.num_updates for hosted in experts.info().values()] == [2, 2, 2]
    for module, weight in zip(modules.values(), before, strict=True):
        torch.testing.assert_close(module.weight.detach(), weight - 2 * LR)


def test_what_may_be_asked_twice_is_asked_once() -> None:
    module = nn.Linear(4, 4)
    with ExpertsServer({"a": module}) as one, ExpertsServer({"a": module}) as other:
        addresses, hedge = [one.address, other.address], HedgePolicy(first_after_s=1e-6)
        with connect(addresses, timeout_s=START_S, hedge=hedge) as experts:
            x = torch.ones(1, 4)
            with no_thread_to_give():
                for _ in range(3):
                    torch.testing.assert_close(experts["a"](x), module(x))
            torch.testing.assert_close(experts["a"](x), module(x))


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize("what", ["a large tensor", "weights"])
def test_what_grpc_needs_threads_for_is_refused_and_works_again_later(
    addresses: list[str], what: str, num_left: int
) -> None:
    with connect(addresses[0], timeout_s=START_S, retry=ONCE) as experts:
        state = experts.state_dict()

        def send() -> None:
            if what == "weights":
                experts.load_state_dict(state)
            else:
                experts["a"](torch.ones(1 << 20, 4))

        message = r"server at .*: expected a thread to send from, got .* Nothing was sent\. Raise the limit of threads"
        scarce = few_threads_to_give(num_left) if num_left else no_thread_to_give()
        with scarce, pytest.raises(RemoteError, match=message):
            send()
        send()


def test_what_there_is_no_descriptor_for_says_what_to_raise_and_works_later(addresses: list[str]) -> None:
    message = r"expected a connection, got '[\w: ]*Too many open files'\. Raise the limit of open files"
    with connect(addresses[0], timeout_s=START_S):  # imports what connecting needs
        pass
    with no_descriptor_to_give(), pytest.raises(ServerUnavailableError, match=message):
        connect(addresses[0], timeout_s=START_S)
    with connect(addresses[0], timeout_s=START_S) as experts:
        assert experts["a"](torch.ones(1, 4)).shape == (1, 4)


def test_a_name_that_is_asked_for_stands_for_what_it_did(addresses: list[str]) -> None:
    name = addresses[0].replace("127.0.0.1", "localhost")
    with connect(name, timeout_s=START_S) as experts, no_thread_to_give():
        assert list(experts.info()) == ["a"]


def test_what_asyncio_has_no_thread_for_raises_and_is_not_called_later() -> None:
    called: list[str] = []

    async def run() -> None:
        with no_thread_to_give(), pytest.raises(RuntimeError, match="thread"):
            await in_thread(called.append, "in vain")
        await in_thread(called.append, "later")

    asyncio.run(run())
    assert called == ["later"]


def test_what_no_thread_was_there_for_is_done_once_and_never_later() -> None:
    fanout, done = Fanout(3), []

    def do(address: str, work: int) -> int:
        done.append(address)
        return 2 * work

    with no_thread_to_give():
        assert fanout.at_each({"a": 1, "b": 2, "c": 3}, do, Cancellation()) == {"a": 2, "b": 4, "c": 6}
    assert done == ["a", "b", "c"]
    assert fanout.at_each({"d": 4, "e": 5}, do, Cancellation()) == {"d": 8, "e": 10}
    fanout.close()
    assert sorted(done) == ["a", "b", "c", "d", "e"]
