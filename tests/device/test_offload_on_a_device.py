"""Experts that come and go, on a device, train as those that stay.

Kernels are held up, so that bytes which a transfer reads before an update has ended, or a buffer that is written over
while a kernel still reads it, show in the numbers.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.background import Mover
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.stores import RamStore
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, LONG_CYCLES, hold_up, needs_gpu
from tests.support.late_training import (
    NUM_EXPERTS,
    NUM_STEPS,
    SHORT_CYCLES,
    Expert,
    a_batch,
    adam,
    bytes_of,
    modules_of,
    momentum,
    side_stream,
    train,
    train_plain,
)

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "on step": {},
    "on backward": {"update": "on_backward"},
    "in slices": {"num_microbatches": 2},
    "in slices, on backward": {"num_microbatches": 2, "update": "on_backward"},
}


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("store", ["ram", "folder"])
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_offloaded_experts_with_little_room_train_as_plain_ones(
    make: Callable[..., Any], options: str, store: str, on_side_stream: bool, tmp_path: Path
) -> None:
    plain = modules_of(Expert)
    expected = train_plain([plain], make)
    place: Any = tmp_path if store == "folder" else store
    room = 5 * bytes_of(plain[0])
    with (
        side_stream(on_side_stream),
        OffloadedExperts(plain, make, max_resident_bytes=room, store=place, **OPTIONS[options]) as experts,
    ):
        got = train([experts], [] if "update" in OPTIONS[options] else [experts], one_after_another)
        assert experts.residency.peak_bytes <= room
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("store", ["ram", "folder"])
def test_layers_that_read_each_other_ahead_draw_and_train_as_maps_of_plain_ones(
    recompute: bool, update: Any, store: str, tmp_path: Path
) -> None:
    plain = [modules_of(functools.partial(Expert, 0.3)) for _ in range(3)]
    apply = functools.partial(parallel_apply, recompute=recompute)
    expected = train_plain(plain, adam, apply)
    place: Any = tmp_path if store == "folder" else store
    room = 9 * bytes_of(plain[0][0])
    first = OffloadedExperts(plain[0], adam, max_resident_bytes=room, store=place, update=update)
    with first:
        rest = [OffloadedExperts(own, adam, beside=first, update=update) for own in plain[1:]]
        layers = [first, *rest]
        read_ahead(*layers)
        got = train(layers, layers if update == "on_step" else [], apply)
    torch.testing.assert_close(got, expected)


def test_gradients_that_calls_on_several_streams_gather_for_one_expert_are_all_counted() -> None:
    """The calls' kernels end in another order than the host has queued them in."""
    (plain,) = modules_of(Expert, 1)
    x, num_calls = a_batch(), 12

    def calls_of(expert: Any) -> list[Callable[[Tensor], Tensor]]:
        def call(x: Tensor, *, cycles: int) -> Tensor:
            def hold_up_grad(grad: Tensor) -> Tensor:
                hold_up(cycles)
                return grad * 1

            y: Tensor = expert(x)
            y.register_hook(hold_up_grad)
            return y

        return [functools.partial(call, cycles=1 + i % 3 * SHORT_CYCLES) for i in range(num_calls)]

    torch.stack(
        one_after_another(calls_of(copied := copy.deepcopy(plain)), [(x,)] * num_calls)
    ).sum().backward()
    expected = {
        name: parameter.grad.cpu()
        for name, parameter in copied.named_parameters()
        if parameter.grad is not None
    }
    for _ in range(3):
        with OffloadedExperts(
            [copy.deepcopy(plain)], adam, max_resident_bytes=5 * bytes_of(plain)
        ) as experts:
            torch.stack(parallel_apply(calls_of(experts[0]), [(x,)] * num_calls)).sum().backward()
            torch.testing.assert_close(experts.gradients(0), expected)


@pytest.mark.parametrize("make", [adam, momentum])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    plain = modules_of(Expert)
    room = 5 * bytes_of(plain[0])
    expected = train_plain([plain], make, num_steps=2 * NUM_STEPS)
    with OffloadedExperts(copy.deepcopy(plain), make, max_resident_bytes=room, store=tmp_path) as experts:
        train([experts], [experts], one_after_another)
        experts.checkpoint("half")
        train([experts], [experts], one_after_another, 1)
    others = [module.cpu() for module in modules_of(Expert)]
    with OffloadedExperts(others, make, max_resident_bytes=room, store=tmp_path, device=DEVICE) as experts:
        assert experts.restore() == "half"
        got = train([experts], [experts], one_after_another)
    torch.testing.assert_close(got[:-2], expected[2 * NUM_STEPS : -2])


def test_copies_of_weights_and_gradients_come_after_the_kernels_that_make_them() -> None:
    (plain,) = modules_of(Expert, 1)
    with OffloadedExperts(
        [copy.deepcopy(plain)], momentum, max_resident_bytes=5 * bytes_of(plain)
    ) as experts:
        optimizer = momentum(plain.parameters())
        for _ in range(2):
            for module in (experts[0], plain):
                module(a_batch()).sum().backward()
            grads = {name: p.grad.cpu() for name, p in plain.named_parameters() if p.grad is not None}
            torch.testing.assert_close(experts.gradients(0), grads)
            for one in (experts, optimizer):
                one.step()
                one.zero_grad()
            weights = {name: value.cpu() for name, value in plain.state_dict().items()}
            torch.testing.assert_close(experts.state_dict(0), weights)


@needs_gpu
def test_the_rest_of_a_gpus_experts_waits_in_pinned_memory() -> None:
    plain = modules_of(Expert)
    with OffloadedExperts(plain, adam, max_resident_bytes=5 * bytes_of(plain[0])) as experts:
        train([experts], [experts], one_after_another, 1)
        assert isinstance(experts.residency.store, RamStore)
        kept = experts.residency.store._kept
        assert len(kept) >= NUM_EXPERTS
        assert all(one.is_pinned() for one in kept.values())


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1 << 20))

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean() * self.weight).sum().view(1)


@needs_gpu
def test_experts_that_come_and_go_take_no_more_of_a_gpu_than_their_limit() -> None:
    gc.collect()  # experts and those that own them know each other
    before, room = torch.cuda.memory_allocated(), 5 * (4 << 20)
    with OffloadedExperts(
        (Scaling().to(DEVICE) for _ in range(16)), adam, max_resident_bytes=room
    ) as experts:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            sum(expert(torch.ones(4, device=DEVICE)) for expert in experts).sum().backward()
            assert torch.cuda.memory_allocated() - before <= room + (1 << 20)
            experts.step()
            assert torch.cuda.memory_allocated() - before <= room + (1 << 20)
            assert torch.cuda.max_memory_allocated() - before <= room + 8 * (4 << 20)
            experts.zero_grad()
    del experts
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_adam_finds_its_numbers_of_steps_on_the_host_as_in_torch() -> None:
    """Else it waits for a GPU, for each parameter anew."""
    places: list[str] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        places.extend(state["step"].device.type for state in optimizer.state.values())

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.Adam(parameters, lr=0.01)
        made.register_step_pre_hook(look)
        return made

    plain = modules_of(Expert)
    expected = train_plain([plain], make)
    assert places == ["cpu"] * len(places)
    num_places = len(places)
    with OffloadedExperts(plain, make, max_resident_bytes=5 * bytes_of(plain[0])) as experts:
        torch.testing.assert_close(train([experts], [experts], one_after_another), expected)
    assert places == ["cpu"] * 2 * num_places


@needs_gpu
def test_a_mover_waits_for_nobodys_kernels() -> None:
    parts = [Part("one", Layout({}, 0))]
    on_host, on_device = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, device=DEVICE)
    lock, copied = threading.Condition(), threading.Event()

    def move(_: Part) -> None:
        on_device.copy_(on_host)
        copied.set()

    mover = Mover("test-read", lock, lambda: parts.pop() if parts else None, move, on_device.device)
    torch.cuda.synchronize()
    hold_up(100 * LONG_CYCLES)
    kernels = torch.cuda.current_stream().record_event()
    with lock:
        mover.start()
    assert copied.wait(20.0)
    assert not kernels.query()
    mover.close()
    assert on_device.all()
