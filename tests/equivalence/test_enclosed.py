"""Modules whose `forward` or functions were defined around tensors with history, and hold them in closures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.support.comparison import assert_same_program, one_after_another
from tests.support.module_programs import finish, leaves, parameters, seeded


def of_its_class(held: Tensor) -> nn.Module:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * held

    return Scales(4, 4)


def in_a_dictionary(held: Tensor) -> nn.Module:
    scales = {"all": [held]}

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scales["all"][0]

    return Scales(4, 4)


def of_a_part(held: Tensor) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), of_its_class(held))


def of_a_function_that_it_calls(held: Tensor) -> nn.Module:
    def scaled(x: Tensor, times: int = 1) -> Tensor:
        return scaled(x, times - 1) * held if times else x

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(super().forward(x))

    return Scales(4, 4)


def behind_a_decorator(held: Tensor) -> nn.Module:
    def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def decorator(*args: Any) -> Tensor:
            return forward(*args).sin()

        return decorator

    class Scales(nn.Linear):
        @decorated
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * held

    return Scales(4, 4)


def of_its_own(held: Tensor) -> nn.Module:
    module = nn.Linear(4, 4)
    as_before = module.forward
    module.forward = lambda input: as_before(input) * held  # type: ignore[method-assign]
    return module


def of_an_attribute(held: Tensor) -> nn.Module:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.scale(super().forward(x))
            return scaled

    module = Scales(4, 4)
    module.scale = lambda x: x * held  # type: ignore[assignment]
    return module


def beside_an_empty_cell(held: Tensor) -> nn.Module:
    gone = None

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (held if self.bias is not None else gone)  # noqa: F821

    del gone
    return Scales(4, 4)


@pytest.mark.parametrize(
    "options", [{}, {"max_concurrency": 1}, {"recompute": True}, {"defer_weight_grads": True}]
)
@pytest.mark.parametrize("num_holders", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        of_its_class,
        in_a_dictionary,
        of_a_part,
        of_a_function_that_it_calls,
        behind_a_decorator,
        of_its_own,
        of_an_attribute,
        beside_an_empty_cell,
    ],
)
def test_tensors_that_a_modules_functions_enclose_get_their_gradients_as_in_a_loop(
    make: Callable[[Tensor], nn.Module], options: dict[str, Any], num_holders: int
) -> None:
    def program(apply: Any) -> Any:
        (weight,), xs, log = leaves(1, 4), leaves(), list[Tensor]()
        held = weight.exp().sin()
        held.register_hook(lambda grad: log.append(grad.clone()))
        modules = [
            *seeded(lambda: make(held), num_holders),
            *seeded(lambda: nn.Linear(4, 4), len(xs) - num_holders),
        ]
        outputs = apply(modules, [(x,) for x in xs])
        return finish([*outputs, held * 2], *xs, weight, *parameters(modules)), log

    assert_same_program(
        program,
        native_apply=one_after_another,
        mapped_apply=functools.partial(parallel_apply, **options),
        tolerance=1e-12,
    )
