"""Modules that are changed by calls which do not run side by side anyway: as in a loop, and nobody complains."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import finish, leaves, seeded


class WithTeacher(nn.Module):
    """Two networks, of which one is an average of the other's past, as for `MoCo`."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher, self.last = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), last
        self.seen = nn.Module()
        self.seen.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.count += 1
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
            target = self.teacher(x)
        return self.last(self.student(x) * target)


class Says(WithTeacher):
    keeps_statistics = True


class MadeInItsFirstCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.made = nn.Linear(4, 4), nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.made.append(nn.Linear(4, 4, bias=False, dtype=x.dtype))
            nn.init.constant_(self.made[0].weight, 0.5)
        return self.made[0](self.before(x))


@pytest.mark.parametrize("make", [lambda: Says(nn.Identity()), lambda: WithTeacher(nn.BatchNorm1d(4))])
@pytest.mark.parametrize("recompute", [False, True])
def test_calls_that_take_turns_for_one_module_may_change_others_that_they_share(
    make: Any, recompute: bool
) -> None:
    def program(apply: MapFunction) -> Any:
        xs, (module,) = leaves(3), seeded(make, 1)
        options = {"recompute": recompute} if apply is parallel_apply else {}
        outputs = apply([module] * 3, [(x,) for x in xs], **options)
        return finish(outputs, *xs, *module.student.parameters()), module.teacher.weight, module.seen.count

    assert_same_without_error(program)


def test_a_module_that_others_share_as_well_is_watched() -> None:
    """Two of three calls take turns with each other, and the third runs beside them."""
    shared, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()

    def change(x: Tensor) -> Tensor:
        with torch.no_grad():
            shared.weight.add_(1)
        return norm(shared(x))

    with pytest.raises(RuntimeError, match=r"shares with others \(Linear\)"):
        parallel_apply([change, change, lambda x: shared(x)], leaves(3))


def test_calls_under_a_mode_of_torch_may_change_what_they_share() -> None:
    def program(apply: MapFunction) -> Any:
        xs, (module,) = leaves(3), seeded(MadeInItsFirstCall, 1)
        with FlopCounterMode(display=False):
            outputs = apply([module] * 3, [(x,) for x in xs])
        return finish(outputs, *xs, *module.parameters())

    assert_same_without_error(program)


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        self.asked = list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_and_parameters_that_cannot_be_asked_see_nothing_of_a_look() -> None:
    module = nn.Linear(4, 4).double()
    module.later = nn.UninitializedParameter()
    with Counts() as mode:
        parallel_apply([lambda x: module(x)] * 3, leaves(3))
    assert "is_inference" not in mode.asked


@pytest.mark.usefixtures("no_gc")
def test_a_backward_that_ran_its_forwards_again_leaves_no_module_alive() -> None:
    module, xs = nn.Linear(4, 4).double(), leaves(3)
    alive = weakref.ref(module)
    outputs = parallel_apply([module] * 3, [(x,) for x in xs], recompute=True)
    del module
    torch.stack(outputs).sum().backward()
    assert alive() is None


def test_calls_that_give_a_weight_other_memory_for_the_same_numbers_are_not_refused() -> None:
    """As one that casts a bias once, or flattens a `GRU`, in another file."""
    module, barrier, other_memory = nn.Linear(4, 4).double(), threading.Barrier(2), {}

    def call(x: Tensor) -> Tensor:
        other_memory[threading.get_ident()] = module.weight.data.clone()
        setattr(module.weight, "da" + "ta", other_memory[threading.get_ident()])
        barrier.wait(PATIENCE_S)
        return module(x)

    assert len(parallel_apply([call] * 2, leaves(2))) == 2
