"""Which forwards may do more than arithmetic, and so are not read as such: by what they call, keep or change."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.readable import (
    expert_with,
    only_computes,
    swiglu,
    wait,
    waits,
)

UNKNOWN = [wait]


def calls_what_waits(self: Any, x: Tensor) -> Tensor:
    return wait(x)


def waits_within(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x if y is None else wait(x)


def calls_what_calls_another(self: Any, x: Tensor) -> Tensor:
    return waits_within(x)


def calls_what_is_given(function: Any, x: Tensor) -> Any:
    return function(x, True)


def gives_a_function(self: Any, x: Tensor) -> Any:
    return calls_what_is_given(F.relu, x)


def gives_a_part(self: Any, x: Tensor) -> Any:
    return calls_what_is_given(self.w1, x)


def gives_a_part_of_a_loop(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = calls_what_is_given(layer, x)
    return x


def gives_itself_to_a_function(self: Any, x: Tensor) -> Any:
    return calls_what_is_given(self, x)


def defaults_to_a_function(x: Tensor, function: Any = wait) -> Any:
    return function(x)


def calls_what_defaults_to_a_function(self: Any, x: Tensor) -> Any:
    return defaults_to_a_function(x)


def returns_a_function(self: Any, x: Tensor) -> Any:
    return waits_within, x


def changes_what_it_is_given(x: Tensor) -> Tensor:
    x += 1
    return x


def calls_what_changes_in_place(self: Any, x: Tensor) -> Tensor:
    return changes_what_it_is_given(x)


def takes_any_number(*xs: Tensor) -> Tensor:
    return xs[0]


def loops_by_itself(x: Tensor) -> Tensor:
    for _ in range(5000):
        x = x.sin()
    return x


def calls_what_loops(self: Any, x: Tensor) -> Tensor:
    return loops_by_itself(x)


def calls_with_any_number(self: Any, x: Tensor) -> Tensor:
    return takes_any_number(x, x)


def calls_what_is_in_a_list(self: Any, x: Tensor) -> Tensor:
    return UNKNOWN[0](x)


def calls_its_argument(self: Any, x: Any) -> Any:
    return x.wait()


def calls_a_method_that_waits(self: Any, x: Tensor) -> Tensor:
    return self.wait(x)


def calls_a_method_that_calls_one(self: Any, x: Tensor) -> Tensor:
    return self.gate_and_wait(x)


def calls_a_method_that_calls_itself(self: Any, x: Tensor) -> Tensor:
    return self.again(x)


def calls_itself(self: Any, x: Tensor) -> Any:
    return self.forward(x)


def calls_a_method_with_a_default(self: Any, x: Tensor) -> Any:
    return self.change(x)


def calls_a_static_method_that_waits(self: Any, x: Tensor) -> Any:
    return self.wait_of_nobody(x)


def calls_a_class_method(self: Any, x: Tensor) -> Any:
    return self.of_the_class(x)


def calls_what_the_class_has(self: Any, x: Tensor) -> Any:
    self.wait_of_all()
    return x


def asks_for_what_a_part_does_not_have(self: Any, x: Tensor) -> Any:
    return x * self.w1.shift


def takes_what_a_part_may_do(self: Any, x: Tensor) -> Any:
    forward = self.w1.forward
    return forward(x)


def calls_a_method_of_a_part(self: Any, x: Tensor) -> Any:
    return self.w1.extra_repr(), x


def gives_by_any_name(self: Any, x: Tensor) -> Any:
    return x.add(*(x,), **{"out": x})  # noqa: PIE804


def gives_by_a_name(self: Any, x: Tensor) -> Any:
    return x.add(*(x,), out=x)


def gives_any_number_to_a_function(self: Any, x: Tensor) -> Any:
    return F.silu(*(x, True))


def raises_an_error_of_its_own(self: Any, x: Tensor) -> Any:
    if self.count > 2:
        raise MyError(x)
    return x.sin()


class MyError(Exception):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        wait(x)


def names_another_of_pythons(self: Any, x: Tensor) -> Any:
    return getattr(x, "add_")(1)  # noqa: B009


def opens_a_file(self: Any, x: Tensor) -> Any:
    return open("/dev/null"), x


def calls_a_method_without_self(self: Any, x: Tensor) -> Any:
    return x + self.without_self()


def calls_a_method_of_modules(self: Any, x: Tensor) -> Any:
    self.requires_grad_()
    return x


def takes_a_method(self: Any, x: Tensor) -> Any:
    return x, self.activate


def takes_a_property(self: Any, x: Tensor) -> Tensor:
    return x @ self.of_class


def takes_a_part(self: Any, x: Tensor) -> Tensor:
    part = self.w1
    return part.split(x)


def asks_a_part(self: Any, x: Tensor) -> Tensor:
    return self.w1.split(x)


def takes_a_function(self: Any, x: Tensor) -> Tensor:
    activation = self.activation
    return activation(x)


def has_another_name(self: Any, x: Tensor) -> Tensor:
    other = self
    return other.split(x)


def may_be_itself(self: Any, x: Tensor) -> Tensor:
    return (self if self.count else x).split(x) + x * 2  # else 3.12 has the look-up twice, and reads both


def may_be_torch(self: Any, x: Tensor) -> Tensor:
    return (self.weight if self.count else torch).relu(x) + x * 2


def gives_itself(self: Any, x: Tensor) -> Tensor:
    return torch.add(x, self)


def names_a_function(self: Any, x: Tensor) -> Any:
    return (relu := F.relu)(x) + relu(x, True)


def gives_itself_behind_another(self: Any, x: Tensor) -> Tensor:
    return torch.add((y := x), self) + y


def becomes_another(self: Any, x: Tensor) -> Tensor:
    return (self := x) + x * self.w1(x)  # type: ignore[operator]


def has_a_function(self: Any, x: Tensor) -> Tensor:
    return (lambda y: y)(x)


def changes_in_place(self: Any, x: Tensor) -> Tensor:
    x += 1
    return x


def changes_by_a_method(self: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def changes_by_an_argument(self: Any, x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def changes_what_is_given_for_the_result(self: Any, x: Tensor) -> Tensor:
    return torch.add(x, 1, out=self.shift)


def changes_by_an_argument_without_a_name(self: Any, x: Tensor) -> Tensor:
    return F.silu(x, True)


def changes_what_comes_of_more(self: Any, x: Tensor) -> Tensor:
    return F.elu(self.w1(x.add(x, alpha=2)), 1.0, self.count)  # type: ignore[arg-type]


def changes_by_a_function_it_is_given(self: Any, x: Tensor) -> Any:
    return self.activation(self.activation(x), True)


def changes_by_a_variable(self: Any, x: Tensor) -> Any:
    activation = F.relu
    return activation(x, True)


def changes_by_one_of_two(self: Any, x: Tensor) -> Any:
    return (F.relu if self.count else F.silu)(x, True)


def changes_by_a_function_in_a_tuple(self: Any, x: Tensor) -> Any:
    f = torch.sin
    return self.call_first((F.relu, x), x) + f(x)  # the one argument is not the first function's


def changes_itself(self: Any, x: Tensor) -> Tensor:
    return F.normalize(x, 2.0, 1, 1e-12, self.shift)


def changes_an_element(self: Any, x: Tensor) -> Tensor:
    x[0] = 1
    return x


def sets_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.seen = x
    return x


def draws(self: Any, x: Tensor) -> Tensor:
    return x + torch.randn(4)


def imports(self: Any, x: Tensor) -> Tensor:
    import time

    time.sleep(0)
    return x


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return x.sin()
    except RuntimeError:
        return x


def enters(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def takes_a_function_by_default(self: Any, x: Tensor, by: Any = wait) -> Any:
    return by(x)


def takes_a_function_by_name(self: Any, x: Tensor, *, by: Any = wait) -> Any:
    return by(x)


def takes_any(self: Any, *xs: Tensor) -> Tensor:
    return xs[0]


def generates(self: Any, x: Tensor) -> Any:
    yield x


async def is_awaited(self: Any, x: Tensor) -> Tensor:
    return x


@functools.wraps(swiglu)
def is_wrapped(self: Any, x: Tensor) -> Any:
    return swiglu(self, x)


def waits_under_another_name(self: Any, x: Tensor) -> Any:
    return waits(self, x)


waits_under_another_name.__func__ = swiglu  # type: ignore[attr-defined]  # which `dis` would look at

MORE = [
    *(calls_what_calls_another, gives_a_function, gives_a_part, gives_a_part_of_a_loop, returns_a_function),
    *(gives_itself_to_a_function, calls_what_defaults_to_a_function, calls_what_changes_in_place),
    *(calls_with_any_number, calls_what_loops),
    *(waits, calls_what_waits, calls_what_is_in_a_list, calls_its_argument, calls_a_method_that_waits),
    *(calls_a_method_that_calls_one, calls_a_method_that_calls_itself, calls_itself),
    *(calls_a_static_method_that_waits, calls_a_class_method, calls_what_the_class_has),
    *(calls_a_method_with_a_default, calls_a_method_of_modules, takes_a_method),
    *(names_a_function, takes_a_property, takes_a_part, asks_a_part, asks_for_what_a_part_does_not_have),
    *(takes_what_a_part_may_do, calls_a_method_of_a_part, gives_by_any_name, gives_by_a_name),
    *(gives_any_number_to_a_function, raises_an_error_of_its_own, names_another_of_pythons, opens_a_file),
    *(gives_itself_behind_another, becomes_another),
    *(takes_a_function, has_another_name, may_be_itself, may_be_torch, gives_itself, has_a_function),
    *(changes_in_place, changes_by_a_method, changes_by_an_argument, changes_an_element),
    *(changes_what_is_given_for_the_result, calls_a_method_without_self, takes_a_function_by_name),
    *(sets_an_attribute, changes_by_an_argument_without_a_name, changes_what_comes_of_more),
    *(changes_by_a_function_it_is_given, changes_by_a_variable, changes_by_one_of_two, changes_itself),
    *(
        changes_by_a_function_in_a_tuple,
        draws,
        imports,
        catches,
        enters,
        takes_a_function_by_default,
        takes_any,
        generates,
        is_awaited,
        is_wrapped,
    ),
    *(waits_under_another_name, torch.no_grad()(swiglu), functools.partialmethod(swiglu)),
]


@pytest.mark.parametrize("forward", MORE, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_a_forward_that_may_do_more_is_not_taken_for_arithmetic(forward: Any) -> None:
    assert not only_computes(expert_with(forward))
