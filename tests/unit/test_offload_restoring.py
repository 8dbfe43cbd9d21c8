"""What else may go on while offloaded experts are restored, and what a `restore` leaves that does not end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_autograd.autograd.offload.residency import Residency
from tests.support.stores import WatchedStore, part_of, put_all_out

PATIENCE_S = 60


@pytest.mark.parametrize("wants", ["wish", "hold"])
def test_a_part_that_others_want_while_it_is_adopted_has_the_bytes_that_come(wants: str) -> None:
    """Who took it in between found nothing stored, and had what was in the buffer."""
    store = WatchedStore()
    residency = Residency(300, store, torch.device("cpu"))
    part, begun = part_of(residency, "a"), threading.Event()
    put_all_out(residency)
    large = part_of(residency, "large")  # whose buffer it would get
    residency.forget(large)
    seen: list[int] = []

    def want() -> None:
        begun.set()
        if wants == "wish":
            residency.prefetch([part])
        with residency.hold([part]):
            assert part.buffer is not None
            seen.append(int(part.buffer[0]))

    with ThreadPoolExecutor(1) as pool:

        def place(name: str) -> None:
            wanting.append(pool.submit(want))
            assert begun.wait(PATIENCE_S)
            assert not part.is_busy
            store.write(name, part.layout, torch.full((100,), 77, dtype=torch.uint8))

        wanting: list[Any] = []
        residency.adopt(part, place)
        wanting[0].result(PATIENCE_S)
    assert seen == [77]
    residency.close()


def test_a_part_that_another_thread_holds_is_adopted_when_that_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffer had been taken away, which the other then read from."""
    residency = Residency(300, WatchedStore(), torch.device("cpu"))
    part, held, seen = part_of(residency, "a"), threading.Event(), []

    def hold() -> None:
        with residency.hold([part]):
            held.set()
            adopting.wait(PATIENCE_S)
            seen.append(part.buffer is not None)

    adopting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(PATIENCE_S)
        wait = residency._lock.wait_awhile

        def wait_and_say_so() -> None:
            adopting.set()
            wait()

        monkeypatch.setattr(residency._lock, "wait_awhile", wait_and_say_so)
        residency.adopt(part, lambda name: seen.append("adopted"))
        holding.result(PATIENCE_S)
    assert seen == [True, "adopted"]
    with residency.hold([part]):
        residency.adopt(part, lambda name: None)  # whoever holds parts does not wait for himself
    residency.close()
