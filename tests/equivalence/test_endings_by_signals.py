"""What a signal's handler raises, Ctrl-C above all, ends a map at once."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from moe_autograd import parallel_apply
from tests.support.endings import PREAMBLE
from tests.support.subprocesses import assert_prints


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("sender", [0, 5])
def test_ctrl_c_returns_at_once_though_calls_still_block(where: str, sender: int) -> None:
    assert_prints(
        PREAMBLE
        + f"""
    barrier, never = threading.Barrier(8), threading.Event()
    def action(mine):
        barrier.wait(60)
        if mine == {sender}:
            interrupt_main_thread()
        never.wait()
    try:
        run([lambda i=i: action(i) for i in range(8)], {where!r})
    except KeyboardInterrupt:
        print("interrupted")
    print(meet(8))
    """,
        "interrupted 32.0",
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_while_only_workers_block_returns_at_once(where: str) -> None:
    """The calling thread's own call has ended: it waits for the others when the signal comes."""
    assert_prints(
        PREAMBLE
        + f"""
    barrier, never, once = threading.Barrier(8), threading.Event(), threading.Lock()
    def action():
        barrier.wait(60)
        if threading.current_thread() is not threading.main_thread():
            if once.acquire(blocking=False):
                interrupt_main_thread()
            never.wait()
    try:
        run([action] * 8, {where!r})
    except KeyboardInterrupt:
        print("interrupted")
    print(meet(8))
    """,
        "interrupted 32.0",
    )


def test_ctrl_c_that_does_not_wake_the_calling_thread_returns_soon() -> None:
    """As when it comes just before the thread blocks: here another thread of the process takes the signal."""
    assert_prints(
        PREAMBLE
        + """
    barrier, never, once = threading.Barrier(8), threading.Event(), threading.Lock()
    threading.Thread(target=never.wait, daemon=True).start()  # takes it
    def action():
        barrier.wait(60)
        if threading.current_thread() is not threading.main_thread():
            if once.acquire(blocking=False):
                interrupt_main_thread()
            never.wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        run([action] * 8)
    except KeyboardInterrupt:
        print("interrupted")
    print(meet(8))
    """,
        "interrupted 32.0",
    )


def test_an_uncaught_ctrl_c_ends_the_process_though_calls_still_block() -> None:
    assert_prints(
        PREAMBLE
        + """
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        barrier, never, once = threading.Barrier(4), threading.Event(), threading.Lock()
        def action():
            barrier.wait(60)
            if once.acquire(blocking=False):
                interrupt_main_thread()
            never.wait()
        signal.alarm(100)
        run([action] * 4)
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status) == signal.SIGINT or os.waitstatus_to_exitcode(status) == 1)
    """,
        "True",
    )


HANDLERS = {
    "function": "def handler(signum, frame): raise SystemExit(7)",
    "any arguments": "def handler(*args): raise SystemExit(7)",
    "that exits": "handler = lambda *_: sys.exit(7)",
    "partial": """
    def exit_with(code, signum, frame): raise SystemExit(code)
    import functools
    handler = functools.partial(exit_with, 7)
""",
    "object": """
    class Handler:
        def __call__(self, signum, frame): raise SystemExit(7)
    handler = Handler()
""",
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_signals_handler_raises_in_a_call_returns_at_once(where: str, handler: str) -> None:
    assert_prints(
        PREAMBLE
        + f"""
    {HANDLERS[handler]}
    barrier, never = threading.Barrier(4), threading.Event()
    def action(mine):
        barrier.wait(60)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGTERM)
        never.wait()
    signal.signal(signal.SIGTERM, handler)
    try:
        run([lambda i=i: action(i) for i in range(4)], {where!r})
    except SystemExit as error:
        print(error.code, meet(4))
    """,
        "7 16.0",
    )


def test_what_a_signals_handler_raises_in_calls_made_in_turn_ends_them() -> None:
    assert_prints(
        PREAMBLE
        + """
    from moe_autograd import parallel_apply
    def call(index):
        made.append(index)
        if index == 1:
            signal.raise_signal(signal.SIGALRM)
    def handler(signum, frame):
        raise TimeoutError("too late")
    made = []
    signal.signal(signal.SIGALRM, handler)
    try:
        parallel_apply([call] * 4, [(index,) for index in range(4)], max_concurrency=1)
    except TimeoutError as error:
        print(error, made)
    """,
        "too late [0, 1]",
    )


def test_a_handler_of_ctrl_c_that_had_to_wait_ends_the_map_as_well() -> None:
    """The main thread waits for a map within its call, where Ctrl-C is noted, and heard a little later."""
    assert_prints(
        PREAMBLE
        + """
    from moe_autograd import parallel_apply
    class Stop(Exception): ...
    def handler(signum, frame):
        raise Stop
    def inner(barrier):
        barrier.wait()
        if threading.current_thread() is not threading.main_thread():
            if wants_signal:
                wants_signal.clear()
                interrupt_main_thread()
            never.wait()
    def outer(barrier):
        barrier.wait()
        if threading.current_thread() is threading.main_thread():
            wants_signal.append(None)
            parallel_apply([inner] * 2, [(of_inner,)] * 2)
        never.wait()
    of_inner, of_outer = threading.Barrier(2), threading.Barrier(3)
    never, wants_signal = threading.Event(), []
    signal.signal(signal.SIGINT, handler)
    try:
        parallel_apply([outer] * 3, [(of_outer,)] * 3)
    except Stop as error:
        print(getattr(error, "__notes__", None), meet(4))
    """,
        "None 16.0",
    )


def test_a_function_that_is_given_its_callers_frame_is_no_handler() -> None:
    def fail(frame: FrameType) -> None:
        raise LookupError

    def call(index: int) -> None:
        made.append(index)
        if index == 0:
            fail(sys._getframe())

    made: list[int] = []
    with pytest.raises(LookupError):
        parallel_apply([call] * 3, [(index,) for index in range(3)], max_concurrency=1)
    assert made == [0, 1, 2]


def test_what_locals_gave_out_before_an_exception_stays() -> None:
    given: dict[str, object] = {}

    def call(index: int) -> None:
        nonlocal given
        given = locals()
        raise LookupError

    with pytest.raises(LookupError):
        parallel_apply([call], [(7,)], max_concurrency=1)
    assert given["index"] == 7
