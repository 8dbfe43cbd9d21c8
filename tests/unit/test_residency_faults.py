"""Parts when something goes wrong: no memory, no thread, a part that cannot be attached, a close or the collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import RamStore
from tests.support.scarce import no_thread_to_give
from tests.support.stores import WatchedStore, put_all_out
from tests.support.subprocesses import assert_prints

PATIENCE_S = 60
TOO_MUCH = 1 << 60


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def residency(store: WatchedStore) -> Iterator[Residency]:
    residency = Residency(2 * TOO_MUCH, store, torch.device("cpu"))
    yield residency
    store.gate.set()
    residency.close()


def part_of(residency: Residency, name: str) -> Part:
    return residency.add(Part(name, Layout.of({"x": torch.empty(100, dtype=torch.uint8)})))


def run(function: object) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def assert_can_be_held(residency: Residency, part: Part) -> None:
    held = threading.Event()

    def hold() -> None:
        with residency.hold([part]):
            held.set()

    run(hold).join(PATIENCE_S)
    assert held.is_set(), "it waits forever"


def test_memory_that_the_system_does_not_give_is_told_and_nothing_is_left_half_taken(
    residency: Residency,
) -> None:
    a, huge = part_of(residency, "a"), residency.add(Part("huge", Layout({}, TOO_MUCH)))
    with pytest.raises(RuntimeError, match="alloc"), residency.hold([a, huge]):
        pass
    assert (a.buffer, a.is_busy, a.num_holders, huge.is_busy) == (None, False, 0, False)
    assert residency.resident_bytes <= 100
    assert_can_be_held(residency, a)


def test_a_wish_that_the_system_has_no_memory_for_does_not_stop_the_others(
    residency: Residency, store: WatchedStore
) -> None:
    a, huge = part_of(residency, "a"), residency.add(Part("huge", Layout({}, TOO_MUCH)))
    with residency.hold([a]):
        residency.changed(a)
    residency.flush()
    residency.adopt(a, lambda name: None)  # which the store has
    residency.prefetch([huge])
    residency.prefetch([a])
    store.wait_for("read a")
    assert_can_be_held(residency, a)


def test_parts_are_written_and_read_ahead_while_the_system_has_no_thread_to_give(store: WatchedStore) -> None:
    """Whoever came next waited for ever for a write that nobody had begun."""
    residency = Residency(150, store, torch.device("cpu"))
    part = part_of(residency, "a")
    with no_thread_to_give():
        with residency.hold([part]):
            residency.changed(part)
        residency.flush()
        put_all_out(residency)
        residency.prefetch([part])
        store.wait_for("read a")
    assert store.events == ["write a", "read a"]
    residency.close()


@pytest.mark.usefixtures("no_gc")
def test_experts_that_the_system_has_no_thread_for_leave_nothing(tmp_path: Path) -> None:
    def build() -> OffloadedExperts:
        return OffloadedExperts([nn.Linear(4, 4)], max_resident_bytes=1000, store=tmp_path)

    with no_thread_to_give(), pytest.raises(RuntimeError, match="thread"):
        build()
    build().close()  # the folder is free


def test_a_checkpoint_as_the_interpreter_exits_is_saved(tmp_path: Path) -> None:
    """It had been refused, as executors have no threads then."""
    assert_prints(
        f"""
        import atexit
        import torch
        from torch import nn
        from moe_autograd.autograd.offload import OffloadedExperts

        sgd = torch.optim.SGD
        experts = OffloadedExperts([nn.Linear(4, 4)], sgd, max_resident_bytes=1000, store={str(tmp_path)!r})

        def save_twice():
            for _ in range(2):
                experts[0](torch.ones(4)).sum().backward()
                experts.step()
                before = experts.state_dict(0)
                experts.checkpoint()
                experts.restore()
                print(all(torch.equal(value, before[name]) for name, value in experts.state_dict(0).items()))
            experts.close()

        atexit.register(save_twice)
        """,
        "True True",
    )


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_training_goes_on_in_a_thread_once_the_main_thread_is_through(update: str) -> None:
    """It had failed in the midst, as executors take nothing from then on."""
    assert_prints(
        f"""
        import copy, threading
        import torch
        from torch import nn
        from moe_autograd import parallel_apply
        from moe_autograd.autograd.offload import OffloadedExperts

        plain = [nn.Linear(8, 8) for _ in range(6)]
        sgd = torch.optim.SGD
        experts = OffloadedExperts(copy.deepcopy(plain), sgd, max_resident_bytes=1500, update={update!r})
        optimizers = [sgd(module.parameters()) for module in plain]

        def train():
            threading.main_thread().join()
            for _ in range(5):
                for modules in (experts, plain):
                    sum(parallel_apply(modules, [(torch.ones(2, 8),)] * 6)).sum().backward()
                for one in (experts, *optimizers):
                    one.step()
                    one.zero_grad()
            for i, module in enumerate(plain):
                torch.testing.assert_close(experts.state_dict(i), dict(module.state_dict()))
            print("trained")

        threading.Thread(target=train).start()
        """,
        "trained",
    )


def test_who_waits_for_a_write_that_finds_no_memory_to_begin_is_told(
    residency: Residency, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(residency, "a")
    with residency.hold([part]):
        residency.changed(part)

    def take_next() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(residency._transfers.to_write, "take_next", take_next)
        with pytest.raises(OSError, match="MemoryError"):
            residency.flush()
    residency.flush()
    assert store.events == ["write a"]


def test_wishes_are_granted_though_one_before_them_found_no_memory(
    residency: Residency, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, tried = part_of(residency, "a"), threading.Event()
    residency.adopt(part, lambda name: None)  # which the store has
    store.write("a", part.layout, torch.empty(100, dtype=torch.uint8))

    def make_room(*args: object, **kwargs: object) -> bool:
        tried.set()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(residency._transfers, "make_room", make_room)
        residency.prefetch([part])
        assert tried.wait(PATIENCE_S)
        with residency._lock:
            while residency._transfers._reader.is_moving:
                assert residency._lock.wait(PATIENCE_S)
    residency.prefetch([part])
    store.wait_for("read a")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_part_that_cannot_be_attached_is_told_and_is_absent_again(
    residency: Residency, ahead: bool
) -> None:
    def attach(_: Tensor) -> None:
        raise ValueError("no place for it")

    part = residency.add(Part("a", Layout.of({"x": torch.empty(4)}), attach))
    if ahead:
        residency.prefetch([part])
    for _ in range(2):
        with pytest.raises(ValueError, match="no place for it"), residency.hold([part]):
            pass
    assert (part.buffer, part.num_holders) == (None, 0)


def test_who_waits_for_room_while_somebody_closes_is_told(store: WatchedStore) -> None:
    residency = Residency(150, store, torch.device("cpu"))
    a, b = part_of(residency, "a"), part_of(residency, "bb")
    told: list[str] = []
    waits = threading.Event()

    def hold() -> None:
        waits.set()
        try:
            with residency.hold([b]):
                pass
        except RuntimeError as error:
            told.append(str(error))

    with residency.hold([a]):
        residency.changed(a)
        waiting = run(hold)
        assert waits.wait(PATIENCE_S)
        residency.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive(), "it waits forever"
    assert told == ["OffloadedExperts: expected open experts, got closed ones. Build new ones."]


class Collecting(RamStore):
    """Has the garbage collected while it writes activations, as may happen on any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.may_collect = threading.Event()

    def write(self, name: str, layout: Layout, flat: Tensor) -> None:
        super().write(name, layout, flat)
        if name.startswith("activations"):
            assert self.may_collect.wait(PATIENCE_S)
            gc.collect()


@pytest.mark.usefixtures("no_gc")
def test_a_graph_that_is_collected_by_the_thread_that_writes_its_activations() -> None:
    store = Collecting()
    experts = OffloadedExperts(
        [nn.Linear(8, 8) for _ in range(4)], max_resident_bytes=1500, num_microbatches=1, store=store
    )
    known = experts.residency.known_bytes
    cycle: list[object] = [experts[0](torch.ones(20, 8, requires_grad=True))]
    cycle.append(cycle)
    del cycle
    store.may_collect.set()
    flushing = run(experts.residency.flush)
    flushing.join(PATIENCE_S)
    assert not flushing.is_alive(), "the writer waits for itself"
    gc.collect()
    assert experts.residency.known_bytes == known
    experts.close()
