"""Weights of several experts whose client goes before all are set: half of them is what nobody has asked for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
from torch import Tensor, nn

import experts_server.serving.loads as loads_module
from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from experts_server.serving.loads import Loads
from tests.support.gated import D, Gated, Waiting, wait_until_queued
from tests.support.servers import START_S, WireClient, tokens, wait_until, wait_until_inside

States = dict[str, dict[str, Tensor]]


class Odd(nn.Linear):
    """When it is given weights, waits as long as `may_go` is not set, and may raise."""

    def __init__(self, *, raises: bool = False) -> None:
        super().__init__(D, D)
        self.raises = raises
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.may_go.wait(START_S)
        if self.raises:
            raise ArithmeticError
        return super().load_state_dict(*args, **options)


def moved(states: States) -> States:
    """Return other weights."""
    return {name: {key: tensor + 1 for key, tensor in state.items()} for name, state in states.items()}


def _until_cut_off(call: Callable[[], object]) -> Callable[[], None]:
    def make() -> None:
        with contextlib.suppress(grpc.RpcError):
            call()

    return make


def test_weights_of_which_some_are_set_are_all_set_though_their_client_goes() -> None:
    busy, idle = Gated(), nn.Linear(D, D)
    with (
        ExpertsServer({"busy": busy, "idle": idle}) as server,
        WireClient(server.address) as client,
        WireClient(server.address, client_id=b"other") as other,
    ):
        states = moved(client.get_state("busy", "idle"))
        blocking = Waiting(lambda: other.forward("busy", tokens(1, D)))
        assert busy.started.acquire(timeout=START_S)

        setting = Waiting(_until_cut_off(lambda: client.set_state(states)))
        wait_until(lambda: bool((idle.bias == states["idle"]["bias"]).all()))
        client.channel.close()
        assert setting.result() is None
        wait_until_inside(server, 1)
        busy.let_go()
        assert blocking.result().code == "OK"
        now = other.get_state("busy", "idle")
    for name, state in states.items():
        torch.testing.assert_close(now[name], state, rtol=0, atol=0)


@contextlib.contextmanager
def left_alone(server: ExpertsServer, blocking: Gated) -> Iterator[States]:
    """Within it, a load of all experts is without its client, and `blocking` computes; at its end it has computed."""
    with WireClient(server.address) as client, WireClient(server.address, client_id=b"other") as other:
        states = moved(client.get_state())
        call = Waiting(lambda: other.forward("blocking", tokens(1, D)))
        assert blocking.started.acquire(timeout=START_S)
        setting = Waiting(_until_cut_off(lambda: client.set_state(states)))
        idle = server._experts["idle"].module
        wait_until(lambda: torch.equal(idle.state_dict()["bias"], states["idle"]["bias"]))
        client.channel.close()
        setting.result()
        wait_until_inside(server, 1)
        yield states
        blocking.let_go()
        assert call.result().code == "OK"


def are_set(server: ExpertsServer, states: States) -> dict[str, bool]:
    with WireClient(server.address) as client:
        now = client.get_state()
    return {
        name: all(torch.equal(now[name][key], state[key]) for key in state) for name, state in states.items()
    }


def is_through(server: ExpertsServer) -> bool:
    assert server._server is not None
    service = server._server.service
    return (repr(service.loads), service.weights_under_way.in_use) == ("<Loads, 0 without a client>", 0)


def test_a_load_that_takes_long_is_waited_for_though_its_client_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was yet to be set after 10 s was left out of it, in the next checkpoint, too, and nothing told of it."""
    monkeypatch.setattr(loads_module, "HANGING_S", 0.01)
    looks, look = list[bool](), Loads._waits_for_hanging_ones

    def note(*args: Any) -> bool:
        looks.append(look(*args))
        return looks[-1]

    monkeypatch.setattr(Loads, "_waits_for_hanging_ones", note)
    blocking, slow = Gated(), Odd()
    experts = {"blocking": blocking, "idle": nn.Linear(D, D), "slow": slow}
    with ExpertsServer(experts, config={"checkpoint_dir": tmp_path}) as server:
        slow.begun.clear()
        slow.may_go.clear()
        with left_alone(server, blocking) as states:
            assert slow.begun.wait(START_S)
            wait_until(lambda: len(looks) > 10)
            assert not is_through(server)
        slow.may_go.set()
        wait_until(lambda: is_through(server))
        assert are_set(server, states) == {"blocking": True, "idle": True, "slow": True}
    assert "ERROR" not in caplog.text


def test_what_hangs_in_another_call_is_left_out_of_a_load_whose_client_has_gone_and_the_log_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loads_module, "HANGING_S", 0.1)
    blocking, odd = Gated(), Odd(raises=True)
    with ExpertsServer({"blocking": blocking, "idle": nn.Linear(D, D), "odd": odd}) as server:
        with left_alone(server, blocking) as states:
            wait_until(lambda: is_through(server))
        assert are_set(server, states) == {"blocking": False, "idle": True, "odd": False}
    assert (
        "weights of 3 experts, whose client has gone: expected all to be set, got 'blocking', 'odd' left out"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("for_s", "are_hanging"), [((None, 61.0), False), ((61.0, 59.0), False), ((61.0, 61.0), True)]
)
def test_an_expert_hangs_that_computes_for_a_minute(
    for_s: Sequence[float | None], *, are_hanging: bool
) -> None:
    now = time.monotonic()
    queues = {str(s): SimpleNamespace(computing_since=None if s is None else now - s) for s in for_s}
    loads = Loads(cast(Any, queues))
    assert loads._waits_for_hanging_ones(dict.fromkeys(queues, "waits")) is are_hanging


def test_what_refuses_a_load_whose_client_has_gone_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    blocking, odd = Gated(), Odd(raises=True)
    with ExpertsServer({"blocking": blocking, "idle": nn.Linear(D, D), "odd": odd}) as server:
        with left_alone(server, blocking) as states:
            assert not is_through(server)
        wait_until(lambda: is_through(server))
        assert are_set(server, states) == {"blocking": True, "idle": True, "odd": False}
    assert "expected all to be set, got 'odd' left out" in caplog.text


def test_a_server_that_stops_gives_up_weights_that_an_expert_that_hangs_has_yet_to_take() -> None:
    """Else asyncio would say that a task was destroyed."""
    hanging = Gated()
    with (
        ExpertsServer({"e": hanging}, config=ServingConfig(drain_timeout_s=0.01)) as server,
        WireClient(server.address) as client,
        WireClient(server.address, client_id=b"other") as other,
    ):
        state = moved(client.get_state())
        cut_off = [Waiting(_until_cut_off(lambda: other.forward("e", tokens(1, D))))]
        assert hanging.started.acquire(timeout=START_S)
        cut_off.append(Waiting(_until_cut_off(lambda: client.set_state(state))))
        wait_until_queued(server, 1)
        assert server._loop_thread is not None
        loop = server._loop_thread._loop
        server.stop()
        assert [calling.result() for calling in cut_off] == [None, None]
    hanging.let_go()
    assert not asyncio.all_tasks(loop)
