"""Remote experts among signals, spawned processes, threads and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd._intraop import _openmp, end_team, get_team_size, set_team_size
from moe_autograd.errors import DeadlineExceededError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from moe_autograd.remote.channel import Channel
from tests.support.held import Held
from tests.support.servers import ROOT, wait_until, wait_until_inside
from tests.support.subprocesses import assert_prints, talk_to


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.fixture(scope="module")
def server():
    torch.manual_seed(0)
    modules = {"ffn.0": nn.Linear(4, 4), "ffn.1": nn.Linear(4, 4)}
    with ExpertsServer(modules, optimizer=sgd) as server:
        yield server


def test_ctrl_c_ends_a_call_at_once():
    """The program calls an expert that never answers, and is interrupted when the call is under way."""
    program = """
        import threading, torch
        from experts_server import ExpertsServer
        from moe_autograd.remote import connect

        class Waits(torch.nn.Module):
            def forward(self, x):
                print("begun", flush=True)
                threading.Event().wait()
                return x

        if __name__ == "__main__":
            server = ExpertsServer({"waits": Waits()}).start()
            with connect(server.address, timeout_s=1000) as experts:
                try:
                    experts["waits"](torch.ones(1, 4))
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
            import os
            os._exit(0)
    """
    with talk_to(program) as (process, _, stdout):
        assert stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert stdout.read() == "interrupted\n"


class Gated(nn.Module):
    """Says that it has begun, and waits until it is let go; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.begun.set()
        assert self.gate.wait(120)
        return x


INTERRUPTED = """
    import sys, torch
    from moe_autograd import parallel_apply
    from moe_autograd.remote import connect

    def wait_in(phase):
        if phase == sys.argv[1]:
            print("ready", flush=True)
            sys.stdin.readline()

    if __name__ == "__main__":
        with connect(sys.argv[2:4], timeout_s=1000) as experts:
            modules = [experts[name] for name in sys.argv[4:]]  # in the order of their servers
            try:
                wait_in("forward")
                outputs = parallel_apply(modules, [(torch.ones(1, 4),)] * 2)
                wait_in("backward")
                sum(outputs).sum().backward()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            sys.stdin.readline()  # the server does not hear of it by the end of this process
            print(experts["held"](torch.ones(1, 4)).shape, flush=True)
"""


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("is_served_by_caller", [True, False], ids=["calling thread", "another thread"])
def test_ctrl_c_reaches_the_server_which_does_not_begin_what_waits_there(phase, is_served_by_caller):
    """The client is a process of its own; it calls two servers at once, the first of them in the interrupted thread."""
    held = Held(phase)
    names = ["held", "other"] if is_served_by_caller else ["other", "held"]
    modules = {"held": held, "other": nn.Linear(4, 4)}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ExpertsServer({name: modules[name]}, optimizer=sgd, update="on_backward")
            )
            for name in names
        }
        server = servers["held"]
        experts = stack.enter_context(connect(server.address, timeout_s=1000))
        addresses = [servers[name].address for name in names]
        client, stdin, stdout = stack.enter_context(talk_to(INTERRUPTED, phase, *addresses, *names))
        stack.callback(held.may_go.set)
        assert stdout.readline() == "ready\n"
        busy = threading.Thread(target=lambda: experts["held"](torch.ones(1, 4)).sum().backward())
        busy.start()
        assert held.begun.wait(60)
        print("go", file=stdin, flush=True)
        wait_until(lambda: len(server._server.registry["held"]) == 1)
        client.send_signal(signal.SIGINT)
        assert stdout.readline() == "interrupted\n"
        wait_until_inside(server, 1)
        held.may_go.set()
        busy.join(60)
        print("end", file=stdin, flush=True)
        assert stdout.read() == "torch.Size([1, 4])\n"
        assert held.num_begun == (2 if phase == "forward" else 1)
        assert server.num_updates == {"held": 1}


def test_a_call_that_is_given_up_before_it_began_is_never_begun():
    gated = Gated()
    x = torch.ones(1, 4)
    with ExpertsServer({"gated": gated}) as server, connect(server.address) as experts:
        first = threading.Thread(target=experts["gated"], args=(x,))
        first.start()
        assert gated.begun.wait(60)
        with connect(server.address, timeout_s=3.0) as hasty, pytest.raises(DeadlineExceededError):
            hasty["gated"](x)
        wait_until_inside(server, 1)
        gated.gate.set()
        first.join(60)
        experts["gated"](x)
        assert gated.num_calls == 2


def test_a_spawned_child_connects_by_itself(server):
    assert_prints(
        f"""
        import torch
        from moe_autograd.remote import connect
        with connect({server.address!r}) as experts:
            print(len(experts))
        """,
        "2",
    )


def test_without_close_the_interpreter_ends(server):
    assert_prints(
        f"""
        import torch
        from moe_autograd.remote import connect
        experts = connect({server.address!r})
        experts["ffn.0"](torch.ones(1, 4)).sum().backward()
        print("done")
        """,
        "done",
    )


def test_streams_that_were_left_are_ended_before_the_interpreter_is(server):
    program = f"""if True:
        import atexit

        @atexit.register  # before the library, so after what it does
        def tell():
            print([channel._left for channel in experts._connection._finding.servers._channels.values()])

        import torch
        from moe_autograd.remote import connect
        experts = connect({server.address!r})
        experts["ffn.0"](torch.ones(1, 4)).sum().backward()
        """
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (told.stdout, told.stderr) == ("[LeftStreams(0)]\n", "")


def test_weights_that_are_set_while_the_interpreter_takes_itself_apart_are_refused(server):
    program = f"""if True:
        from moe_autograd.remote import RetryPolicy, connect

        class Trainer:
            def __init__(self):
                self.experts = connect({server.address!r}, retry=RetryPolicy(max_retries=0))
                self.state = self.experts.state_dict()

            def __del__(self):
                self.experts.load_state_dict(self.state)

        trainer = Trainer()
        """
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=250
    )
    assert "load_state_dict: expected a thread to send from, got an interpreter that takes" in told.stderr


def test_an_event_loop_goes_on_while_an_expert_is_called_in_a_thread(server):
    async def main() -> int:
        with await asyncio.to_thread(connect, server.address) as experts:
            ticks = 0
            call = asyncio.ensure_future(asyncio.to_thread(experts["ffn.0"], torch.ones(1, 4)))
            while not call.done():
                ticks += 1
                await asyncio.sleep(0)
            assert (await call).shape == (1, 4)
            return ticks

    assert asyncio.run(main()) > 0


def test_an_event_loop_goes_on_through_whole_steps_and_a_server_that_hangs(server):
    """Connecting, forwards, backwards, updates and closing, all in threads; the loop is asked nothing."""
    gated = Gated()

    def forward_and_backward(experts: RemoteExperts) -> None:
        experts["ffn.1"](experts["ffn.0"](torch.ones(2, 4))).sum().backward()

    async def main() -> None:
        experts = await asyncio.to_thread(connect, server.address)
        optimizer = RemoteOptimizer(experts)
        slow = await asyncio.to_thread(connect, gated_server.address, timeout_s=1000.0)
        hanging = asyncio.ensure_future(asyncio.to_thread(slow["gated"], torch.ones(1, 4)))
        try:
            while not gated.begun.is_set():
                await asyncio.sleep(0)
            await asyncio.gather(*(asyncio.to_thread(forward_and_backward, experts) for _ in range(4)))
            await asyncio.to_thread(optimizer.step)
            assert not hanging.done()
        finally:
            slow.close()
        with pytest.raises(ServerUnavailableError):
            await hanging
        experts.close()

    with ExpertsServer({"gated": gated}) as gated_server:
        try:
            asyncio.run(main())
        finally:
            gated.gate.set()


def test_many_threads_train_at_once(server):
    with connect(server.address) as experts:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            try:
                for _ in range(10):
                    x = torch.randn(3, 4, generator=generator).requires_grad_()
                    y = experts["ffn.1"](experts["ffn.0"](x))
                    y.sum().backward()
                    assert x.grad is not None
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        RemoteOptimizer(experts).step()
        assert repr(experts.connection.numbering).endswith(" 0 open)")


class Interrupts:
    """Grpc's own channel, which is interrupted when it has begun a call and not returned it: it keeps that alive."""

    def __init__(self, channel, wait):
        self.channel, self.wait = channel, wait
        self.begun = []

    def segregated_call(self, *args):
        self.begun.append(self.channel.segregated_call(*args))
        self.wait()
        signal.raise_signal(signal.SIGINT)
        return self.begun[-1]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ctrl_c_just_when_a_stream_begins_reaches_the_server(monkeypatch, phase):
    held = Held(phase)
    stubs_of = Channel._stubs_now

    def stubs_to_interrupt(channel):
        stubs = stubs_of(channel)
        begin = stubs.reply_stream[phase.capitalize()]
        if not isinstance(begin._channel, Interrupts):
            begin._channel = Interrupts(begin._channel, lambda: wait_until_inside(server, 1))
        return stubs

    monkeypatch.setattr(Channel, "_stubs_now", stubs_to_interrupt)
    with ExpertsServer({"held": held}) as server, connect(server.address) as experts:
        with pytest.raises(KeyboardInterrupt):
            experts["held"](torch.ones(1, 4, requires_grad=True)).sum().backward()
        wait_until_inside(server, 0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        held.may_go.set()


# ---- teams of intra-op threads


@pytest.fixture
def team_of_two() -> Iterator[Callable[[], set[str]]]:
    """Give the calling thread a team of two; each call returns its other members, made anew if it has been ended."""

    def make() -> set[str]:
        end_team()
        others = threads_of_this_process()
        torch.ones(1 << 20).add_(1)
        members = threads_of_this_process() - others
        assert members
        return members

    before = get_team_size()
    set_team_size(2)
    yield make
    set_team_size(before)


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_who_waits_for_a_server_on_this_machine_leaves_it_the_cores(team_of_two: Any) -> None:
    """The members of the caller's team would spin there, where the server computes, also in the second call."""

    class AfterTheTeam(nn.Module):
        def forward(self, x):
            wait_until(lambda: members.isdisjoint(threads_of_this_process()))
            return x + 1

    with ExpertsServer({"after": AfterTheTeam()}) as server, connect(server.address) as experts:
        for _ in range(2):
            members = team_of_two()
            assert experts["after"](torch.ones(4096, 1)).sum() == 8192.0


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_a_small_pass_to_a_server_on_this_machine_keeps_the_team(team_of_two: Any) -> None:
    """To end it and to make it anew would take as long as the answer."""
    with ExpertsServer({"ffn.0": nn.Identity()}) as server, connect(server.address) as experts:
        members = team_of_two()
        experts["ffn.0"](torch.ones(4, 8))
        assert members <= threads_of_this_process()


def threads_of_this_process() -> set[str]:
    """Return their numbers, but for grpc's, which have names of their own."""
    found, name = set(), Path("/proc/self/comm").read_text()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/self/task/{thread}/comm").read_text() == name:
                found.add(thread)
    return found
