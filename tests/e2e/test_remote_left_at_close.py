"""Forwards whose connection is closed stay on no server: it hears of them as that is done."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import CallCancelledError
from moe_autograd.remote import RemoteExpert, closing, connect
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import num_kept, wait_until
from tests.support.subprocesses import assert_prints

D = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"a": nn.Linear(D, D), "b": nn.Linear(D, D)}, optimizer=sgd) as server:
        yield server


@pytest.fixture(autouse=True)
def last_words_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they do."""
    monkeypatch.setattr(closing, "_LAST_WORD_S", 60.0)


@pytest.mark.parametrize("is_there", [True, False], ids=["graphs that are there", "graphs that have gone"])
def test_a_connection_that_is_closed_leaves_nothing_on_its_servers(
    server: ExpertsServer, is_there: bool
) -> None:
    """It would stay for minutes, though no backward could come."""
    graphs = []
    for _ in range(4):
        with connect(server.address) as experts:
            y = parallel_apply([experts["a"], experts["b"]], [(torch.ones(2, D),)] * 2)
            assert num_kept(server) >= 2
            if is_there:
                graphs.append(y)
            del y
    wait_until(lambda: num_kept(server) == 0)
    del graphs
    gc.collect()
    experts.close()  # once more, with what has gone since


@pytest.mark.parametrize("end", ["gone", "black hole"])
def test_a_connection_that_cannot_tell_its_server_so_is_closed_at_once_all_the_same(end: str) -> None:
    with ExpertsServer({"a": nn.Linear(D, D)}) as server, Proxy(server.address) as proxy:
        experts = connect(proxy.address)
        y = experts["a"](torch.ones(2, D, requires_grad=True))
        if end == "gone":
            proxy.is_gone = True
            proxy.cut()
        else:
            proxy.is_black_hole = True
        began_s = time.monotonic()
        experts.close()
        assert time.monotonic() - began_s < 30.0
        assert y.requires_grad
        if end == "black hole":
            assert num_kept(server) == 1
            proxy.is_black_hole = False
            wait_until(lambda: num_kept(server) == 0)


def test_what_a_call_beside_the_close_has_made_is_left_on_no_server(server: ExpertsServer) -> None:
    for _ in range(10):
        experts, has_called = connect(server.address), threading.Event()

        def call_on(expert: RemoteExpert = experts["a"], has_called: threading.Event = has_called) -> None:
            with contextlib.suppress(CallCancelledError):
                while True:
                    expert(torch.ones(2, D))
                    has_called.set()

        threads = [threading.Thread(target=call_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert has_called.wait(60)
        experts.close()
        for thread in threads:
            thread.join()
    wait_until(lambda: num_kept(server) == 0)


def test_a_connection_that_nobody_holds_any_more_leaves_nothing_on_its_servers(server: ExpertsServer) -> None:
    experts = connect(server.address)
    outputs = [experts[name](torch.ones(2, D)) for name in ("a", "b")]
    assert num_kept(server) == 2
    del outputs, experts
    gc.collect()
    wait_until(lambda: num_kept(server) == 0)


def test_a_process_that_ends_just_then_leaves_nothing_on_its_servers(server: ExpertsServer) -> None:
    """The thread that is to tell them comes to it when the process is about to end, and is slow."""
    for closes in ("experts.close()", "atexit.register(lambda: experts.close())"):
        program = f"""
            import atexit, threading, torch
            from moe_autograd.remote import closing, connect
            def end_slowly(*those, end=closing._end):
                closing._has_waited.wait(60)
                threading.Event().wait(0.3)
                end(*those)
            closing._LAST_WORD_S, closing._end = 60.0, end_slowly
            experts = connect("{server.address}")
            y = experts["a"](torch.ones(2, {D}))
            {closes}
            print("closed")
        """
        assert_prints(program, "closed")
        wait_until(lambda: num_kept(server) == 0)


def test_a_connection_that_is_closed_last_of_all_leaves_nothing_on_its_servers(server: ExpertsServer) -> None:
    program = f"""
        import atexit, torch
        atexit.register(lambda: experts.close())  # before ours, so it runs after them
        from moe_autograd.remote import closing, connect
        closing._LAST_WORD_S = 60.0
        experts = connect("{server.address}")
        y = experts["a"](torch.ones(2, {D}))
        print("to be closed")
    """
    assert_prints(program, "to be closed")
    wait_until(lambda: num_kept(server) == 0)
