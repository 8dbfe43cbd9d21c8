"""Attributes that are computed once."""

from __future__ import annotations

import threading

from moe_autograd._computed_once import computed_once
from tests.support.subprocesses import assert_prints


class Counted:
    """A class with such an attribute."""

    num_computed = 0

    @computed_once
    def value(self) -> object:
        """What is computed."""
        self.num_computed += 1
        return object()


def test_each_instance_computes_its_own_value_once():
    one, other = Counted(), Counted()
    assert one.value is one.value
    assert one.value is not other.value
    assert (one.num_computed, other.num_computed) == (1, 1)
    assert Counted.value.__doc__ == "What is computed."


def test_threads_that_ask_at_once_get_the_same_value():
    have_both_begun = threading.Barrier(2, timeout=60)

    class Met:
        @computed_once
        def value(self) -> object:
            have_both_begun.wait()
            return object()

    met, got = Met(), []
    threads = [threading.Thread(target=lambda: got.append(met.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] is got[1] is met.value


def test_a_child_forked_while_a_thread_computes_one_computes_its_own():
    assert_prints(
        """
        import os, threading
        from moe_autograd._computed_once import computed_once

        class Slow:
            def __init__(self, begun, may_go):
                self.begun, self.may_go = begun, may_go

            @computed_once
            def value(self):
                self.begun.set()
                assert self.may_go.wait(60)
                return 1

        begun, may_go, at_once = threading.Event(), threading.Event(), threading.Event()
        at_once.set()
        thread = threading.Thread(target=lambda: Slow(begun, may_go).value)
        thread.start()
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            Slow(threading.Event(), at_once).value
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("ended")
        may_go.set()
        thread.join()
        """,
        "ended",
        limit_s=60,
    )
