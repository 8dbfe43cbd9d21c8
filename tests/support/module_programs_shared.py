"""Programs whose calls share graph with each other or with the world outside: closures, attributes, views, hooks.

Registered with those of `module_programs`.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.comparison import MapFunction, loss_of
from tests.support.functions_context import IsOnceDifferentiable
from tests.support.module_programs import NUM_CALLS, finish, leaves, parameters, program, seeded


def hidden_in_object(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A callable that reaches a tensor only through an object, a list, another object and a dictionary."""
    holder = types.SimpleNamespace(parts=[types.SimpleNamespace(tensors={"the one": tensor})])
    return lambda x: x * holder.parts[0].tensors["the one"]


def hidden_from_every_look(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A callable that reaches a tensor where no look at its closure can find it."""
    holder = types.MappingProxyType({"the one": tensor})
    return lambda x: x * holder["the one"]


_held_by_the_context = contextvars.ContextVar[Tensor]("held")


@program
def a_tensor_in_a_context_variable_used_by_calls_and_outside(apply: MapFunction) -> Any:
    (weight,), xs, log = leaves(1, 4), leaves(), []
    hidden = weight.exp()
    hidden.register_hook(lambda grad: log.append(grad.clone()))
    _held_by_the_context.set(hidden)
    local = contextvars.ContextVar[Tensor]("local")
    local.set(hidden.sin())
    calls = [lambda x: x * _held_by_the_context.get(), lambda x: x * local.get()] * 2
    said = finish([*apply(calls, [(x,) for x in xs]), hidden * 2], *xs, weight)
    return said, log


def a_tensor_that_no_look_finds_used_by_a_call_and_outside(apply: MapFunction) -> Any:
    (weight,), (x,) = leaves(1, 4), leaves(1)
    hidden = weight.exp()
    return finish([*apply([hidden_from_every_look(hidden)], [(x,)]), hidden * 2], x, weight)


@program
def a_hidden_tensor_used_by_a_call_and_outside(apply: MapFunction) -> Any:
    (weight,), (x,) = leaves(1, 4), leaves(1)
    hidden = weight.exp()
    return finish([*apply([hidden_in_object(hidden)], [(x,)]), hidden * 2], x, weight)


@program
def a_hidden_tensor_used_by_two_maps(apply: MapFunction) -> Any:
    (weight,), xs = leaves(1, 4), leaves()
    call = hidden_in_object(weight.exp())
    first = apply([call, torch.sin], [(x,) for x in xs[:2]])
    return finish([*apply([call, torch.cos], [(x,) for x in xs[2:]]), *first], *xs, weight)


@program
def a_hidden_tensor_used_by_two_maps_in_a_row(apply: MapFunction) -> Any:
    (weight,), xs = leaves(1, 4), leaves()
    calls = [hidden_in_object(weight.exp())] * NUM_CALLS
    return finish(apply(calls, [(y,) for y in apply(calls, [(x,) for x in xs])]), *xs, weight)


@program
def a_hidden_tensor_that_is_also_an_input(apply: MapFunction) -> Any:
    (weight,) = leaves(1, 4)
    hidden = weight.exp()
    return finish(apply([hidden_in_object(hidden)] * 2, [(hidden,), (hidden.sin(),)]), weight)


@program
def a_hidden_tensor_computed_from_an_input(apply: MapFunction) -> Any:
    (x, y) = leaves(2, 4)
    middle = x * 2
    return finish(apply([hidden_in_object(middle.exp())] * 2, [(middle,), (y,)]), x, y)


def hooks_on_a_tensor(
    apply: MapFunction, hide: Callable[[Tensor], Callable[[Tensor], Tensor]]
) -> tuple[Any, list[Tensor], Tensor | None]:
    """Once, with the whole gradient."""
    (weight,), xs = leaves(1, 4), leaves()
    hidden, log = weight.exp(), list[Tensor]()
    hidden.retain_grad()
    hidden.register_hook(lambda grad: (log.append(grad.clone()), grad * 2)[1])
    said = finish(apply([hide(hidden)] * NUM_CALLS, [(x,) for x in xs]), *xs, weight)
    return said, log, hidden.grad


@program
def hooks_on_a_hidden_tensor(apply: MapFunction) -> Any:
    return hooks_on_a_tensor(apply, hidden_in_object)


class Remembers(nn.Module):
    """Keeps what it computed last, with its history, in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))
        self.all: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        y = (x * self.weight).tanh()
        self.last = y * y
        self.all.append(y.exp())
        return y


def three_steps(apply: MapFunction, calls: list[Any], **options: Any) -> Any:
    said = []
    for _ in range(3):
        xs = leaves()
        said.append(finish(apply(calls, [(x,) for x in xs], **options), *xs))
    return said


@program
def modules_that_keep_what_they_computed_last(apply: MapFunction) -> Any:
    return three_steps(apply, seeded(Remembers))


@program
def closures_over_modules_that_keep_what_they_computed_last(apply: MapFunction) -> Any:
    return three_steps(apply, [lambda x, m=m: m(x) for m in seeded(Remembers)])


@program
def inputs_that_no_call_uses_and_whose_graph_is_freed(apply: MapFunction) -> Any:
    modules, last, said = seeded(Remembers), leaves(), []
    for _ in range(3):
        xs = leaves()
        outputs = apply(modules, list(zip(xs, last, strict=True)))
        last = [y * y for y in outputs]
        said.append(finish(last, *xs))
    return said


@program
def hooks_on_a_tensor_in_a_closure(apply: MapFunction) -> Any:
    (weight,), xs = leaves(1, 4), leaves()
    held, log = weight.exp(), []
    held.retain_grad()
    held.register_hook(lambda grad: (log.append(grad.clone()), grad * 2)[1])
    said = finish(apply([lambda x: x * held] * NUM_CALLS, [(x,) for x in xs]), *xs, weight)
    return said, log, held.grad


@program
def gradients_of_a_tensor_in_a_closure(apply: MapFunction) -> Any:
    (weight,), xs = leaves(1, 4), leaves()
    held = weight.exp()
    outputs = apply([lambda x: x * held] * NUM_CALLS, [(x,) for x in xs])
    return torch.autograd.grad(loss_of(outputs), [held])


@program
def callables_that_return_tensors_they_hold(apply: MapFunction) -> Any:
    (weight, other), (x, y) = leaves(2, 4), leaves(2)
    held = weight.exp()
    outputs = apply([lambda x: held, lambda y: (held, y * held, other)], [(x,), (y,)])
    return finish(outputs, weight, other, y)


@program
def slices_changed_in_place(apply: MapFunction) -> Any:
    """As a layer would that hands each expert a slice of the sorted tokens."""
    modules, (x,) = seeded(lambda: nn.Linear(4, 4), 2), leaves(1, 8, 4)
    tokens = x * 2
    calls = [lambda x, m=m: m(x.mul_(3) + 1) for m in modules]
    outputs = apply(calls, [(tokens[:3],), (tokens[3:],)])
    return finish(outputs, x, *parameters(modules))


@program
def an_input_changed_in_place_and_returned(apply: MapFunction) -> Any:
    xs = leaves()
    middles = [x * 2 for x in xs]
    return finish(apply([lambda x: x.mul_(3)] * NUM_CALLS, [(m,) for m in middles]), *xs)


def a_constant_changed_in_place(apply: MapFunction) -> Any:
    """The input needs no gradient, but gets a history through a parameter."""
    weights, xs = leaves(NUM_CALLS, 4), leaves(requires_grad=False)
    calls = [lambda x, w=w: x.mul_(w) for w in weights]
    outputs = apply(calls, [(x,) for x in xs])
    return [x.requires_grad for x in xs], finish([*outputs, *xs], *weights)


def a_state_with_history_kept_between_maps(apply: MapFunction) -> Any:
    """A recurrent state that a module keeps, with its graph, from one map to the next."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)
            self.state = torch.zeros(3, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.state = torch.tanh(self.cell(x) + self.state)
            return self.state * 2

    modules, xs = seeded(Remembers, 2), leaves(2)
    apply(modules, [(x,) for x in xs])
    return finish(apply(modules, [(x * 2,) for x in xs]), *xs, *parameters(modules))


def an_auxiliary_loss_kept_on_a_module(apply: MapFunction) -> Any:
    """Not returned; its gradient goes around the map."""

    class KeepsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            self.loss = (y**2).mean()
            return y

    modules, xs = seeded(KeepsLoss), leaves()
    apply(modules, [(x,) for x in xs])
    losses: list[Any] = [module.loss for module in modules]
    return finish(losses, *xs, *parameters(modules))


def an_auxiliary_loss_beside_the_outputs(apply: MapFunction) -> Any:
    kept: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        y = x.exp()
        kept.append(y.sum())
        return y

    xs = leaves()
    return finish([*apply([call] * NUM_CALLS, [(x,) for x in xs]), sum(kept)], *xs)


def an_input_returned_and_changed_in_place(apply: MapFunction) -> Any:
    """Natively the output is the input, so both change."""
    xs = leaves(2)
    middles = [x * 2 for x in xs]
    outputs = apply([nn.Identity(), lambda x: x.view(-1)], [(m,) for m in middles])
    for output in outputs:
        output.mul_(3)
    return finish([*outputs, *middles], *xs)


def an_input_changed_in_place_after_it_was_returned(apply: MapFunction) -> Any:
    xs = leaves(2)
    middles = [x * 2 for x in xs]
    outputs = apply([nn.Identity(), lambda x: x.view(-1)], [(m,) for m in middles])
    for middle in middles:
        middle.mul_(3)
    return finish([*outputs, *middles], *xs)


def results_that_share_memory_changed_in_place(apply: MapFunction) -> Any:
    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y, y.view(-1), y[1:]

    xs = leaves(2)
    outputs = apply([call] * 2, [(x,) for x in xs])
    outputs[0][0].mul_(2)
    outputs[1][2].mul_(2)
    return finish(outputs, *xs)


def an_inputs_data_set_by_a_call(apply: MapFunction) -> Any:
    (x,) = leaves(1)

    def set_data(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x * 3

    return finish([*apply([set_data], [(x,)]), x * x], x)


# Around the map's back: it may refuse these, but not give a wrong number, or lose a gradient, in silence.
ESCAPES = [a_state_with_history_kept_between_maps, an_auxiliary_loss_kept_on_a_module]
ESCAPES += [an_auxiliary_loss_beside_the_outputs]
ESCAPES += [an_input_returned_and_changed_in_place]
ESCAPES += [an_input_changed_in_place_after_it_was_returned, results_that_share_memory_changed_in_place]
ESCAPES += [a_tensor_that_no_look_finds_used_by_a_call_and_outside, a_constant_changed_in_place]
ESCAPES += [an_inputs_data_set_by_a_call]


@program
def a_once_differentiable_function_differentiated_twice(apply: MapFunction) -> Any:
    xs = leaves()
    outputs = apply([lambda x: IsOnceDifferentiable.apply(x)] * NUM_CALLS, [(x,) for x in xs])
    grads = torch.autograd.grad(loss_of([y**2 for y in outputs]), xs, create_graph=True)
    return finish([grad**2 for grad in grads], *xs)


@program
def a_backward_inside_the_forward(apply: MapFunction) -> Any:
    """A step of an inner loop, as in meta-learning, differentiable from outside."""
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

    def adapt(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            weight = dict(module.named_parameters())["weight"]
            (step,) = torch.autograd.grad((x @ weight).pow(2).mean(), weight, create_graph=True)
            return x @ (weight - 0.1 * step)

        return call

    return finish(apply([adapt(m) for m in modules], [(x,) for x in xs]), *xs, *parameters(modules))


@program
def a_nested_backward_over_parameters_with_hooks(apply: MapFunction) -> Any:
    """A hook runs for the backward inside the call and for the one around the map, each once."""
    modules, xs = seeded(lambda: nn.Linear(4, 4), 2), leaves(2)
    probe, log = leaves(1, 4)[0], []
    probe.register_hook(lambda grad: log.append(grad.sum().item()))

    class Probes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                (probe * 2).sum().backward(inputs=[probe])
            return grad * 2

    calls = [lambda x, m=modules[0]: Probes.apply(m(x)), lambda x, m=modules[1]: m(x) * probe]
    said = finish(apply(calls, [(x,) for x in xs]), *xs, *parameters(modules))
    return said, sorted(log), probe.grad


@program
def outputs_of_one_node_held_beside_what_was_computed_from_the_others(apply: MapFunction) -> Any:
    """The results of a map have one node, and so have the parts of a tensor."""
    xs = leaves()
    first = apply([torch.sin, torch.cos], [(xs[0],), (xs[1],)])
    second = apply([torch.exp, torch.tanh], [(first[0],), (xs[2],)])
    one, other = (xs[3] * 2).chunk(2, dim=1)
    third = other.exp()
    calls = [lambda x: x * first[1] * second[0], lambda x: x[:, :2] * one * third]
    return finish([*apply(calls, [(xs[2],), (xs[3],)]), *first, *second, third], *xs)
