"""Results in objects that are no pytrees are results like others: concurrent, of any order, freed, in every option.

That their values and gradients are those of a plain loop, `test_parallel_apply` and others show with programs of
`module_programs_results`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply, split_backward
from moe_autograd.autograd.contents.in_objects import tensors_in_objects
from tests.support.comparing_modules import assert_same_modules_program
from tests.support.comparison import MapFunction, loss_of, one_after_another
from tests.support.functions_waiting import Meets
from tests.support.module_programs import NUM_CALLS, leaves, parameters, seeded
from tests.support.module_programs_results import Frozen, Output, Slots


def boxed(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Output]:
    return lambda x: Output(module(x), x)


def test_the_backwards_of_results_in_objects_meet() -> None:
    barrier = threading.Barrier(NUM_CALLS)
    xs = leaves()
    calls = [lambda x: Frozen(Slots(Meets.apply(x, barrier)), "")] * NUM_CALLS
    outputs = parallel_apply(calls, [(x,) for x in xs])
    torch.stack([output.inner.first for output in outputs]).sum().backward()
    assert all(x.grad is not None and x.grad.eq(2).all() for x in xs)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_second_order_agrees_with_numerical_differentiation(recompute: bool) -> None:
    (weight,), xs = leaves(1, 3), leaves(2, 2, 3)

    def compute(weight: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        calls = [lambda x: Output((x * weight).sin(), x.exp()), lambda x: Normal(x * weight, weight.exp())]
        output, normal = parallel_apply(calls, [(x,) for x in xs], recompute=recompute)
        return output.hidden, output.scores, output.total, normal.log_prob(torch.ones_like(weight))

    assert torch.autograd.gradcheck(compute, (weight, *xs))
    assert torch.autograd.gradgradcheck(compute, (weight, *xs))


def test_gradients_that_somebody_asks_for_are_not_said_to_be_missing() -> None:
    """`allow_unused=True` said `None`: the graph of what an object held ended where the call took its input."""

    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        loss = loss_of([output.hidden for output in apply([boxed(m) for m in modules], [(x,) for x in xs])])
        return torch.autograd.grad(loss, [*xs, *parameters(modules)], allow_unused=True)

    assert all(isinstance(grad, Tensor) for grad in assert_same_modules_program(program))


def test_a_backward_through_some_of_what_objects_hold_runs_no_more() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        outputs = apply([boxed(m) for m in modules], [(x.sin(),) for x in xs])
        (outputs[0].scores.sum() + outputs[1].total).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)
    assert_same_modules_program(program, functools.partial(parallel_apply, defer_weight_grads=True))


class Both(tuple[Tensor, Tensor]):
    """A tuple that may have attributes."""


class Doubles(collections.namedtuple("Doubles", "first second")):
    """Takes other arguments than a namedtuple does, and has no attributes."""

    __slots__ = ()

    def __new__(cls, first: Tensor) -> Doubles:
        return super().__new__(cls, first, 2 * first)


class Totals(collections.namedtuple("Totals", "first second")):
    """A namedtuple with a method, and with attributes."""

    def total(self) -> Tensor:
        return self.first + self.second  # type: ignore[no-any-return]


MAKE_TUPLES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda first, second: Both((first, second)),
    lambda first, second: Doubles(first * second),
    lambda first, second: Totals(first, second),
]


@pytest.mark.parametrize("make", MAKE_TUPLES)
@pytest.mark.parametrize("give", MAKE_TUPLES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}])
def test_tuples_of_other_classes_are_taken_and_returned(
    make: Any, give: Any, is_nested: bool, options: dict[str, bool]
) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

        def call(module: nn.Module, given: Any) -> Any:
            made = make(module(given[0]), given[1])
            if hasattr(made, "__dict__"):
                made.more = [module(given[1]), Both((given[0].sin(), made[0]))]
                made.more[1].inner = made[0].exp()
            return [made, {"same": made}] if is_nested else made

        calls = [functools.partial(call, module) for module in modules]
        outputs = apply(calls, [(give(x.sin(), x.exp()),) for x in xs])
        if is_nested:
            outputs = [both["same"] for _, both in outputs]
        found = [one for output in outputs for one in output]
        for output in outputs:
            assert type(output) is type(make(xs[0], xs[0]))
            if isinstance(output, Totals):
                found.append(output.total())
            if hasattr(output, "__dict__"):
                more, pair = output.more
                found += [more, *pair, pair.inner]
        loss_of(found).backward()
        return [*found, *[x.grad for x in [*xs, *parameters(modules)]]]

    mapped = functools.partial(parallel_apply, **options)
    if options.get("recompute") and give is MAKE_TUPLES[1]:
        with pytest.raises(TypeError, match=r"Doubles\.__new__\(\) takes 2"):  # of torch.utils.checkpoint
            program(mapped)
        return
    assert_same_modules_program(program, mapped)


def test_hooks_and_retained_gradients_are_those_of_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        xs, seen = leaves(), [Tensor()] * NUM_CALLS

        def call(x: Tensor) -> Slots:
            results = x.sin(), x.exp()
            results[0].register_hook(lambda grad: grad * 3)
            return Slots(results)

        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
        for i, output in enumerate(outputs):
            output.first[0].retain_grad()
            output.first[1].register_hook(lambda grad, i=i: seen.__setitem__(i, grad.clone()))
        loss_of([one for output in outputs for one in output.first]).backward()
        return [output.first[0].grad for output in outputs], seen, [x.grad for x in xs]

    assert_same_modules_program(program)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_an_object_holds_the_inputs_themselves(mode: Callable[[], Any]) -> None:
    xs = leaves()
    with mode():
        outputs = parallel_apply([boxed(torch.sin)] * NUM_CALLS, [(x,) for x in xs])
    assert all(output.scores is x for output, x in zip(outputs, xs, strict=True))
    assert not any(output.hidden.requires_grad for output in outputs)


def test_a_map_within_a_call_returns_objects_that_the_call_returns() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

        def call(x: Tensor) -> Any:
            return Frozen(apply([boxed(m) for m in modules], [(x,)] * NUM_CALLS), "all")

        outputs = apply([call] * 2, [(x.exp(),) for x in xs[:2]])
        loss_of([inner.hidden for output in outputs for inner in output.inner]).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)


def test_the_backward_can_be_split() -> None:
    def gradients(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        outputs = apply([boxed(m) for m in modules], [(x.sin(),) for x in xs])
        found, pending = split_backward(
            loss_of([output.hidden for output in outputs]), None, xs, parameters(modules)
        )
        return found, pending.run()

    assert_same_modules_program(gradients)


@pytest.mark.usefixtures("no_gc")
def test_an_object_and_what_its_call_saved_go_with_their_last_user() -> None:
    saved: list[weakref.ref[Tensor]] = []

    def call(x: Tensor) -> Output:
        y = x.sin()
        saved.append(weakref.ref(y))
        return Output(y.exp().cos(), [x])

    outputs = parallel_apply([call] * NUM_CALLS, [(x,) for x in leaves()])
    objects = [weakref.ref(output) for output in outputs]
    loss_of([output.hidden for output in outputs]).backward()
    assert all(reference() is None for reference in saved)
    del outputs
    assert all(reference() is None for reference in objects)


def test_nothing_that_the_objects_classes_define_runs() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    class Closed(dict[str, Any]):
        __getattr__ = __setattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __eq__ = refuse
        __hash__ = keys = values = items = copy = refuse  # type: ignore[assignment]

    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> Closed:
            closed = Closed()
            dict.__setitem__(closed, "y", x.sin())
            object.__setattr__(closed, "z", x.cos())
            return closed

        xs = leaves()
        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
        loss_of([one for o in outputs for one in (dict.__getitem__(o, "y"), o.z)]).backward()
        return [x.grad for x in xs]

    assert_same_modules_program(program)


def test_an_expert_of_a_layer_that_returns_an_object_is_refused_by_name() -> None:
    class Expert(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x)

    layer = MixtureOfExperts(TopKRouter(4, 2, top_k=1), [Expert(), Expert()])
    with pytest.raises(TypeError, match=r"expected a tensor from an expert, got Output \(expert_index=\d\)"):
        layer(torch.randn(3, 4))


def test_what_a_module_holds_that_a_call_returns_is_no_result_and_says_so() -> None:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

    def call(module: nn.Module, x: Tensor) -> Any:
        module.last = module(x)
        return dataclasses.replace(Output(x), scores=module)

    native, mapped = (
        apply([call] * NUM_CALLS, list(zip(modules, xs, strict=True)))
        for apply in (one_after_another, parallel_apply)
    )
    assert [output.scores for output in native] == [output.scores for output in mapped] == modules
    with pytest.raises(RuntimeError, match="expected tensors with history to leave a call as its result"):
        loss_of([output.scores.last for output in mapped]).backward()


def before_all(tensor: Tensor) -> Tensor:
    """Let a tensor's node have a number that no thread comes to, so that it never passes for one of a call."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(1 << 40)  # type: ignore[attr-defined]
    return tensor


class Keeps(nn.Module):
    """Returns an object that it keeps, where no look finds what that holds."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), kept

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.kept


def test_what_objects_held_before_the_call_stays_as_it_is() -> None:
    """It was tied again by each map, so that its history grew from step to step."""

    def program(apply: MapFunction) -> Any:
        (weight,), xs = leaves(1, 3, 4), leaves()
        held = before_all(weight.exp())
        modules = seeded(lambda: Keeps(Output(held)))
        for _ in range(3):
            outputs = apply(modules, [(x,) for x in xs])
            loss_of([y for y, _ in outputs]).backward()
        same = [kept.hidden is held for _, kept in outputs]
        loss_of([kept.hidden for _, kept in outputs]).backward(retain_graph=True)
        held.sum().backward()
        return same, [x.grad for x in [weight, *xs, *parameters(modules)]]

    assert_same_modules_program(program)


def test_what_a_thread_of_the_calls_own_computed_is_a_result() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

        def call(module: nn.Module, x: Tensor, constant: Tensor) -> Output:
            found: list[Tensor] = []
            compute = lambda: found.extend([before_all(module(x)), before_all(module(constant).exp())])  # noqa: E731
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            return Output(found[0], [found[1], found[1].cos()])

        inputs = [(*both, both[1].detach()) for both in zip(modules, xs, strict=True)]
        outputs = apply([call] * NUM_CALLS, inputs)
        loss_of([one for o in outputs for one in (o.hidden, *o.scores)]).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)


def test_of_an_object_that_leads_to_very_many_others_the_nearest_are_looked_into() -> None:
    """Without end, a returned object with a large graph of others held up its map for seconds."""
    near, far = leaves(2)
    chain: Any = Slots(far)
    for _ in range(20_000):
        chain = [chain]
    held = Output(near, [chain, Slots(near.sin())])
    assert [tensor is far for _, tensor in tensors_in_objects([held])] == [False] * 3


class Pair(collections.namedtuple("Pair", ["first", "second"])):
    """Not made from two tensors alone, and with an attribute."""

    name: str

    def __new__(cls, first: Any, second: Any, *, name: str) -> Pair:
        pair = super().__new__(cls, first, second)
        pair.name = name
        return pair


class Row(tuple[Any, ...]):
    pass


def test_tuples_of_any_class_in_objects_hold_results() -> None:
    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> Output:
            pair = Pair(x.exp(), Row((x.sin(), 3)), name="pair")
            return Output(x.cos(), (pair, x.max(dim=0), torch.Size([2, 3])))

        xs = leaves()
        held = [output.scores for output in apply([call] * NUM_CALLS, [(x,) for x in xs])]
        loss_of([one for p, m, _ in held for one in (p.first, p.second[0], m.values)]).backward()
        said = [(type(p), p.name, type(p.second), p.second[1], type(m), size) for p, m, size in held]
        return said, [x.grad for x in xs]

    assert_same_modules_program(program)


def test_an_object_whose_class_says_what_its_attributes_are_passes_through() -> None:
    class Proxy:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError

    outputs = parallel_apply([lambda x: (x, Proxy())] * NUM_CALLS, [(x,) for x in leaves()])
    assert all(type(proxy) is Proxy for _, proxy in outputs)
