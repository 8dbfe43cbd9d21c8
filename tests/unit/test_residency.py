"""Parts come and go within the limit, whoever reads, writes, wishes or waits."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.guard import Guard
from moe_autograd.autograd.offload.holders import Holders
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import FolderStore
from moe_autograd.autograd.offload.to_write import ToWrite
from tests.support.stores import WatchedStore, part_of, put_all_out

CPU = torch.device("cpu")


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def residency(store: WatchedStore) -> Iterator[Residency]:
    residency = Residency(300, store, CPU)
    yield residency
    store.gate.set()
    residency.close()


def test_the_least_recently_used_leaves_first_and_unchanged_ones_are_not_written(
    residency: Residency, store: WatchedStore
) -> None:
    a, b, c, d = (part_of(residency, name) for name in ("a", "bb", "ccc", "dddd"))
    with residency.hold([b]):
        pass
    store.events.clear()
    with residency.hold([a]):
        assert c.buffer is None, "used before b and d"
        assert a.buffer is not None
        assert torch.equal(a.buffer, torch.full((100,), 1, dtype=torch.uint8))
        assert b.buffer is not None
        assert d.buffer is not None
    assert store.events == ["read a"]


def test_what_was_changed_is_written_before_it_leaves(residency: Residency, store: WatchedStore) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    with residency.hold([a]):
        assert a.buffer is not None
        a.buffer.fill_(9)
        residency.changed(a)
    with residency.hold([b]):
        assert a.buffer is None
    with residency.hold([a]):
        assert a.buffer is not None
        assert torch.equal(a.buffer, torch.full((200,), 9, dtype=torch.uint8))


def test_who_needs_more_than_the_limit_is_told_at_once(residency: Residency) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    with (
        pytest.raises(
            ValueError, match=r"expected max_resident_bytes of at least 400, .*a: 200, bb: 200.*, got 300"
        ),
        residency.hold([a, b]),
    ):
        pass


def test_threads_that_all_hold_and_wait_are_told_instead_of_waiting_forever(residency: Residency) -> None:
    parts = [part_of(residency, "x" * n, 100) for n in range(1, 6)]
    barrier, outcomes = threading.Barrier(2), []

    def work(mine: Part, more: list[Part]) -> None:
        try:
            with residency.hold([mine]):
                barrier.wait()
                with residency.hold(more):
                    outcomes.append("got it")
        except RuntimeError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=work, args=(parts[i], parts[2:4])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "got it" in outcomes, "once the other has let go"
    (told,) = [outcome for outcome in outcomes if outcome != "got it"]
    assert "expected 200 more bytes" in told
    assert "held by calls that all wait for more" in told


def test_who_was_told_of_room_and_has_not_looked_yet_does_not_count_as_waiting(
    residency: Residency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds something, and is late to wake. Whoever then asks for more than there is waits for it."""
    a, b, c, d = (
        part_of(residency, "x" * n, num_bytes) for n, num_bytes in ((1, 100), (2, 200), (3, 200), (4, 300))
    )
    waits, may_look, lock, wait = threading.Event(), threading.Event(), residency._lock, residency._lock.wait

    def wait_and_be_late(timeout_s: float) -> bool:
        if threading.current_thread() is not late:
            may_look.set()
            return wait(timeout_s)
        waits.set()
        wait(timeout_s)
        lock.__exit__()
        may_look.wait(timeout=60)
        lock.__enter__()
        return True

    def hold_more() -> None:
        with residency.hold([a]), residency.hold([b]):
            outcomes.append("got it")

    outcomes: list[str] = []
    monkeypatch.setattr(lock, "wait", wait_and_be_late)
    late = threading.Thread(target=hold_more)
    with residency.hold([c]):
        late.start()
        assert waits.wait(timeout=60)
    try:
        with residency.hold([d]):
            assert outcomes == ["got it"]
    finally:
        may_look.set()
        late.join()


def test_news_between_a_wait_that_is_over_in_vain_and_the_lock_are_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = Guard()
    take_again = guard._condition._acquire_restore  # type: ignore[attr-defined]

    def tell() -> None:
        with guard:
            guard.notify_all()

    def be_late(*args: Any) -> None:
        teller = threading.Thread(target=tell)
        teller.start()
        teller.join()
        take_again(*args)

    monkeypatch.setattr(guard._condition, "_acquire_restore", be_late)
    with guard:
        assert guard.wait(0)


def test_who_waits_for_the_room_of_a_part_that_is_being_read_gets_it(
    residency: Residency, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = part_of(residency, "a", 100), part_of(residency, "bb", 200), part_of(residency, "ccc", 200)
    put_all_out(residency)
    begun, read, wait = threading.Event(), store.read, residency._lock.wait
    monkeypatch.setattr(store, "read", lambda name, flat: (begun.set(), read(name, flat)))
    with residency.hold([a]):
        store.gate.clear()
        begun.clear()
        residency.prefetch([c])
        assert begun.wait(timeout=60)
        monkeypatch.setattr(residency._lock, "wait", lambda *args: (store.gate.set(), wait(*args)))
        with residency.hold([b]):
            assert c.buffer is None


def test_a_wish_is_read_ahead_and_not_read_again(residency: Residency, store: WatchedStore) -> None:
    a = part_of(residency, "a", 200)
    part_of(residency, "bb", 200)
    store.events.clear()
    residency.prefetch([a])
    store.wait_for("read a")
    with residency.hold([a]):
        pass
    assert store.events == ["read a"]


def test_a_wish_takes_nothing_from_an_earlier_one(residency: Residency, store: WatchedStore) -> None:
    parts = [part_of(residency, "x" * n) for n in range(1, 6)]
    put_all_out(residency)
    store.events.clear()
    residency.prefetch(parts)
    store.wait_for("read xxx")
    with residency.hold([parts[0]]):  # asks for nothing new: the first three stay
        assert [part.buffer is not None for part in parts] == [True, True, True, False, False]
    store.wait_for("read xxxx")  # letting go of the first made room for the fourth
    assert parts[0].buffer is None
    residency.forget_wishes()


def test_who_needs_a_part_goes_before_wishes(residency: Residency, store: WatchedStore) -> None:
    parts = [part_of(residency, "x" * n) for n in range(1, 6)]
    put_all_out(residency)
    residency.prefetch(parts[:3])
    store.wait_for("read xxx")
    with residency.hold(parts[3:]):
        assert sum(part.buffer is not None for part in parts) == 3


def test_reading_and_writing_happen_while_others_compute(residency: Residency, store: WatchedStore) -> None:
    a, b, c = part_of(residency, "a"), part_of(residency, "bb"), part_of(residency, "ccc")
    part_of(residency, "dddd")
    store.events.clear()
    with residency.hold([b]):  # this body runs though the store answers nobody
        store.gate.clear()
        with residency.hold([c]):
            residency.changed(c)
        residency.prefetch([a])
        assert store.events == []
        store.gate.set()
        store.wait_for("write ccc")
        store.wait_for("read a")


def test_a_part_may_be_held_while_it_is_written_and_what_is_changed_then_is_written_again(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    with residency.hold([a]):
        residency.changed(a)
        store.events.clear()
        store.gate.clear()
    assert a.is_writing or a.is_changed  # and the store answers nobody
    with residency.hold([a]):
        assert a.buffer is not None
        a.buffer.fill_(9)
        residency.changed(a)
        store.gate.set()
    with residency.hold([b]):
        assert a.buffer is None
    assert store.events[-2:] == ["write a", "read bb"]
    with residency.hold([a]):
        assert a.buffer is not None
        assert torch.equal(a.buffer, torch.full((200,), 9, dtype=torch.uint8))


def test_what_is_needed_again_before_its_turn_comes_is_written_once(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a"), part_of(residency, "bb")
    part_of(residency, "ccc")
    part_of(residency, "dddd")
    with residency.hold([a, b]):
        residency.changed(a)  # keeps the writer busy, or waits before b
        store.events.clear()
        store.gate.clear()
    for _ in range(3):
        with residency.hold([b]):
            residency.changed(b)
    with residency.hold([b]):
        store.gate.set()
        store.wait_for("write a")
    residency.flush()
    assert store.events.count("write bb") == 1


def test_bytes_that_mean_nothing_any_more_are_not_written(residency: Residency, store: WatchedStore) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    store.events.clear()
    with residency.hold([a]):
        residency.changed(a)
        residency.void(a)
    with residency.hold([b]):
        assert a.buffer is None
    with residency.hold([a]):
        pass
    assert store.events == ["read a", "read bb"]


@pytest.mark.stress
def test_many_threads_never_exceed_the_limit_and_never_see_torn_bytes(tmp_path: Path) -> None:
    residency = Residency(1000, FolderStore(tmp_path), CPU)
    parts = [
        residency.add(Part(str(i), Layout.of({"x": torch.empty(100 + 8 * (i % 3), dtype=torch.uint8)})))
        for i in range(20)
    ]
    values = [0] * 20
    locks = [threading.Lock() for _ in range(20)]
    failures: list[Any] = []

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(300):
            chosen = sorted(choice.sample(range(20), choice.randint(1, 3)))
            residency.prefetch([parts[choice.randrange(20)]])
            for i in chosen:
                locks[i].acquire()
            with residency.hold([parts[i] for i in chosen]):
                for i in chosen:
                    buffer = parts[i].buffer
                    if values[i] and not bool((buffer == values[i] % 251).all()):
                        failures.append((i, values[i]))
                    values[i] += 1
                    buffer.fill_(values[i] % 251)
                    residency.changed(parts[i])
            for i in chosen:
                locks[i].release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert residency.peak_bytes <= 1000
    residency.close()


# ---- what is written next


def changed_part(name: str, *, num_holders: int = 0) -> Part:
    part = Part(name, Layout.of({"x": torch.empty(1)}))
    part.buffer, part.is_changed, part.num_holders = torch.empty(4, dtype=torch.uint8), True, num_holders
    return part


def test_who_is_waited_for_is_written_first_and_who_is_held_waits_unless_all_are_to_be_written() -> None:
    first, second, held = changed_part("first"), changed_part("second"), changed_part("held", num_holders=1)
    to_write = ToWrite()
    to_write.add(held)
    to_write.add(second)
    to_write.add_first(first)
    assert [to_write.take_next() for _ in range(3)] == [first, second, None]
    assert not to_write.has_next
    to_write.add_though_held(held)
    assert to_write.has_some_though_held
    assert to_write.take_next() is held
    assert (held.is_writing, held.is_changed) == (True, False)


def test_what_is_no_longer_changed_is_not_written() -> None:
    part, to_write = changed_part("x"), ToWrite()
    to_write.add(part)
    part.is_changed = False
    assert to_write.take_next() is None


# ---- who waits for whom


def test_all_wait_when_whoever_holds_something_waits_as_often_as_it_holds() -> None:
    holders = Holders()
    with holders.waiting(7):
        assert not holders.all_wait(7), "nobody holds anything"
        holders.begin()
        holders.begin()
        assert holders.all_wait(7)
        assert not holders.all_wait(8), "it looks again"
        other = threading.Thread(target=holders.begin)
        other.start()
        other.join()
        assert not holders.all_wait(7), "the other may let go"
        holders.end()
    assert not holders.all_wait(7)


def test_a_thread_waits_with_the_one_that_stands_for_it() -> None:
    holders = Holders()
    holders.begin()
    waits, may_end = threading.Event(), threading.Event()

    def wait(of: int) -> None:
        with holders.standing_for(of), holders.waiting(7):
            waits.set()
            assert may_end.wait(60)

    other = threading.Thread(target=wait, args=(threading.get_ident(),))
    other.start()
    assert waits.wait(60)
    assert holders.all_wait(7)
    assert not holders.all_wait(8), "it looks again"
    may_end.set()
    other.join()
    assert not holders.all_wait(7)


def test_a_wait_within_another_ends_alone() -> None:
    holders = Holders()
    holders.begin()
    with holders.waiting(7):
        with holders.waiting(8):
            assert holders.all_wait(8)
        assert holders.all_wait(7)
    assert not holders.all_wait(7)
