"""Calls that hold tensors computed from each other, or from a weight that they have: the outer graph leads to each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import parallel_apply
from tests.support.comparison import assert_same, one_after_another
from tests.support.functions_context import SavesInput
from tests.support.readable import wait

Apply = Callable[..., Any]


def made(apply: Apply) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three calls: of two tensors computed from one another, of a weight and what it made, of a chain of three."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = (x @ w).sin()
    z = y.exp() * x
    calls = [lambda v: v * y + z.sin(), lambda v: v @ w + y.cos(), lambda v: (z * y).tanh() * x + v]
    results = apply(calls, [(x,), (y,), (z,)])
    return results, {"x": x, "w": w, "y": y, "z": z}


def loss_of(results: list[Tensor]) -> Tensor:
    return sum(((i + 1) * r.tanh()).sum() for i, r in enumerate(results))  # type: ignore[return-value]


def asked(names: str) -> Callable[[Apply], Any]:
    def program(apply: Apply) -> Any:
        results, tensors = made(apply)
        return torch.autograd.grad(loss_of(results), [tensors[name] for name in names])

    return program


def retained(apply: Apply) -> Any:
    results, tensors = made(apply)
    for name in "yz":
        tensors[name].retain_grad()
    loss_of(results).backward()
    return [tensor.grad for tensor in tensors.values()]


def retained_with_graph(apply: Apply) -> Any:
    results, tensors = made(apply)
    for name in "yz":
        tensors[name].retain_grad()
    loss_of(results).backward(create_graph=True)
    grads = [tensor.grad for tensor in tensors.values()]
    return grads, torch.autograd.grad(sum(grad.sin().sum() for grad in grads), [tensors["x"], tensors["w"]])


def hooked(apply: Apply) -> Any:
    results, tensors = made(apply)
    seen: list[Tensor] = []
    tensors["y"].register_hook(lambda grad: seen.append(grad.clone()))
    tensors["z"].register_hook(lambda grad: grad / grad.norm())
    loss_of(results).backward()
    return [*seen, tensors["x"].grad, tensors["w"].grad]


def used_outside(apply: Apply) -> Any:
    results, tensors = made(apply)
    (loss_of(results) + tensors["z"].square().sum()).backward()
    return tensors["x"].grad, tensors["w"].grad


def freed(apply: Apply) -> Any:
    results, tensors = made(apply)
    loss_of(results).backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        tensors["z"].sum().backward()
    return tensors["x"].grad


def sparse(apply: Apply) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
    trunk = table(torch.tensor([0, 1, 1])).sin()
    results = apply(
        [lambda i: table(i) * trunk, lambda i: trunk @ table(i).T], [(torch.tensor([1, 2, 3]),)] * 2
    )
    loss_of(results).backward()
    grad = table.weight.grad
    assert grad is not None
    return grad.to_dense()


class Trains(Function):
    """Does in its backward what counts how often it runs, and with what: as experts elsewhere do."""

    gathered: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Trains.gathered.append(grad)
        return grad * 2


def trained_on_the_way(apply: Apply) -> Any:
    x = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)
    y = Trains.apply(x)  # type: ignore[no-untyped-call]
    results = apply([lambda v: v * y, lambda v: (v + y).sin() * x], [(x,), (y.detach(),)])
    loss_of(results).backward()
    gathered = torch.stack(Trains.gathered).sum(0)
    Trains.gathered.clear()
    return x.grad, gathered


class Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 + grads[1] * 3


def behind_functions(apply: Apply) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls that hold a tensor which a weight of theirs has made of tensors that functions have made."""
    generator = torch.Generator().manual_seed(0)
    x, u, w = (
        torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    z = SavesInput.apply(x)  # type: ignore[no-untyped-call]
    held = (z @ w).sin() + SavesInput.apply(u)  # type: ignore[no-untyped-call]
    results = apply([lambda v: v @ w + held.sin(), lambda v: (v @ w) * held], [(u,), (x,)])
    return loss_of(results) + (z / 2).sum(), {"x": x, "u": u, "w": w, "z": z, "h": held}


def asked_behind_functions(names: str) -> Callable[[Apply], Any]:
    def program(apply: Apply) -> Any:
        loss, tensors = behind_functions(apply)
        return torch.autograd.grad(loss, [tensors[name] for name in names])

    return program


def higher_behind_functions(first: str, then: str) -> Callable[[Apply], Any]:
    def program(apply: Apply) -> Any:
        loss, tensors = behind_functions(apply)
        asked, wanted = ([tensors[name] for name in names] for names in (first, then))
        grads = torch.autograd.grad(loss, asked, create_graph=True)
        grads = torch.autograd.grad(sum(grad.sin().sum() for grad in grads), wanted, create_graph=True)
        return grads, torch.autograd.grad(sum(grad.sin().sum() for grad in grads), wanted)

    return program


def trained_above(apply: Apply) -> Any:
    x, w = (torch.linspace(low, 1, 4, dtype=torch.float64, requires_grad=True) for low in (0, -1))
    y = Trains.apply(x)  # type: ignore[no-untyped-call]
    held = (y * w).sin()
    loss_of(apply([lambda v: v * w + held, lambda v: (v + w).sin() * held], [(x,), (y,)])).backward()
    gathered, Trains.gathered = Trains.gathered, []
    return x.grad, w.grad, gathered


def trained_between_two_results_of_a_function(apply: Apply) -> Any:
    """The engine goes on to a function, whichever of its results it is asked for."""
    x = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)
    one, other = Twice.apply(x)  # type: ignore[no-untyped-call]
    held = Trains.apply(other).sin()  # type: ignore[no-untyped-call]
    loss_of(apply([lambda v: v * held + one, lambda v: (v + one).sin()], [(x.detach(),), (x,)])).backward()
    gathered = torch.stack(Trains.gathered).sum(0)
    Trains.gathered.clear()
    return x.grad, gathered


def of_second_order(apply: Apply) -> Any:
    results, tensors = made(apply)
    grads = torch.autograd.grad(loss_of(results), list(tensors.values()), create_graph=True)
    return torch.autograd.grad(sum(grad.sin().sum() for grad in grads), list(tensors.values()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "options", [{}, {"max_concurrency": 1}, {"recompute": True}, {"defer_weight_grads": True}]
)
@pytest.mark.parametrize(
    "program",
    [
        *(asked("y"), asked("z"), asked("xwyz"), asked("x"), asked("wz")),
        *(
            retained,
            retained_with_graph,
            hooked,
            used_outside,
            freed,
            sparse,
            trained_on_the_way,
            trained_above,
            trained_between_two_results_of_a_function,
            of_second_order,
        ),
        *map(asked_behind_functions, ("z", "h", "w", "zw", "xuzh")),
        *(
            higher_behind_functions(*names)
            for names in (("xw", "z"), ("z", "z"), ("xuwz", "xuwzh"), ("u", "xzh"))
        ),
    ],
)
def test_gradients_of_each_of_them_are_those_of_a_loop(
    program: Callable[[Apply], Any], options: dict[str, Any]
) -> None:
    def mapped(calls: Any, inputs: Any) -> Any:
        return parallel_apply(calls, inputs, **options)

    assert_same(program(one_after_another), program(mapped), "", tolerance=1e-9)


@pytest.mark.stress
@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_threads_add_to_one_retained_gradient_one_after_the_other(options: dict[str, Any]) -> None:
    """PyTorch adds without a lock: two at once crash the process."""
    expected, before = retained(one_after_another), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(150):
            same = retained(lambda calls, inputs: parallel_apply(calls, inputs, **options))
            assert_same(expected, same, tolerance=1e-9)
    finally:
        sys.setswitchinterval(before)


def test_second_derivatives_whose_first_a_new_thread_takes_are_those_of_a_loop() -> None:
    """It numbers nodes from nought, so the engine runs those of the forward first, where nothing makes it wait."""

    def program(apply: Apply) -> Any:
        with ThreadPoolExecutor(1) as other:
            return other.submit(of_second_order, apply).result()

    assert_same(program(one_after_another), program(parallel_apply), "", tolerance=1e-9)


class SaysPart(Function):
    """Keeps something under a name that nodes of a map have as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.part = 3
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.part * grad


def test_a_function_of_somebody_else_is_no_part_of_a_map() -> None:
    def gradients(apply: Any) -> list[Tensor]:
        weight, x = (torch.linspace(1, 2, 3).requires_grad_() for _ in range(2))
        held = SaysPart.apply(weight)
        outputs = apply([lambda x: (held * weight * wait(x)).sum()] * 2, [(x,), (2 * x,)])
        sum(outputs).backward()
        return [weight.grad, x.grad]

    torch.testing.assert_close(gradients(parallel_apply), gradients(one_after_another))
