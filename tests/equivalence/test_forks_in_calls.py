"""Children that are forked inside a call, or by a handler of a signal while a map runs: they and their parent go on.

Each fork comes at every point of what a thread is just doing: a profile function stops it there.
"""

from __future__ import annotations

import pytest

from tests.support.subprocesses import assert_prints, run_python

PREAMBLE = """
    import os, queue, signal, sys, threading, traceback
    import torch
    from moe_autograd import map_with_parallel_backward, parallel_apply

    def forked(action):
        # Return how a child ends that does this.
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(0 if action() else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_child_forked_while_another_call_draws_first_draws_what_its_call_would_have_drawn() -> None:
    """It waited for the lock that the other call's thread held; or drew what followed from another number."""
    assert_prints(
        PREAMBLE
        + """
    points, codes = queue.SimpleQueue(), []

    def stop(frame, event, function):
        if "_random" in frame.f_code.co_filename and event in ("call", "c_return"):
            points.put(is_forked := threading.Event())
            is_forked.wait(0.05)  # a fork may wait for this thread to go on

    def draws_first(x, stop):
        sys.setprofile(stop)
        torch.rand(1)
        sys.setprofile(None)
        points.put(None)
        return x

    def forks(x, stop):
        while (is_forked := points.get()) is not None:
            if not any(codes):
                codes.append(forked(lambda: torch.equal(torch.rand(3), expected)))
            is_forked.set()
        return x + torch.rand(3)

    def drawn(stop):
        torch.manual_seed(0)
        x = torch.zeros(3, requires_grad=True)
        return parallel_apply([draws_first, forks], [(x, stop)] * 2)[1].detach()

    expected = drawn(None)
    assert torch.equal(drawn(stop), expected)
    print(len(codes) > 20, set(codes))
    """,
        "True {0}",
    )


def test_a_handler_of_a_signal_forks_wherever_the_first_map_is_with_its_random_numbers() -> None:
    """The fork waited for a lock that its own thread held; and the child, which makes a map, for its parent's."""
    assert_prints(
        PREAMBLE
        + """
    codes, seen = [], set()

    def draws(x):
        return x + torch.rand(3)

    def maps(most=None):
        inputs = [(torch.zeros(3, requires_grad=True),)] * 3
        return len(parallel_apply([draws] * 3, inputs, max_concurrency=most)) == 3

    def handle(frame, event, function):
        point = frame.f_code, frame.f_lineno, event
        if "_random" in frame.f_code.co_filename and event in ("call", "c_return") and point not in seen:
            seen.add(point)
            sys.setprofile(None)
            codes.append(forked(maps))
            sys.setprofile(handle)

    own = torch.random.default_generator
    torch.rand(3)
    sys.setprofile(handle)
    maps(1)  # all on this thread
    sys.setprofile(None)
    print(len(codes) > 20, set(codes), torch.random.default_generator is own)
    """,
        "True {0} True",
        limit_s=120,
    )


@pytest.mark.parametrize("forks_on_caller", [True, False])
def test_a_child_that_goes_on_behind_the_call_it_was_forked_in_says_so(forks_on_caller: bool) -> None:
    """It waited for threads that it does not have, or ended as if all had gone well."""
    ended = run_python(
        PREAMBLE
        + f"""
    parent, all_run, has_forked = os.getpid(), threading.Barrier(3), threading.Event()
    forking = [None]

    def call(x):
        all_run.wait(60)
        is_caller = threading.current_thread() is threading.main_thread()
        if is_caller is {forks_on_caller} and forking and forking.pop() is None:
            if os.fork() == 0:
                signal.alarm(20)
            else:
                has_forked.set()
        elif os.getpid() == parent:
            has_forked.wait(60)
        return x * 2

    inputs = [(torch.ones(1, requires_grad=True),)] * 3
    try:
        parallel_apply([call] * 3, inputs)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    assert os.getpid() == parent
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["1"]), ended
    assert "expected to end in the call that it was forked in" in ended.stderr


def test_a_fork_in_a_handler_in_the_midst_of_a_draw_and_one_of_another_call_wait_for_each_other_no_longer() -> (
    None
):
    """Each had what the other one waited for."""
    assert_prints(
        PREAMBLE
        + """
    is_drawing, codes = threading.Event(), []

    def handle(frame, event, function):
        if event == "call" and frame.f_code.co_name == "_note_drawn":
            sys.setprofile(None)
            is_drawing.set()
            while not any(has(one, "_wait_for_steps") for one in sys._current_frames().values()):
                threading.Event().wait(0.001)
            codes.append(forked(lambda: True))

    def has(frame, name):
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    def draws(x):
        sys.setprofile(handle)
        return x + torch.rand(3)

    def forks(x):
        is_drawing.wait(60)
        codes.append(forked(lambda: True))
        return x * 2

    parallel_apply([draws, forks], [(torch.zeros(3, requires_grad=True),)] * 2)
    print(codes)
    """,
        "[0, 0]",
    )
