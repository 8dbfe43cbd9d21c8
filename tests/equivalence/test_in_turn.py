"""Small and large calls of modules that only compute are the plain loop; what could wait, or be seen, never is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from moe_autograd import FeedForwardExpert, SwiGLUExpert, parallel_apply
from tests.support.comparing_modules import PROGRAMS
from tests.support.comparison import assert_same_program, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.made_in_turn import expert, is_made_in_turn

NUM_CALLS = 4
ORDER = 1e-6  # gradients that meet are added in another order


pytestmark = pytest.mark.usefixtures("some_are_small")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_of_modules_mean_the_same(program: Any) -> None:
    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=ORDER)


BUILT_IN = [
    *(lambda: nn.Linear(4, 4, bias=False), lambda: nn.LSTMCell(4, 4, bias=False), lambda: nn.GRUCell(4, 4)),
    *(lambda: nn.RNNCell(4, 4), lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(2, 4, affine=False)),
    *(lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4, bias=False), lambda: nn.RMSNorm(4), nn.PReLU),
    *(lambda: nn.LayerNorm(4, elementwise_affine=False), lambda: nn.RMSNorm(4, elementwise_affine=False)),
    *(nn.Flatten, lambda: nn.Unflatten(1, (2, 2)), lambda: nn.GLU(dim=-1), lambda: nn.Softmax(dim=-1)),
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid),
    *(lambda: nn.LogSoftmax(dim=-1), nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU),
    *(nn.Softplus, nn.Softsign, nn.Tanh, lambda: nn.Dropout(0.0)),
]


@pytest.mark.parametrize("make", BUILT_IN)
def test_built_in_modules_are_called_in_turn(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(3, 4)
    assert is_made_in_turn(module, x)
    assert torch.equal(
        *(y[0] if isinstance(y, tuple) else y for y in (parallel_apply([module], [x])[0], module(x)))
    )


@pytest.mark.parametrize("num_layers", [150, 200, 2000])
def test_modules_of_very_many_small_parts_are_called_in_turn(num_layers: int) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers)]
    assert is_made_in_turn(nn.Sequential(*layers), torch.randn(1, 4))


@pytest.mark.parametrize("num_layers", [1, 300])
def test_what_leads_back_to_what_it_is_a_part_of_gets_a_thread(num_layers: int) -> None:
    module = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers)])
    module.get_submodule("0").add_module("whole", module)
    assert not is_made_in_turn(module, torch.randn(1, 4))


def test_what_is_a_part_again_and_again_gets_a_thread() -> None:
    module = expert()
    for _ in range(30):  # so it has a milliard parts, each of which would be looked at
        module = nn.Sequential(module, module)
    assert not is_made_in_turn(module)


def one_part_in_two_places() -> nn.Module:
    part = expert()
    return nn.Sequential(part, part)


@pytest.mark.parametrize(
    "make",
    [
        expert,
        one_part_in_two_places,
        nn.Identity,
        lambda: nn.Linear(4, 4),
        lambda: FeedForwardExpert(4),
        lambda: SwiGLUExpert(4, 8),
    ],
)
def test_small_modules_that_only_compute_are_called_in_turn_in_the_callers_graph(
    make: Callable[[], nn.Module],
) -> None:
    modules = [make() for _ in range(NUM_CALLS)]
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]
    outputs = parallel_apply(modules, [(x,) for x in xs])
    expected = one_after_another(modules, [(x,) for x in xs])
    for y, same in zip(outputs, expected, strict=True):
        assert torch.equal(y, same)
        assert y.grad_fn is None or type(y.grad_fn) is type(same.grad_fn)  # no node of ours


def test_inputs_without_dimensions_or_without_elements_mean_the_loop() -> None:
    for x in (torch.tensor(2.0), torch.empty(0), torch.empty(3, 0)):
        assert is_made_in_turn(nn.Tanh(), x)
        assert torch.equal(parallel_apply([nn.Tanh()], [x])[0], x.tanh())


class Grouped(nn.Linear):
    call_group: Any = None


class Group:
    def call_together(self, modules: Any, inputs: Any, kwargs: Any) -> Any:
        return [-x for (x,) in inputs]


def test_the_calls_of_a_group_are_made_by_it() -> None:
    of_class, of_instance = Grouped(4, 4), nn.Linear(4, 4)
    of_class.call_group = of_instance.call_group = Group()  # type: ignore[assignment]
    x = torch.randn(3, 4)
    for modules in ([of_class], [of_instance], [of_class, of_instance]):
        assert all(torch.equal(y, -x) for y in parallel_apply(modules, [x] * len(modules)))


def test_a_function_may_have_a_group_too() -> None:
    def call(x: Tensor) -> Tensor:
        return x + 1

    x = torch.randn(3, 4)
    assert torch.equal(parallel_apply([call], [x])[0], x + 1)
    call.call_group = Group()  # type: ignore[attr-defined]
    assert torch.equal(parallel_apply([call], [x])[0], -x)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_call_that_a_hook_is_to_see_is_not_made_by_its_group(kind: str) -> None:
    module, x = Grouped(4, 4), torch.randn(3, 4)
    module.call_group = Group()
    handle = getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert torch.equal(parallel_apply([module], [x])[0], module(x))
    handle.remove()
    assert torch.equal(parallel_apply([module], [x])[0], -x)
    module.forward = lambda x: x + 1  # type: ignore[method-assign]
    assert torch.equal(parallel_apply([module], [x])[0], x + 1)


class Waits(nn.Linear):
    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(4, 4)
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(PATIENCE_S)
        return super().forward(x)


class WaitsToo(FeedForwardExpert):
    """Inherits `only_computes`, and does not."""

    def forward(self, x: Tensor) -> Tensor:
        threading.Barrier(1).wait()
        return super().forward(x)


def with_hook(register: str) -> nn.Module:
    module = expert()
    getattr(module[0], register)(lambda *_: None)
    return module


def with_forward_of_its_own() -> nn.Module:
    module = expert()
    module[0].forward = lambda x: x  # type: ignore[method-assign]
    return module


class Special(Tensor):
    pass


def with_weight(keep: Callable[[nn.Module, Tensor], None]) -> nn.Module:
    module = nn.Linear(4, 4)
    weight = module.weight.detach()
    del module.weight
    keep(module, weight)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_weight(lambda module, weight: setattr(module, "weight", weight.as_subclass(Special))),
        lambda: with_weight(lambda module, weight: module.register_buffer("weight", weight)),
        lambda: Waits(threading.Barrier(1)),
        lambda: nn.Sequential(nn.Identity(), Waits(threading.Barrier(1))),
        lambda: WaitsToo(4),
        lambda: FeedForwardExpert(4, activation=lambda x: x),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()),
        lambda: nn.SyncBatchNorm(4),
        lambda: nn.ReLU(inplace=True),
        lambda: with_hook("register_forward_hook"),
        lambda: with_hook("register_forward_pre_hook"),
        lambda: with_hook("register_full_backward_hook"),
        lambda: with_hook("register_full_backward_pre_hook"),
        with_forward_of_its_own,
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_what_may_do_more_than_compute_gets_a_thread(make: Callable[[], Any]) -> None:
    assert not is_made_in_turn(make())


class InLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))


class TakesThePartByItself(InLists):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.layers[1](x)


class LoopsOverThem(InLists):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(x)
        return x


class CallsThem(InLists):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.layers(x)


def in_two_places() -> nn.Module:
    activation = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Linear(4, 4), activation, nn.Sequential(activation))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5), nn.Flatten(), nn.SiLU(inplace=True)),
        lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.GELU(), nn.Dropout(0.5, inplace=True))),
        CallsThem,
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_what_a_call_itself_has_made_it_may_change_in_place(
    make: Callable[[], nn.Module], is_training: bool
) -> None:
    modules = [make().train(is_training) for _ in range(NUM_CALLS)]

    def program(apply: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        torch.manual_seed(1)
        ys = apply(modules, [(x,)] * NUM_CALLS)
        wanted = [x, *nn.ModuleList(modules).parameters()]
        return [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), wanted), x.detach()]

    assert all(is_made_in_turn(module) for module in modules)
    on_threads = program(lambda modules, args: parallel_apply([m.__call__ for m in modules], args))
    for mine, same in zip(program(parallel_apply), on_threads, strict=True):
        torch.testing.assert_close(mine, same)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Flatten(), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Sequential(), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True))),
        in_two_places,
        TakesThePartByItself,
        LoopsOverThem,
    ],
)
def test_what_may_change_its_input_in_place_gets_a_thread(make: Callable[[], nn.Module]) -> None:
    assert not is_made_in_turn(make())


def test_one_call_that_may_wait_makes_all_of_them_concurrent() -> None:
    barrier = threading.Barrier(2)
    modules: list[nn.Module] = [Waits(barrier), nn.Linear(4, 4), Waits(barrier)]
    parallel_apply(modules, [(torch.randn(3, 4),) for _ in modules])
