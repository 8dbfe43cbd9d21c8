"""Parts that a module has not registered, in attributes that its forward names, count as its parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.equivalence.test_statistics import ORDER, AveragesInSecret, Gate
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same_program,
    loss_of,
    one_after_another,
)
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import leaves, seeded

pytestmark = pytest.mark.usefixtures("nothing_is_small")


class Expert(nn.Module):
    """Holds anything, and calls a function of it with an input."""

    def __init__(self, held: Any = None, call: Callable[[Any, Tensor], Any] = lambda _, x: x * 1) -> None:
        super().__init__()
        object.__setattr__(self, "held", held)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.held, x)


class ByAMethod(Expert):
    """Names what it holds in a method that its forward calls, and in a property there."""

    @property
    def first(self) -> nn.Module:
        return cast(nn.Module, self.held[0])

    def normalize(self, x: Tensor) -> Any:
        return self.first(x)

    def forward(self, x: Tensor) -> Any:
        return self.normalize(x)


class First(nn.Module):
    """Calls a module once it is let in."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.module, self.gate = module, gate

    def forward(self, x: Tensor) -> Any:
        return self.module(self.gate.pass_first(x))


def as_attribute(norm: nn.Module) -> nn.Module:
    return Expert(norm, lambda held, x: held(x))


def in_a_list(norm: nn.Module) -> nn.Module:
    return Expert([norm], lambda held, x: held[0](x))


def in_a_list_in_a_dict(norm: nn.Module) -> nn.Module:
    return Expert({"norms": [norm]}, lambda held, x: held["norms"][0](x))


def in_a_list_that_a_method_names(norm: nn.Module) -> nn.Module:
    return ByAMethod([norm])


def in_a_part_that_is_so_itself(norm: nn.Module) -> nn.Module:
    return in_a_list(nn.Sequential(as_attribute(norm)))


WAYS = [as_attribute, in_a_list, in_a_list_in_a_dict, in_a_list_that_a_method_names]
WAYS += [in_a_part_that_is_so_itself]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("size", [4, 300])
def test_statistics_of_a_part_that_calls_share_unregistered_are_those_of_a_loop(
    way: Callable[[nn.Module], nn.Module], size: int
) -> None:
    def program(apply: MapFunction) -> Any:
        (norm,), xs, gate = seeded(lambda: nn.BatchNorm1d(size), 1), leaves(5, 3, size), Gate(apply)
        calls = [First(way(norm), gate), way(norm), norm, nn.Sequential(way(norm)), gate.open]
        outputs = apply(calls, [(x,) for x in xs])
        loss_of(outputs).backward()
        return outputs, [*norm.buffers()], [x.grad for x in [*xs, *norm.parameters()]]

    said = assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=ORDER
    )
    assert not isinstance(said, Raised)


def test_a_part_that_is_put_into_a_list_after_a_map_is_found_by_the_next() -> None:
    def program(apply: MapFunction) -> Any:
        (norm,), xs = seeded(lambda: nn.BatchNorm1d(4), 1), leaves(3)
        experts = [Expert([], lambda held, x: held[0](x) if held else x * 1) for _ in range(2)]
        found = list[Any]()
        for is_there in (False, True):
            for expert in experts if is_there else ():
                expert.held.append(norm)
            gate = Gate(apply)
            found += apply([First(experts[0], gate), experts[1], gate.open], [(x,) for x in xs])
        return found, [*norm.buffers()]

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=ORDER)


def test_a_buffer_of_a_part_that_calls_share_unregistered_is_watched() -> None:
    shared = AveragesInSecret()
    with pytest.raises(RuntimeError, match=r"share a AveragesInSecret .* 'mean' changed"):
        parallel_apply([in_a_list(shared), in_a_list(shared)], [(x,) for x in leaves(2)])


class Waits(nn.Module):
    """Waits for all others of its kind, and has statistics of its own."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.norm, self.barrier = nn.BatchNorm1d(4).double(), barrier
        self.others: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(PATIENCE_S)
        return cast(Tensor, self.norm(x))


class KnowsItsModel(Waits):
    """Names it in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.others[0].training is self.training
        return super().forward(x)


class Recorder:
    """Sees what modules return, and knows them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules, self.seen = modules, list[Tensor]()
        for module in modules:
            module.register_forward_hook(self.see)

    def see(self, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        self.seen.append(result.detach())


@pytest.mark.parametrize("kind", [Waits, KnowsItsModel])
def test_calls_that_lead_to_each_other_share_nothing_by_that(kind: type[Waits]) -> None:
    barrier = threading.Barrier(3)
    experts = nn.ModuleList([kind(barrier) for _ in range(3)])
    for expert in experts:
        cast(Waits, expert).others = [nn.Sequential(nn.BatchNorm1d(4), experts)]
    recorder = Recorder([*experts.modules()])
    results = parallel_apply([*experts], [(x,) for x in leaves(3)])
    assert len(results) == len(recorder.seen) / 2 == 3  # of experts, and of their norms
