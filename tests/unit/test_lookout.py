"""The thread that looks at maps which have calls left: there is one when it is needed, whoever interrupts whom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from moe_autograd import _lookout
from moe_autograd._crew import Crew
from moe_autograd._habits import Habit
from tests.support.functions_waiting import PATIENCE_S
from tests.support.subprocesses import assert_prints


def test_after_a_look_that_failed_another_lookout_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(crews: tuple[object, ...], _: float) -> None:
        if crews:  # else the process's own lookout looks just now
            raise MemoryError

    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(_lookout, "_look", fail)
    monkeypatch.setattr(_lookout, "start_soon", jobs.append)
    anew = _lookout.Lookout()
    crew = Crew(lambda _: None, range(2), 2, contextlib.nullcontext, False, Habit(), 2)
    anew.watch(crew)
    with pytest.raises(MemoryError):
        jobs[0]()
    anew.watch(crew)
    assert len(jobs) == 2


class WaitsForALook:
    """A crew that has calls left until somebody has looked at it."""

    next_look_s, has_grown = 0.0, False

    def __init__(self) -> None:
        self.is_seen = threading.Event()

    @property
    def num_pending(self) -> int:
        return 0 if self.is_seen.is_set() else 1

    def census(self, now_s: float) -> tuple[int, int]:
        return 0, 1

    def look(self, now_s: float, num_waiting: int, num_computing_everywhere: int, *, is_late: bool) -> None:
        self.is_seen.set()


def test_a_crew_that_comes_as_the_lookout_leaves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lookout, "IDLE_S", 0.0)
    monkeypatch.setattr(_lookout, "DOZE_S", -1.0)
    anew = _lookout.Lookout()

    def come_and_go() -> None:
        for _ in range(1000):
            crew = WaitsForALook()
            anew.watch(crew)
            assert crew.is_seen.wait(PATIENCE_S)
            anew.forget(crew)

    threads = [threading.Thread(target=come_and_go, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_two_crews_that_come_at_once_get_one_lookout(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(_lookout, "start_soon", jobs.append)
    anew = _lookout.Lookout()
    crews = [WaitsForALook(), WaitsForALook()]
    for crew in crews:
        anew.watch(crew)
    first, second = jobs  # since the first had not begun when the second crew came
    threading.Thread(target=first, daemon=True).start()
    for crew in crews:
        assert crew.is_seen.wait(PATIENCE_S)
    second()  # it has nothing to do, and returns


def test_a_finalizer_makes_a_map_wherever_it_is_collected_as_crews_come_and_go():
    """It waited for the lookout's lock, on the thread that had it: that of a map, or the lookout's own."""
    assert_prints(
        """
        import gc, time
        from moe_autograd._lookout import lookout

        class Crew:
            next_look_s, has_grown, num_pending = 0.0, False, 0

        class Garbage:
            def __init__(self):
                self.itself = self

            def __del__(self):
                come_and_go()
                if not is_over:
                    Garbage()

        def come_and_go():
            crew = Crew()
            lookout.watch(crew)
            lookout.forget(crew)

        is_over = False
        gc.collect()
        gc.freeze()
        Garbage()
        gc.set_threshold(1, 10**5, 10**5)
        for _ in range(2000):
            come_and_go()
        is_over = True
        while lookout.is_watching:  # the lookout may be in the midst of a finalizer
            time.sleep(0.001)
        """,
        "",
        limit_s=40,
    )
