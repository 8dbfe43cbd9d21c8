"""Ctrl-C while a server of a with statement starts, drains or stops: it ends at once, and can be started again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.queues import executor
from experts_server.serving import embedded, loop_thread
from experts_server.serving import server as serving
from experts_server.serving.loop_thread import LoopThread
from experts_server.serving.server import ExpertServer
from tests.support.gated import Gated, Waiting
from tests.support.interrupting import interrupted_everywhere
from tests.support.servers import START_S, WireClient, threads_of_servers, tokens, wait_until

D = 8
LOGGER = "experts_server.serving.server"


def cut_off(client: WireClient) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        client.forward("e", tokens(1, D))
    return error.value.code()


def test_ctrl_c_while_a_server_drains_ends_it_at_once_and_its_folder_is_free_again(tmp_path: Path) -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}, config={"checkpoint_dir": tmp_path, "drain_timeout_s": 10 * START_S})
    with server, WireClient(server.address) as client:
        call = Waiting(lambda: cut_off(client))
        assert gated.started.acquire(timeout=START_S)

        def interrupt() -> None:
            wait_until(lambda: server.state == "draining")
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            server.stop()
        interrupting.join(START_S)
        assert server.state == "stopped"
        assert call.result() == grpc.StatusCode.UNAVAILABLE
        gated.let_go()
        with server:
            assert server.state == "ready"


def test_ctrl_c_while_a_stop_waits_for_an_expert_that_hangs_ends_it() -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}, config={"drain_timeout_s": 0.05})
    with server, WireClient(server.address) as client:
        call = Waiting(lambda: cut_off(client))
        assert gated.started.acquire(timeout=START_S)
        assert server._server is not None
        close = server._server.pool.close

        def interrupted(timeout_s: float) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return close(timeout_s)

        with patch.object(server._server.pool, "close", interrupted), pytest.raises(KeyboardInterrupt):
            server.stop()
        assert server.state == "stopped"
        gated.let_go()
        assert call.result() == grpc.StatusCode.UNAVAILABLE


class InterruptingTheStart(nn.Linear):
    has_interrupted = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not self.has_interrupted:
            self.has_interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().state_dict(*args, **kwargs)


def test_ctrl_c_while_a_server_starts_leaves_its_folder_free(tmp_path: Path) -> None:
    server = ExpertsServer({"e": InterruptingTheStart(D, D)}, config={"checkpoint_dir": tmp_path})
    with pytest.raises(KeyboardInterrupt):
        server.start()
    with server:
        assert server.state == "ready"


def test_ctrl_c_when_a_server_has_just_started_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("ready"):  # the last that it does
            os.kill(os.getpid(), signal.SIGINT)
        return True

    server = ExpertsServer({"e": nn.Linear(D, D)}, config={"checkpoint_dir": tmp_path})
    caplog.set_level(logging.INFO, LOGGER)
    with patch.object(logging.getLogger(LOGGER), "filters", [interrupt]), pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.state == "stopped"
    with server:
        assert server.state == "ready"


class SlowToSave(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.is_slow = False
        self.started, self.may_go = threading.Event(), threading.Event()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_slow:
            self.started.set()
            assert self.may_go.wait(START_S)
        return super().state_dict(*args, **kwargs)


def test_ctrl_c_in_the_last_save_gives_it_up_without_an_error_that_nobody_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowToSave()
    server = ExpertsServer({"e": slow}, config={"checkpoint_dir": tmp_path}).start()
    slow.is_slow = True

    def interrupt() -> None:
        assert slow.started.wait(START_S)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    interrupting.join(START_S)
    slow.may_go.set()
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_start_that_is_cancelled_while_grpc_starts_leaves_the_folder_free(
    ticks: int, tmp_path: Path
) -> None:
    """Cancelled in its start, a server of grpc cannot be stopped: that failed, and nothing was closed."""
    made = ExpertsServer({"e": nn.Linear(D, D)}, config={"checkpoint_dir": tmp_path})

    async def cancel() -> None:
        server = ExpertServer(made._experts, made._config)
        start = asyncio.ensure_future(server.start())
        while server._grpc is None:
            await asyncio.sleep(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError):
            await start
        assert server.state == "starting"

    team_size = torch.get_num_threads()
    asyncio.run(cancel())
    assert torch.get_num_threads() == team_size, "a server that never served leaves its thread as it was"
    with made:
        assert made.state == "ready"


@pytest.fixture
def of_others() -> set[threading.Thread]:
    """Those that were there before."""
    return threads_of_servers()


def assert_nothing_is_left(of_others: set[threading.Thread], point: str) -> None:
    wait_until(lambda: threads_of_servers() <= of_others, patience_s=30.0)
    assert LoopThread._current is None, point


WITHIN = {"": ([embedded, loop_thread, serving, executor], 1), "threading": ([threading], 7)}


@pytest.mark.parametrize("within", WITHIN)
def test_ctrl_c_anywhere_in_a_start_leaves_no_thread_and_the_next_one_serves(
    within: str, of_others: set[threading.Thread]
) -> None:
    """That of a lock of Python's, too, as it waits for the loop: which would wait for that lock, for ever."""
    server, num_points = ExpertsServer({"e": nn.Linear(D, D)}), 0
    modules, every = WITHIN[within]
    for point in interrupted_everywhere(server.start, within=modules, every=every):
        num_points += 1
        assert_nothing_is_left(of_others, point)
    assert num_points > 10
    assert server.state == "ready"
    server.stop()


def test_what_ctrl_c_anywhere_in_a_stop_has_not_stopped_can_be_stopped_again(
    of_others: set[threading.Thread],
) -> None:
    server, num_points = ExpertsServer({"e": nn.Linear(D, D)}).start(), 0
    for point in interrupted_everywhere(server.stop, within=[embedded, loop_thread]):
        num_points += 1
        server.stop()
        assert server.state == "stopped", point
        assert_nothing_is_left(of_others, point)
        server.start()
    assert num_points > 5


class Heard(nn.Linear):
    """Ctrl-C comes as a server asks it for something."""

    def __init__(self, asked_for: str) -> None:
        super().__init__(D, D)
        self.asked_for = asked_for
        self.goes_on = False

    def hear(self, asked_for: str) -> None:
        if asked_for == self.asked_for:
            signal.raise_signal(signal.SIGINT)
            self.goes_on = True

    def modules(self) -> Iterator[nn.Module]:
        self.hear("modules")
        return super().modules()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.hear("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.hear("state_dict")
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("asked_for", ["modules", "named_parameters", "state_dict"])
def test_ctrl_c_is_heard_at_once_while_a_server_looks_at_its_experts(
    asked_for: str, of_others: set[threading.Thread]
) -> None:
    expert = Heard("")
    server = ExpertsServer({"e": expert})
    expert.asked_for = asked_for
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not expert.goes_on
    assert_nothing_is_left(of_others, "as it looks")
