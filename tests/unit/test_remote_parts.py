"""The small parts of the client: deadlines, numbers, names, cancelling, operations, many servers at once."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_autograd._natural_order import natural_order
from moe_autograd.errors import CallCancelledError, ServerUnavailableError
from moe_autograd.remote.awaiting import SCOPE, Scope
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Fanout
from moe_autograd.remote.numbering import Numbering
from moe_autograd.remote.operations import Operation, Operations, UnderWay
from moe_autograd.remote.state import split_by_expert


class TestDeadline:
    def test_it_runs_down_to_zero_and_not_below(self):
        assert 0 < Deadline(1e6).remaining_s <= 1e6
        assert Deadline(1.0, started_at=0.0).remaining_s == 0.0

    def test_it_says_how_long_it_has_run(self):
        with patch("time.monotonic", return_value=103.0):
            assert str(Deadline(2.0, started_at=101.5)) == "after 1.5 s (deadline 2.0 s)"
        with patch("time.monotonic", return_value=103.0):
            assert str(Deadline(0.02, started_at=102.9765)) == "after 23.5 ms (deadline 20.0 ms)"

    def test_a_part_has_less_time_and_never_more(self):
        whole = Deadline(1e6)
        assert whole.part(5.0).timeout_s == 5.0
        assert whole.part(2e6) is whole
        over = Deadline(1.0, started_at=0.0)
        assert over.part(5.0) is over


class TestNumbering:
    def test_numbers_are_never_given_twice(self):
        numbering = Numbering()
        given_out: list[int] = []

        def take() -> None:
            for _ in range(200):
                with numbering.sequences(3) as (numbers, _):
                    given_out.extend(numbers)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(given_out) == list(range(1, 2401))

    def test_settled_below_is_the_lowest_open_number(self):
        numbering = Numbering()
        with numbering.sequences(2) as (first, below_first):
            assert (list(first), below_first) == ([1, 2], 1)
            with numbering.sequences(1) as (second, below_second):
                assert (list(second), below_second) == ([3], 1)
        with numbering.sequences(1) as (third, below_third):
            assert (list(third), below_third) == ([4], 4)

    def test_a_failure_settles_its_numbers(self):
        numbering = Numbering()
        with pytest.raises(ZeroDivisionError), numbering.sequences(5):
            raise ZeroDivisionError
        with numbering.sequences(1) as (numbers, below):
            assert below == numbers[0]

    def step_in(self, scope: Scope | None, numbering: Numbering, *, fails: bool = False) -> int:
        """Return the number of a step."""

        def step() -> int:
            SCOPE.set(scope)
            with numbering.sequences(1, ["a"]) as ((number,), _):
                return number // (not fails)

        return copy_context().run(step)

    def test_of_steps_that_nobody_has_heard_of_the_last_one_is_repeated_also_if_it_failed(self):
        numbering, scope = Numbering(), Scope()
        assert self.step_in(scope, numbering) == 1
        with pytest.raises(ZeroDivisionError):
            self.step_in(scope, numbering, fails=True)
        scope.end(was_heard=False)
        assert self.step_in(None, numbering) == 2

    def test_a_step_that_another_one_has_followed_is_not_repeated(self):
        numbering, one, other = Numbering(), Scope(), Scope()
        assert [self.step_in(scope, numbering) for scope in (one, other)] == [1, 2]
        one.end(was_heard=False)
        other.end(was_heard=True)
        assert self.step_in(None, numbering) == 3

    def test_two_clients_have_two_names(self):
        assert Numbering().client_id != Numbering().client_id


class TestNames:
    def test_digits_count_as_numbers(self):
        names = ["ffn.10", "ffn.2", "a", "ffn.2.x", "b2c10", "b2c9", "2", ""]
        assert sorted(names, key=natural_order) == [
            "",
            "2",
            "a",
            "b2c9",
            "b2c10",
            "ffn.2",
            "ffn.2.x",
            "ffn.10",
        ]

    @given(st.lists(st.text("ab.01²", max_size=6)))
    def test_any_names_have_an_order(self, names):
        assert sorted(sorted(names, key=natural_order)) == sorted(names)

    def test_a_key_belongs_to_the_longest_name_that_fits(self):
        split = split_by_expert({"a.w": 1, "a.b.w": 2, "a.b.c": 3, "a.0.w": 4}, ["a", "a.b"])
        assert split == {"a": {"w": 1, "0.w": 4}, "a.b": {"w": 2, "c": 3}}

    @pytest.mark.parametrize("key", ["w", "a", "b.w", "ab.w", ".w", 3])
    def test_a_key_that_belongs_to_no_expert_is_refused(self, key):
        with pytest.raises(KeyError, match=r"of the form '<expert>\.<key>'"):
            split_by_expert({key: 1}, ["a", "a.b"])

    def test_what_a_key_costs_does_not_grow_with_the_number_of_experts(self):
        def num_calls(num_experts: int) -> int:
            names = [f"ffn.{index}" for index in range(num_experts)]
            events: list[str] = []
            sys.setprofile(lambda frame, event, argument: events.append(event))
            split_by_expert(dict.fromkeys((f"{name}.weight" for name in names), 1), names)
            sys.setprofile(None)
            return events.count("c_call")

        assert num_calls(400) <= 2 * num_calls(200)


class TestCancellation:
    def test_what_is_under_way_and_what_comes_later_is_cancelled(self):
        cancelled: list[str] = []
        cancellation = Cancellation()
        first, second, third = (lambda name=name: cancelled.append(name) for name in "abc")
        cancellation.add(first)
        cancellation.add(second)
        cancellation.remove(second)
        cancellation.cancel()
        cancellation.add(third)
        assert cancelled == ["a", "c"]
        assert cancellation.wait(60.0)


class TestOperations:
    def test_a_part_ends_sooner_and_is_cancelled_with_the_whole(self):
        with Operations(["a:1"], timeout_s=60.0).begin() as operation:
            part = operation.part(1.0)
            assert part.deadline.remaining_s <= 1.0 < operation.deadline.remaining_s
            operation.cancellation.cancel()
            assert part.cancellation.wait(0.0)

    def test_what_has_ended_is_held_no_longer(self):
        operations = Operations(["a:1"], timeout_s=60.0)
        with operations.begin():
            assert "1 under way" in repr(operations)
        assert "0 under way" in repr(operations)

    def test_nor_is_what_an_interrupt_ended_as_it_began(self):
        class Interrupted(Cancellation):
            def add(self, cancel: Callable[[], object]) -> None:
                super().add(cancel)
                raise KeyboardInterrupt

        groups = [Cancellation(), Interrupted()]
        under_way = UnderWay(Operation(Deadline(60.0), Cancellation()), groups)
        with pytest.raises(KeyboardInterrupt), under_way:
            pass
        assert [repr(group) for group in groups] == ["Cancellation(0 under way)"] * 2

    @pytest.mark.parametrize(
        ("cancel", "kind"),
        [
            (lambda operations, operation: None, ServerUnavailableError),
            (lambda operations, operation: operation.cancellation.cancel("late"), ServerUnavailableError),
            (lambda operations, operation: operations.close(), CallCancelledError),
        ],
        ids=["not cancelled", "given up for a reason", "closed"],
    )
    def test_a_server_that_is_gone_is_the_reason_unless_nobody_waits_any_more(self, cancel, kind):
        operations = Operations(["a:1"], timeout_s=60.0)

        def fail() -> None:
            with operations.begin() as operation:
                cancel(operations, operation)
                raise ServerUnavailableError("gone")

        with pytest.raises(ServerUnavailableError) as raised:
            fail()
        assert raised.type is kind


class TestFanout:
    def test_all_run_at_the_same_time(self):
        barrier = threading.Barrier(5)
        fanout = Fanout(5)
        results = fanout.at_each(
            dict.fromkeys("abcde", 0), lambda address, _: (barrier.wait(60), address)[1], Cancellation()
        )
        assert results == dict(zip("abcde", "abcde", strict=True))
        assert list(results) == list("abcde")
        fanout.close()

    def test_one_failure_leaves_the_others_their_results(self):
        def do(address: str, work: int) -> int:
            return 1 // work

        fanout = Fanout(3)
        results = fanout.at_each({"a": 1, "b": 0, "c": 1}, do, Cancellation())
        assert [type(result) for result in results.values()] == [int, ZeroDivisionError, int]
        fanout.close()

    def test_what_a_thread_raised_goes_when_nobody_holds_it(self):
        class Failed(Exception):
            pass

        def do(address: str, _: int) -> None:
            if address == "b":
                raise Failed

        gc.disable()
        try:
            fanout = Fanout(2)
            results = fanout.at_each({"a": 0, "b": 0}, do, Cancellation())
            fanout._pool._executor.shutdown()  # its thread holds nothing any more
            raised = weakref.ref(results["b"])
            del results
            assert raised() is None
        finally:
            gc.enable()

    def test_an_interrupt_of_the_calling_thread_cancels_the_rest(self):
        cancellation = Cancellation()

        def do(address: str, _: None) -> None:
            if address == "a":
                raise KeyboardInterrupt
            assert cancellation.wait(60.0)

        fanout = Fanout(2)
        with pytest.raises(KeyboardInterrupt):
            fanout.at_each({"a": None, "b": None}, do, cancellation)
        fanout.close()

    def test_an_interrupt_while_threads_are_given_their_work_cancels_what_has_begun(self):
        class Interrupted(dict[str, None]):
            def __getitem__(self, address: str) -> None:
                if address == "c":
                    assert begun.wait(60.0)
                    raise KeyboardInterrupt

        begun, cancellation, fanout = threading.Event(), Cancellation(), Fanout(3)
        with pytest.raises(KeyboardInterrupt):
            fanout.at_each(Interrupted(a=None, b=None, c=None), lambda address, _: begun.set(), cancellation)
        assert cancellation.wait(0.0)
        fanout.close()

    def test_no_server_is_no_work(self):
        assert Fanout(0).at_each({}, lambda address, work: None, Cancellation()) == {}
