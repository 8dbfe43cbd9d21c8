"""Forks of a process that has servers, starts or stops them: a child serves, or is told at once that it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.servers import ROOT, START_S
from tests.support.subprocesses import run_python


def printed_by(program: str, *arguments: str) -> list[str]:
    """Run it; grpc may complain about forks beside a server."""
    ended = run_python(program, *arguments, limit_s=START_S, raises_warnings=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


FORKED_BESIDE_A_SERVER = """
import os, sys
from torch import nn
from experts_server import ExpertsServer
from moe_autograd.remote import connect

try:
    with ExpertsServer({"e": nn.Linear(4, 4)}) as server:
        child = os.fork()
        if child == 0:
            try:
                ExpertsServer({"e": nn.Linear(4, 4)}).start()
            except RuntimeError as error:
                assert f"got the fork of {os.getppid()}, where one runs" in str(error), error
                print("refused", flush=True)
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        with connect(server.address) as experts:
            print(*experts, flush=True)
finally:
    print("left", flush=True)
"""


def test_a_forked_child_leaves_a_server_alone_and_starts_none() -> None:
    assert printed_by(FORKED_BESIDE_A_SERVER) == ["refused", "left", "3", "e", "left"]


FORKED_AFTER_SERVERS = """
import gc, os, socket, sys, threading
import torch
from torch import nn
from experts_server import ExpertsServer
from moe_autograd.errors import ConfigError, InvalidCallError
from moe_autograd.remote import RemoteOptimizer, connect

torch.set_num_threads(1)
gc.disable()

def pollers():
    return [thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name]

def server(**settings):
    return ExpertsServer({"e": nn.Linear(4, 4)}, **settings)

def once():
    with server():
        assert pollers(), "the name of grpc's thread is another one"

def again():
    with (twice := server()):
        pass
    with twice:
        pass
    return twice

def called():
    with server(optimizer=torch.optim.SGD) as trained, connect(trained.address) as experts:
        experts["e"](torch.ones(1, 4)).sum().backward()
        RemoteOptimizer(experts).step()
        for width in (4, 5):
            try:
                experts["e"](torch.full((1, width), torch.nan))
            except InvalidCallError:
                pass
        try:
            experts["e"].load_state_dict({"weight": torch.ones(1)})
        except RuntimeError:
            pass

def refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            server(listen=f"127.0.0.1:{taken.getsockname()[1]}").start()
        except ConfigError:
            pass

def refused_and_kept():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            server(listen=f"127.0.0.1:{taken.getsockname()[1]}").start()
        except ConfigError as error:
            return error

kept = globals()[sys.argv[1]]()
child = os.fork()
if child == 0:
    try:
        with server() as served, connect(served.address) as experts:
            print(experts["e"](torch.ones(1, 4)).numel(), flush=True)
    except RuntimeError as error:
        print(f"got the fork of {os.getppid()}" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(len(pollers()))
"""


@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ("once", ["4", "0"]),
        ("again", ["4", "0"]),
        ("called", ["4", "0"]),
        ("refused", ["4", "0"]),
        ("refused_and_kept", ["True", "1"]),  # with the frames of its traceback
    ],
)
def test_a_child_forked_after_a_server_has_stopped_serves_without_a_garbage_collection(
    what: str, printed: list[str]
) -> None:
    """grpc.aio polls in a thread as long as there is a server or an RPC of it; these were in cycles."""
    assert printed_by(FORKED_AFTER_SERVERS, what) == printed


FORKED_AS_ONE_STARTS = """
import asyncio, os, signal, sys, threading
import torch
from torch import nn
from moe_autograd.remote import connect

def before():
    if sys.argv[1] == "as it forks":
        thread.start()
        thread.join()

os.register_at_fork(before=before)  # after that of servers, which is registered later
from experts_server import ExpertsServer

begun, may_go = threading.Event(), threading.Event()

def hold(when):
    if when == sys.argv[1] and threading.current_thread() is thread:
        begun.set()
        may_go.wait()

class HeldLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        hold("before its loop")
        return super().new_event_loop()

class HeldExpert(nn.Linear):
    def named_parameters(self, *arguments, **options):
        hold("on its loop")
        return super().named_parameters(*arguments, **options)

thread = threading.Thread(target=lambda: begins.start())
torch.set_num_threads(1)
asyncio.set_event_loop_policy(HeldLoops())
begins = ExpertsServer({"e": HeldExpert(4, 4)})
if sys.argv[1] != "as it forks":
    thread.start()
    begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    for server in (begins, ExpertsServer({"e": nn.Linear(4, 4)})):
        try:
            with server, connect(server.address) as experts:
                print(experts["e"](torch.ones(1, 4)).numel(), flush=True)
        except RuntimeError as error:
            print(f"got the fork of {os.getppid()}" in str(error), flush=True)
        server.stop()
    os._exit(0)
os.waitpid(child, 0)
may_go.set()
thread.join()
print(begins.state)
begins.stop()
"""


@pytest.mark.parametrize(
    ("when", "printed"),
    [
        ("before its loop", "4 4 ready"),
        ("on its loop", "True True ready"),
        ("as it forks", "True True ready"),
    ],
)
def test_a_child_forked_while_another_thread_starts_a_server_does_not_wait_for_it(
    when: str, printed: str
) -> None:
    """For its locks, or for its loop, for ever."""
    command = [sys.executable, "-c", FORKED_AS_ONE_STARTS, when]  # that has imported nothing of ours yet
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, printed.split()), ended.stderr
