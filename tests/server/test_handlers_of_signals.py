"""A handler of a signal uses servers, connections and maps, wherever its thread was then."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.serving import embedded
from experts_server.serving.loop_thread import LoopThread
from moe_autograd.errors import CheckpointError
from moe_autograd.remote import HedgePolicy, connect
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.compression import Compression, Encodings
from moe_autograd.remote.expecting import Expectations
from moe_autograd.remote.hedging import Latencies
from moe_autograd.remote.placement import Placement
from moe_autograd.remote.retry import RetryBudget, RetryPolicy
from tests.support.functions_waiting import PATIENCE_S
from tests.support.servers import threads_of_servers, wait_until
from tests.support.subprocesses import assert_prints


@contextlib.contextmanager
def leaving_no_thread() -> Iterator[None]:
    """Wait until threads of servers have ended that were not there before."""
    before = threads_of_servers()
    yield
    wait_until(lambda: threads_of_servers() <= before)


@contextlib.contextmanager
def handling(handler: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Drains(nn.Linear):
    """Its forward, under way while its server drains, sends a signal; it ends once that has been heard."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.server: ExpertsServer | None = None
        self.has_begun, self.is_heard = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.server is not None
        self.has_begun.set()
        server = self.server
        wait_until(lambda: server.state != "ready")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self.is_heard.wait(PATIENCE_S)
        return super().forward(x)


def test_a_server_may_be_stopped_while_it_stops() -> None:
    module, answers = Drains(), []
    server = ExpertsServer({"e": module}, config={"drain_timeout_s": PATIENCE_S})
    module.__dict__["server"] = server

    def stop() -> None:
        module.is_heard.set()
        server.stop()

    def call() -> None:
        with torch.no_grad(), connect(server.address) as experts:
            answers.append(experts["e"](torch.ones(1, 4)))

    with handling(stop):
        with server:
            thread = threading.Thread(target=call)
            thread.start()
            assert module.has_begun.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
    assert server.state == "stopped"
    assert len(answers) == 1


class SaysItIsSaved(nn.Linear):
    """The last save of it sends a signal, and ends once that has been heard."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.server: ExpertsServer | None = None
        self.is_heard = threading.Event()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.server is not None and self.server.state == "draining":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert self.is_heard.wait(PATIENCE_S)
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another server"])
def test_a_handler_that_stops_a_server_in_its_last_save_waits_for_it(tmp_path: Path, is_alone: bool) -> None:
    def stop() -> None:
        module.is_heard.set()
        server.stop()
        seen.append((server.state, any(folder.iterdir())))

    module, seen, folder = SaysItIsSaved(), [], tmp_path / "checkpoints"
    server = ExpertsServer({"e": module}, config={"checkpoint_dir": str(folder)})
    module.__dict__["server"] = server
    other = contextlib.nullcontext() if is_alone else ExpertsServer({"e": nn.Linear(4, 4)})
    with leaving_no_thread(), other, handling(stop):
        with server:
            pass
        assert server.state == "stopped"
        assert seen == [("stopped", True)]
        module.is_heard.clear()
        with server:  # it may be started again
            assert server.state == "ready"
    assert seen == [("stopped", True)] * 2


class LosesItsFolder(SaysItIsSaved):
    """The last save of it fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        if self.is_heard.is_set() and self.folder.is_dir():
            self.folder.rename(self.folder.with_name("elsewhere"))
        return found


def test_who_stops_a_server_in_a_last_save_that_fails_is_told_as_well(tmp_path: Path) -> None:
    """Otherwise a handler that ends the process, by `sys.exit(0)`, would say that all is well."""

    def stop() -> None:
        module.is_heard.set()
        try:
            server.stop()
        except CheckpointError as error:
            told.append(str(error))

    module, told = LosesItsFolder(tmp_path / "checkpoints"), list[str]()
    server = ExpertsServer({"e": module}, config={"checkpoint_dir": str(module.folder)})
    module.__dict__["server"] = server
    with leaving_no_thread(), handling(stop):
        with pytest.raises(CheckpointError) as raised, server:
            pass
        assert server.state == "stopped"
    assert told == [str(raised.value)]


def test_a_server_that_is_stopped_while_it_starts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: Any) -> Any:
        own = make(*args)
        signal.raise_signal(signal.SIGUSR1)
        return own

    make = embedded.ExpertServer
    server = ExpertsServer({"e": nn.Linear(4, 4)})
    with leaving_no_thread(), ExpertsServer({"e": nn.Linear(4, 4)}) as other, handling(server.stop):
        monkeypatch.setattr(embedded, "ExpertServer", made)
        with pytest.raises(RuntimeError, match="got stop"):
            server.start()
        with torch.no_grad(), connect(other.address) as experts:
            assert experts["e"](torch.ones(1, 4)).shape == (1, 4)


def test_a_server_that_is_stopped_just_as_it_begins_to_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquired() -> LoopThread:
        signal.raise_signal(signal.SIGUSR1)
        return acquire()

    acquire = LoopThread.acquire
    server = ExpertsServer({"e": nn.Linear(4, 4)})
    monkeypatch.setattr(LoopThread, "acquire", acquired)
    with leaving_no_thread(), handling(server.stop), pytest.raises(RuntimeError, match="got stop"):
        server.start()
    assert server.state != "ready"


class SignalsAsItIsSaved(nn.Linear):
    """Its server, which saves it first on the loop's thread, goes on once the signal has been heard."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.is_heard = threading.Event()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not self.is_heard.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert self.is_heard.wait(PATIENCE_S)
        return super().state_dict(*args, **kwargs)


def test_a_server_that_is_stopped_while_it_starts_on_the_loop_leaves_its_folder_free(tmp_path: Path) -> None:
    module = SignalsAsItIsSaved()
    server = ExpertsServer({"e": module}, config={"checkpoint_dir": tmp_path})

    def stop() -> None:
        module.is_heard.set()
        server.stop()

    with leaving_no_thread(), handling(stop), pytest.raises(RuntimeError, match="got stop"):
        server.start()
    assert server.state != "ready"
    with server:
        assert server.state == "ready"


def test_what_is_stopped_while_it_lets_go_of_the_loop_leaves_that_to_other_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def released(self: Any) -> None:
        release(self)
        signal.raise_signal(signal.SIGUSR1)

    release = embedded.LoopThread.release
    with ExpertsServer({"e": nn.Linear(4, 4)}) as other:
        server = ExpertsServer({"e": nn.Linear(4, 4)}).start()
        with handling(server.stop), monkeypatch.context() as patched:
            patched.setattr(embedded.LoopThread, "release", released)
            server.stop()
        with torch.no_grad(), connect(other.address) as experts:
            assert experts["e"](torch.ones(1, 4)).shape == (1, 4)


USES: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {
    "cancelling": lambda: (own := Cancellation(), lambda: own.add(print)),
    "retries": lambda: (own := RetryBudget(RetryPolicy()), own.note_success),
    "placement": lambda: (own := Placement(0), lambda: own.hosts_of("e")),
    "compression": lambda: (
        own := Encodings(Compression.of("auto")),
        lambda: own.note_transfer("Forward", 1 << 30, 1.0),
    ),
    "hedging": lambda: (own := Latencies(HedgePolicy()), lambda: own.note("a:1", own.usual_s("a:1"))),
    "expecting": lambda: (own := Expectations(print), lambda: own.note_pass([], ())),
}


@pytest.mark.parametrize("name", USES)
def test_a_handler_uses_what_its_thread_was_about_to_change(name: str) -> None:
    own, use = USES[name]()

    def be_interrupted() -> None:
        with own._lock:
            use()

    thread = threading.Thread(target=be_interrupted, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_handler_makes_a_map_whose_calls_wait_for_each_other_at_any_line_of_a_map() -> None:
    assert_prints(
        """
        import signal, sys, threading
        import torch
        from moe_autograd import _crew, _lookout, _workers, parallel_apply

        def run():
            together = threading.Barrier(2)
            def meet(x):
                together.wait()
                return 2 * x
            x = torch.ones(2, requires_grad=True)
            sum(parallel_apply([meet] * 2, [x] * 2)).sum().backward()
            assert x.grad.tolist() == [4.0, 4.0]

        @torch.enable_grad()  # the backward of a map has none
        def handle(*_):
            run()

        def trace(frame, event, _):
            global num_lines
            if frame.f_code.co_filename not in files:
                return None
            num_lines += event == "line"
            if event == "line" and num_lines == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
            return trace

        files = {module.__file__ for module in (_crew, _lookout, _workers)}
        signal.signal(signal.SIGUSR1, handle)
        run()
        at = num_lines = 1
        while num_lines >= at - 1:
            at, num_lines = at + 1, 0
            sys.settrace(trace)
            run()
            sys.settrace(None)
        print(at > 100)
        """,
        "True",
    )
