"""An exception that nobody holds any more goes at once, with what it was raised over: no garbage collector is needed.

Its traceback holds the frames that it came through, and those the user's tensors. A frame that holds the exception in
turn would keep all of it: a state that was refused, or the inputs of a call, for as long as nothing collects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.errors import MoeAutogradError
from moe_autograd.remote import RemoteExperts, connect, in_thread
from moe_autograd.remote.delivery import Delivery
from tests.support.held import Held
from tests.support.hosting import sgd

D = 8


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a bug on the server")


class BrokenHere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bug here")


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    held = Held("forward", D)
    hosted = {"a": nn.Linear(D, D), "b": nn.Linear(D, D), "broken": Broken(), "held": held}
    with ExpertsServer(hosted, optimizer=sgd) as server:
        yield server
        held.may_go.set()


@pytest.fixture(scope="module")
def experts(server: ExpertsServer) -> Iterator[RemoteExperts]:
    with connect(server.address) as experts:
        yield experts


def x(width: int = D) -> torch.Tensor:
    return torch.ones(3, width, requires_grad=True)


def backward(y: torch.Tensor) -> None:
    y.backward(torch.full_like(y, torch.nan))


def layer(*experts: nn.Module, **options: Any) -> torch.Tensor:
    return MixtureOfExperts(TopKRouter(D, len(experts), top_k=2), experts, **options)(x())


def no_such_state(experts: RemoteExperts) -> dict[str, torch.Tensor]:
    return {key: value.double() for key, value in experts.state_dict().items()}


def late(experts: RemoteExperts) -> None:
    with connect(experts.connection.addresses, timeout_s=0.2) as own:
        own["held"](x())


def cancelled(experts: RemoteExperts) -> None:
    async def cancel() -> None:
        with contextlib.suppress(TimeoutError):  # which asyncio itself would keep
            async with asyncio.timeout(0.05):
                await in_thread(experts["held"], x())

    asyncio.run(cancel())


def closed(experts: RemoteExperts) -> None:
    with connect(experts.connection.addresses) as own:
        y = own["a"](x())
    y.sum().backward()


FAILS: dict[str, Callable[[RemoteExperts], object]] = {
    "a module that raises": lambda e: e["broken"](x()),
    "the last of a map": lambda e: parallel_apply([e["a"], e["broken"]], [(x(),)] * 2),
    "a layer": lambda e: layer(e["a"], e["broken"]),
    "a layer without enough": lambda e: layer(e["broken"], e["broken"], on_failure="drop"),
    "a layer and a bug here": lambda e: layer(e["a"], BrokenHere(), on_failure="drop"),
    "a layer that is refused": lambda e: backward(layer(e["a"], e["b"], on_failure="drop")),
    "an input that is refused": lambda e: e["a"](x(D + 1)),
    "a gradient that is refused": lambda e: backward(e["a"](x())),
    "a state that is refused": lambda e: e.load_state_dict(no_such_state(e)),
    "no answer in time": late,
    "a task that is cancelled": cancelled,
    "a connection that is closed": closed,
    "nobody there": lambda e: connect("127.0.0.1:1"),
    "nobody at two addresses": lambda e: connect(["127.0.0.1:1", "127.0.0.1:2"]),
    "no such name": lambda e: connect("no-such-name.invalid:1", timeout_s=5.0),
}


def left_by(fail: Callable[[RemoteExperts], object], experts: RemoteExperts) -> list[str]:
    """Return the kinds of tensors and exceptions that only the garbage collector would free."""
    gc.collect()
    with contextlib.suppress(MoeAutogradError, ValueError):
        fail(experts)
    torch.ones((), requires_grad=True).backward()  # until then the engine keeps the nodes of one that failed
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        # Those of a server, which are in this process too, are not counted.
        kinds = grpc.RpcError | torch.Tensor | Delivery
        return [type(thing).__name__ for thing in gc.garbage if isinstance(thing, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("name", FAILS)
def test_what_was_raised_goes_with_whoever_held_it(experts: RemoteExperts, name: str) -> None:
    left_by(FAILS[name], experts)  # the first time may import something
    assert left_by(FAILS[name], experts) == []


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("hedge", [False, True])
def test_a_connection_goes_with_whoever_held_it(
    server: ExpertsServer, experts: RemoteExperts, hedge: bool
) -> None:
    def call(_: RemoteExperts) -> None:
        with connect(server.address, hedge=hedge) as own:
            own["a"](x()).sum().backward()

    left_by(call, experts)
    assert left_by(call, experts) == []
