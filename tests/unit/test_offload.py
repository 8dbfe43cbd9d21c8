"""The parts of offloading: layouts, stores, residency, what is kept and for how long."""

from __future__ import annotations

import gc
import platform
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from experts_server.offloading import OffloadMemory
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import FolderStore, RamStore
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import CheckpointError, ConfigError

CPU = torch.device("cpu")


class WatchedStore(RamStore):
    """Writes down what is read and written; can be told to block, or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing = ""
        self.happened = threading.Condition()

    def _happen(self, event: str) -> None:
        self.gate.wait()
        if self.failing and self.failing in event:
            raise OSError(28, "No space left on device")
        with self.happened:
            self.events.append(event)
            self.happened.notify_all()

    def write(self, name: str, layout: Layout, flat: Tensor) -> None:
        self._happen(f"write {name}")
        super().write(name, layout, flat)

    def read(self, name: str, flat: Tensor) -> None:
        super().read(name, flat)
        self._happen(f"read {name}")

    def wait_for(self, event: str) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: event in self.events, timeout=60)


def part_of(residency: Residency, name: str, num_bytes: int = 100) -> Part:
    part = residency.add(Part(name, Layout.of({"x": torch.empty(num_bytes, dtype=torch.uint8)})))
    with residency.hold([part]):
        assert part.buffer is not None
        part.buffer.fill_(len(name))
        residency.changed(part)
    residency.flush()
    return part


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def residency(store: WatchedStore) -> Iterator[Residency]:
    residency = Residency(300, store, CPU)
    yield residency
    store.gate.set()
    residency.close()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# layouts and files

MIXED = {
    "weight": torch.randn(4, 16),
    "half": torch.randn(3).to(torch.bfloat16),
    "step": torch.tensor(7.0),
    "mask": torch.tensor([True, False, True]),
    "wide": torch.randn(5, dtype=torch.complex64),
    "none": torch.empty(0, 3),
    "count": torch.tensor(5),
}


def test_views_give_back_what_was_laid_out() -> None:
    layout = Layout.of(MIXED)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(MIXED[name])
    for name, view in layout.views(flat).items():
        assert view.dtype == MIXED[name].dtype
        assert torch.equal(view, MIXED[name])


def test_files_are_safetensors_and_any_reader_finds_the_tensors(tmp_path: Path) -> None:
    layout = Layout.of(MIXED)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(MIXED[name])
    store = FolderStore(tmp_path)
    store.write("expert", layout, flat)
    loaded = safetensors.torch.load_file(store.path("expert"))
    assert loaded.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert torch.equal(loaded[name], tensor)
    assert Layout.read(store.path("expert"))[0] == layout
    back = torch.empty_like(flat)
    store.read("expert", back)
    assert torch.equal(back, flat)


def test_a_dtype_that_safetensors_has_not_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"expected a dtype of safetensors, got torch\.complex128 \(name='w'\)"
    ):
        Layout.of({"w": torch.empty(1, dtype=torch.complex128)})


@pytest.mark.parametrize("damage", ["cut", "grown", "no header", "lying header", "missing"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    store, layout = FolderStore(tmp_path), Layout.of({"x": torch.ones(100)})
    store.write("x", layout, torch.zeros(400, dtype=torch.uint8))
    path = store.path("x")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut": content[:-1],
                "grown": content + b"x",
                "no header": b"\xff" * 64,
                "lying header": (2**62).to_bytes(8, "little") + content[8:],
            }[damage]
        )
    with pytest.raises(CheckpointError, match=r"x: expected"):
        Layout.read(path)


def test_a_file_that_belongs_to_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    store, layout = FolderStore(tmp_path / "store"), Layout.of({"x": torch.ones(3)})
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    (tmp_path / "saved").hardlink_to(store.path("x"))
    store.write("x", layout, torch.ones(12, dtype=torch.uint8))
    assert not (tmp_path / "saved").read_bytes().endswith(b"\1" * 12)
    assert store.path("x").read_bytes().endswith(b"\1" * 12)
    inode = store.path("x").stat().st_ino
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    assert store.path("x").stat().st_ino == inode, "its own file it writes over"


def test_a_file_cut_short_raises_instead_of_giving_old_bytes(tmp_path: Path) -> None:
    store, layout = FolderStore(tmp_path), Layout.of({"x": torch.ones(3)})
    store.write("x", layout, torch.zeros(12, dtype=torch.uint8))
    store.path("x").write_bytes(b"")
    with pytest.raises(OSError, match=r"expected|Invalid argument"):
        store.read("x", torch.empty(12, dtype=torch.uint8))


# residency


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
    residency.drop_all()
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
    residency.drop_all()
    residency.prefetch(parts[:3])
    store.wait_for("read xxx")
    with residency.hold(parts[3:]):
        assert sum(part.buffer is not None for part in parts) == 3


def test_a_write_that_fails_in_the_background_is_raised_where_somebody_waits(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    store.failing = "write"
    with residency.hold([a]):
        residency.changed(a)
    with pytest.raises(OSError, match="No space left on device"), residency.hold([b]):
        pass
    store.failing = ""
    with residency.hold([b]):
        assert a.buffer is None


def test_a_read_that_fails_raises_and_leaves_nobody_holding(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a", 100), part_of(residency, "bb", 100)
    residency.drop_all()
    store.failing = "read a"
    with pytest.raises(OSError, match="No space left"), residency.hold([a, b]):
        pass
    store.failing = ""
    assert (a.num_holders, b.num_holders, a.is_busy, b.is_busy) == (0, 0, False, False)
    with residency.hold([a, b]):
        assert a.buffer is not None
        assert torch.equal(a.buffer, torch.full((100,), 1, dtype=torch.uint8))


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


def test_with_updates_in_the_backward_gradients_never_go_to_the_store() -> None:
    store = WatchedStore()
    experts = OffloadedExperts(
        (nn.Linear(8, 8, bias=False) for _ in range(6)),
        sgd,
        max_resident_bytes=3 * 256,
        store=store,
        update="on_backward",
    )
    with experts:
        for _ in range(2):
            sum(parallel_apply(list(experts), [(torch.ones(1, 8),)] * 6)).sum().backward()
    assert not any("gradients" in event for event in store.events)
    assert "write expert-00003.weights" in store.events


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


def test_close_ends_the_threads() -> None:
    others = set(threading.enumerate())
    experts = OffloadedExperts((nn.Linear(8, 8) for _ in range(4)), sgd, max_resident_bytes=700)
    with experts:
        sum(expert(torch.ones(1, 8)) for expert in experts).sum().backward()
        experts.step()
        experts.residency.flush()
        mine = set(threading.enumerate()) - others
        assert mine
    assert not any(thread.is_alive() for thread in mine)


# experts


def test_experts_have_no_parameters_and_a_generator_is_taken_one_by_one() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make() -> nn.Module:
        assert sum(one() is not None for one in alive) == 0, (
            "the weights of those before are gone from the modules"
        )
        linear = nn.Linear(8, 8, bias=False)
        alive.append(weakref.ref(linear.weight.data.untyped_storage()))
        return linear

    experts = OffloadedExperts((make() for _ in range(10)), sgd, max_resident_bytes=600)
    assert len(experts) == 10
    assert list(experts[3].parameters()) == []
    assert "expert-00003, 256 bytes of weights" in repr(experts[3])
    assert experts.resident_bytes <= 600


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="expected at least one expert, got none"):
        OffloadedExperts([], sgd, max_resident_bytes=100)
    with pytest.raises(
        ValueError, match="expected max_resident_bytes or beside, got max_resident_bytes=None"
    ):
        OffloadedExperts([nn.Linear(2, 2)], sgd)
    with pytest.raises(ValueError, match="expected num_microbatches of at least 1 or None, got 0"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=100, num_microbatches=0)
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 512.*, got 300"):
        OffloadedExperts([nn.Linear(8, 8, bias=False)], sgd, max_resident_bytes=300)
    with pytest.raises(ValueError, match="expected update='on_step' or 'on_backward', got 'later'"):
        OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=100, update="later")  # type: ignore[arg-type]


def test_a_folder_belongs_to_one_until_he_closes_or_goes(tmp_path: Path) -> None:
    def build() -> OffloadedExperts:
        return OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000, store=tmp_path)

    first = build()
    with pytest.raises(
        RuntimeError, match=r"resident-store: expected a folder that nobody uses, got one in use"
    ):
        build()
    with pytest.raises(ConfigError, match=r"offload\.store .* expected it to be free"):
        OffloadMemory(1000, tmp_path)
    first.close()
    second = build()
    with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
        first[0](torch.ones(1, 2))
    del second
    gc.collect()
    build().close()


def test_an_expert_without_parameters_is_called_and_not_trained() -> None:
    experts = OffloadedExperts([nn.Identity(), nn.Linear(2, 2)], sgd, max_resident_bytes=1000)
    x = torch.ones(1, 2, requires_grad=True)
    sum(expert(x) for expert in experts).sum().backward()  # type: ignore[union-attr]
    experts.step()
    assert len(experts.optimizers) == 1
    torch.testing.assert_close(x.grad, 1 + torch.ones(2) @ (experts.state_dict(1)["weight"] + 0.1)[None])


def test_hooks_that_would_never_run_are_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"got 1 on bias of expert-00000, whose gradients are not in .grad"):
        OffloadedExperts([module], sgd, max_resident_bytes=1000)


def test_optimizer_state_that_does_not_fit_is_told_at_the_first_step() -> None:
    experts = OffloadedExperts([nn.Linear(8, 8, bias=False)], torch.optim.Adam, max_resident_bytes=600)
    experts[0](torch.ones(1, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 1028, .* got 600"):
        experts.step()


def test_parallel_apply_calls_them_together() -> None:
    torch.manual_seed(0)
    experts = OffloadedExperts((nn.Linear(8, 8) for _ in range(6)), sgd, max_resident_bytes=2 * 288 + 100)
    x = torch.randn(4, 8, requires_grad=True)
    outputs = parallel_apply(list(experts), [(x * i,) for i in range(6)])
    torch.stack(outputs).sum().backward()
    assert x.grad is not None
    for i in range(6):
        gradient = experts.gradients(i)["weight"]
        assert gradient is not None
        torch.testing.assert_close(gradient, (x.detach() * i).sum(0).expand(8, 8))


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("ending", ["backward", "dropped"])
def test_activations_go_with_the_graph(num_microbatches: int | None, ending: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            alive.append(weakref.ref(h))
            return self.linear(h)

    experts = OffloadedExperts([Watched()], sgd, max_resident_bytes=5000, num_microbatches=num_microbatches)
    known = experts.residency.known_bytes
    y = experts[0](torch.ones(4, 8))
    if num_microbatches is None:
        assert alive[0]() is not None
    else:
        assert [one() for one in alive] == [None, None], "they moved into parts"
        assert experts.residency.known_bytes > known
    if ending == "backward":
        y.sum().backward()
    else:
        del y
    assert all(one() is None for one in alive)
    assert experts.residency.known_bytes == known


def test_never_more_than_one_micro_batch_of_activations_is_outside_of_the_limit() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            y = self.linear(x).exp().sin()
            alive.append(weakref.ref(y))
            most = max(most, sum(one() is not None for one in alive))
            return y

    experts = OffloadedExperts(
        (Watched() for _ in range(3)), sgd, max_resident_bytes=1500, num_microbatches=8, store=RamStore()
    )
    x = torch.randn(32, 8)
    y = experts.call_together(list(experts), [(x,)] * 3, [{}] * 3)
    assert experts.residency.known_bytes > 5 * 1500
    torch.stack(y).sum().backward()
    assert most == 1
    assert experts.residency.peak_bytes <= 1500


def call_by_map(experts: OffloadedExperts, x: Tensor, **options: Any) -> Tensor:
    return parallel_apply(list(experts), [(x,)], **options)[0]  # type: ignore[no-any-return]


def call_in_layer(experts: OffloadedExperts, x: Tensor, **options: Any) -> Tensor:
    return MixtureOfExperts(TopKRouter(8, 1, top_k=1), experts, **options)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("call", [call_by_map, call_in_layer])
def test_read_ahead_starts_with_the_backward_of_the_layer_above(
    call: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    """Layer 2's backward waits inside until layer 1's expert has been read, which it never would without."""
    store = WatchedStore()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda _: store.wait_for("read expert-00000.weights"))
            return y

    below = OffloadedExperts([nn.Linear(8, 8, bias=False)], sgd, max_resident_bytes=900, store=store)
    above = OffloadedExperts([Waiting()], sgd, beside=below)
    read_ahead(below, above)
    below.residency.flush()
    y = call(above, call(below, torch.ones(1, 8), **options), **options)
    below.residency.drop_all()  # as more layers above would have done
    store.events.clear()
    y.sum().backward()
    assert store.events.count("read expert-00000.weights") == 1


RETURNING = """
import re, sys, torch
from moe_autograd.autograd.offload import return_freed_memory_at_once

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

assert return_freed_memory_at_once()
for _ in range(2):  # the C library would put the second into its heap, having seen the first freed
    blocks = [torch.ones(1_000_000) for _ in range(20)]
    held = resident_kb()
    del blocks[:-1]  # the last would keep the others' heap
sys.exit(0 if held - resident_kb() > 60_000 else 3)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_returned_at_once_where_that_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RETURNING], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
