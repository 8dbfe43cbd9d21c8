"""Which loops of a module's forward are read: those over lists of parts, whose parts it calls and does no more with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.readable import assert_means_the_loop, expert_with, only_computes


def loops_over_parts(self: Any, x: Tensor) -> Tensor:
    h = x
    for layer in self.layers:
        h = torch.relu(layer(x + F.silu(layer(h))))
    return h


def loops_over_two_lists(self: Any, x: Tensor) -> Tensor:
    for layer, norm in zip(self.layers, self.norms, strict=True):
        x = x + layer(norm(x))
        if self.count > 2:
            continue
        x = x * 2
    return x


def counts_parts(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = layer(x)
        if i == self.count:
            break
    for norm in self.norms:
        x = norm(x).sin()
    return x


def loops_and_calls_methods(self: Any, x: Tensor) -> Tensor:
    for norm in self.norms:
        x = self.gate(x, norm(x))
    return x


def loops_over_some_parts(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers[:-1]:
        x = torch.relu(layer(x))
    return self.layers[-1](x)


def is_no_last_part(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers[0:], start=1):
        x = layer(x)
        if i < len(self.layers):
            x = F.relu(x)
    return x


def loops_so_often(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.sin() + self.layers[0](x)
    return x


def loops_as_often_as_a_number_says(self: Any, x: Tensor) -> Tensor:
    for i in range(1, self.count + 1):
        x = self.w2(self.w1(x)) * i
    return x


def takes_each_part_by_its_number(self: Any, x: Tensor) -> Tensor:
    for i in range(len(self.layers)):
        x = self.norms[i](self.layers[i](x))
    for i in range(len(self.layers) - 1):
        x = x.sin() * i
    return x


ARITHMETIC = [
    *(loops_over_parts, loops_over_two_lists, counts_parts, loops_and_calls_methods, loops_over_some_parts),
    *(is_no_last_part, loops_so_often, loops_as_often_as_a_number_says, takes_each_part_by_its_number),
]


@pytest.mark.parametrize("forward", ARITHMETIC)
def test_a_forward_that_loops_over_parts_is_called_in_turn_and_means_the_loop(forward: Any) -> None:
    assert_means_the_loop(forward)


def loops_as_often_as_it_is_told(self: Any, x: Tensor, depth: int = 3) -> Tensor:
    for _ in range(depth):
        x = x.sin()
    return x


def loops_as_often_as_something_says(self: Any, x: Tensor) -> Tensor:
    for _ in range(self.eps):
        x = x.sin()
    return x


def loops_over_so_many_elements(self: Any, x: Tensor) -> Tensor:
    for i in range(len(x)):
        x = x + x[i]
    return x


def loops_within_numbers(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        for _ in range(3):
            x = x.sin()
    return x


def loops_over_the_parts_of_one(self: Any, x: Tensor) -> Tensor:
    for layer in self.norms[1]:
        x = layer(x)
    return x


def asks_a_part_with_a_number(self: Any, x: Tensor) -> Any:
    return self.layers[0].split(x)


def returns_a_part_with_a_number(self: Any, x: Tensor) -> Any:
    return self.layers[0], x


def keeps_a_part_with_a_number(self: Any, x: Tensor) -> Any:
    layer = self.layers[0]
    return layer(x)


def takes_a_part_by_what_is_in_a_list(self: Any, x: Tensor) -> Any:
    return self.in_a_list[0](x)


def takes_a_part_by_a_part(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = self.norms[layer](x)
    return x


def measures_a_list(self: Any, x: Tensor) -> Any:
    return x * len(self.in_a_list)


def loops_until(self: Any, x: Tensor) -> Tensor:
    while x.sum() > 0:
        x = x - 1
    return x


def loops_until_it_returns(self: Any, x: Tensor) -> Tensor:
    while True:
        x = x - 1
        if x.sum() < 0:
            return x


def comprehends(self: Any, x: Tensor) -> Any:
    return [one.sin() for one in x]


def loops_over_its_input(self: Any, x: Tensor) -> Any:
    y = x
    for one in x:
        y = y + one
    return y


def loops_over_a_list(self: Any, x: Tensor) -> Any:
    for layer in self.in_a_list:
        x = layer(x)
    return x


def loops_over_one_part(self: Any, x: Tensor) -> Any:
    for layer in self.w1:
        x = layer(x)
    return x


def loops_over_what_a_method_gives(self: Any, x: Tensor) -> Any:
    for layer in self.children():
        x = layer(x)
    return x


def loops_over_one_of_two(self: Any, x: Tensor) -> Any:
    for layer in self.layers if self.count else self.in_a_list:
        x = layer(x)
    return x


def loops_within_a_loop(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        for norm in self.norms:
            x = layer(norm(x))
    return x


def loops_within_a_methods_loop(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = self.through_layers(layer(x))
    return x


def asks_what_it_loops_over(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = layer.split(x)
    return x


def returns_what_it_loops_over(self: Any, x: Tensor) -> Any:
    for layer in self.layers:  # noqa: B007
        x = x + 1
    return x, layer


def gives_what_it_loops_over(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = torch.add(x, layer)
    return x


def keeps_what_it_loops_over(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        kept = layer
        x = kept.split(x)
    return x


def loops_over_pairs(self: Any, x: Tensor) -> Any:
    for pair in enumerate(self.layers):
        x = pair[1].split(x)
    return x


def unpacks_parts(self: Any, x: Tensor) -> Any:
    for _, (first, second) in enumerate(self.layers):
        x = second.split(first(x))
    return x


def unpacks_each_part(self: Any, x: Tensor) -> Any:
    for (layer,) in self.layers:  # and what a part is iterated by may be anything
        x = layer(x)
    return x


def unpacks_parts_of_two_lists(self: Any, x: Tensor) -> Any:
    for (first, second), norm in zip(self.layers, self.norms, strict=True):
        x = second.split(first(norm(x)))
    return x


def puts_it_into_a_tuple(self: Any, x: Tensor) -> Any:
    f = torch.sin
    for layer in self.layers:
        x = self.call_first((layer, x), x) + f(x)
    return x


def counts_what_it_calls(self: Any, x: Tensor) -> Any:
    for layer, _ in enumerate(self.layers):
        x = layer(x)  # type: ignore[operator]
    return x + _


def names_what_it_loops_over(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = (kept := layer)(x)
        x = kept.split(x)
    return x


def loops_with_another_name(self: Any, x: Tensor) -> Any:
    for self in self.layers:  # noqa: B020
        x = self.split(x)
    return x


def comprehends_parts(self: Any, x: Tensor) -> Any:
    return [layer(x) for layer in self.layers]


MORE = [
    *(loops_as_often_as_it_is_told, loops_as_often_as_something_says, loops_over_so_many_elements),
    *(loops_within_numbers, loops_over_the_parts_of_one, asks_a_part_with_a_number),
    *(returns_a_part_with_a_number, keeps_a_part_with_a_number, takes_a_part_by_what_is_in_a_list),
    *(takes_a_part_by_a_part, measures_a_list),
    *(loops_until, loops_until_it_returns, comprehends, loops_over_its_input, loops_over_a_list),
    loops_over_one_part,
    *(loops_over_what_a_method_gives, loops_over_one_of_two, loops_within_a_loop),
    *(loops_within_a_methods_loop, asks_what_it_loops_over, returns_what_it_loops_over),
    *(gives_what_it_loops_over, keeps_what_it_loops_over, loops_over_pairs, counts_what_it_calls),
    *(names_what_it_loops_over, loops_with_another_name, comprehends_parts, unpacks_parts),
    *(unpacks_each_part, unpacks_parts_of_two_lists, puts_it_into_a_tuple),
]


@pytest.mark.parametrize("forward", MORE)
def test_a_loop_that_may_do_more_is_not_taken_for_arithmetic(forward: Any) -> None:
    assert not only_computes(expert_with(forward))
