"""Signals in the midst of what a map does for its random numbers: Ctrl-C, and handlers that make maps themselves."""

from __future__ import annotations

from tests.support.subprocesses import assert_prints

PREAMBLE = """
    import gc, os, signal, sys, threading
    import torch
    from moe_autograd import parallel_apply

    def draws(x):
        threading.Event().wait(0.00001)  # so that it is not made in turn
        return x + torch.rand(2)

    x = torch.zeros(2, requires_grad=True)

    def numbers(most=None):
        torch.manual_seed(0)
        return torch.stack(parallel_apply([draws] * 2, [(x,)] * 2, max_concurrency=most)).detach()
"""


def test_after_ctrl_c_anywhere_in_the_first_map_the_next_ones_draw_as_ever() -> None:
    """Also while what has been begun is kept by the exception; each time in a child, as all is set up once only."""
    assert_prints(
        PREAMBLE
        + """
    def is_as_ever(point):
        # Return whether it is after Ctrl-C at that point, 3: there is none.
        left = [point]

        def interrupt(frame, event, function):
            if "operators" in frame.f_code.co_filename and event == "c_return" and frame.f_code.co_name[0] != "<":
                left[0] -= 1
                if left[0] < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        kept = None
        try:
            numbers(1)  # all on this thread
        except KeyboardInterrupt as stop:
            kept = stop
        sys.setprofile(None)
        if left[0] >= 0:
            return 3
        first = numbers()
        del kept
        gc.collect()
        return 0 if torch.equal(numbers(), first) and torch.equal(numbers(), first) else 1

    codes = []
    while not codes or codes[-1] == 0:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(is_as_ever(101 * len(codes)))
            except BaseException:
                os._exit(2)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(len(codes) > 10, set(codes))
    """,
        "True {0, 3}",
        limit_s=120,
    )


def test_a_handler_that_makes_a_map_takes_nothing_from_the_one_it_comes_into() -> None:
    """What a call reads of the generator's state and puts back is its own."""
    assert_prints(
        PREAMBLE
        + """
    def draws_again(x):
        state = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(state)
        return x.sum() + first, torch.equal(first, torch.rand(3))

    seen = set()

    def handle(frame, event, function):
        point = frame.f_code, frame.f_lineno, event
        is_at_an_end = any(name in frame.f_code.co_filename for name in ("scope.py", "stand_ins.py"))
        if is_at_an_end and frame.f_code.co_name not in ("get_state", "set_state") and point not in seen:
            seen.add(point)
            sys.setprofile(None)
            parallel_apply([draws] * 2, [(x,)] * 2, max_concurrency=1)

    own, expected, are_same = torch.random.default_generator, numbers(), []
    num_seen = -1
    while num_seen < len(seen):
        num_seen = len(seen)
        sys.setprofile(handle)
        are_same += [is_same for _, is_same in parallel_apply([draws_again] * 2, [(x,)] * 2, max_concurrency=1)]
        sys.setprofile(None)
    print(len(seen) > 10, set(are_same), torch.random.default_generator is own, torch.equal(numbers(), expected))
    """,
        "True {True} True True",
    )
