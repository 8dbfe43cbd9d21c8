"""Hooks that a call registers on several tensors at once (`register_multi_grad_hook`), or for a map of its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd.recompute import Recompute
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.histories import copied, leaf

WATCHED: dict[
    str, Callable[..., list[Tensor]]
] = {  # of two inputs, a parameter, a tensor of a closure, one that is computed from all, a result
    "one input": lambda x, y, w, h, z, r: [x],
    "inputs": lambda x, y, w, h, z, r: [x, y],
    "an input and a parameter": lambda x, y, w, h, z, r: [w, x],
    "an input and a tensor from outside": lambda x, y, w, h, z, r: [x, h],
    "what it has computed": lambda x, y, w, h, z, r: [z],
    "its result": lambda x, y, w, h, z, r: [r],
    "its result and what it was computed from": lambda x, y, w, h, z, r: [z, r],
}
NUM_CALLS = 3


def calls_that_watch(apply: MapFunction, watched: Callable[..., list[Tensor]]) -> Any:
    xs, ys, ws = ([leaf(i + j) for i in range(NUM_CALLS)] for j in (1, 4, 7))
    inputs = [(xs[0], ys[0]), (xs[1] * 2, ys[1]), (copied(xs[2]), copied(ys[2]))]
    h = copied(leaf(9))
    seen: list[list[Any]] = [[] for _ in range(NUM_CALLS)]

    def note(index: int, grads: Any) -> None:
        seen[index].append([None if grad is None else grad.clone() for grad in grads])

    def call(index: int, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = x * y * ws[index] * h
        result = z.sin()
        register_multi_grad_hook(watched(x, y, ws[index], h, z, result), functools.partial(note, index))
        return result

    results = apply([functools.partial(call, i, h) for i in range(NUM_CALLS)], inputs)
    results[0].sum().backward(retain_graph=True)
    (results[1] + results[2]).sum().backward(inputs=[xs[1], ys[2]], retain_graph=True)
    sum(result.sum() for result in results).backward()
    return seen, [t.grad for t in (*xs, *ys, *ws)]


@pytest.mark.parametrize("watched", WATCHED.values(), ids=WATCHED)
def test_a_hook_on_several_tensors_of_a_call_sees_the_gradients_of_all(watched: Any) -> None:
    said = assert_same_program(
        functools.partial(calls_that_watch, watched=watched),
        native_apply=one_after_another,
        mapped_apply=parallel_apply,
        tolerance=1e-12,
    )
    assert not isinstance(said, Raised)


def test_a_hook_on_inputs_is_registered_again_by_a_second_run() -> None:
    def checkpointed(modules: Any, inputs: Any) -> list[Any]:
        return [checkpoint(m, *x, use_reentrant=False) for m, x in zip(modules, inputs, strict=True)]

    said = assert_same_program(
        functools.partial(calls_that_watch, watched=WATCHED["inputs"]),
        native_apply=checkpointed,
        mapped_apply=functools.partial(parallel_apply, recompute=True),
        tolerance=1e-12,
    )
    assert not isinstance(said, Raised)


def test_a_hook_on_inputs_in_a_map_within_a_map() -> None:
    def program(apply: MapFunction) -> Any:
        xs, ys = [leaf(1), leaf(2)], [leaf(3), leaf(4)]
        seen: list[list[Any]] = [[], []]

        def inner(index: int, x: Tensor, y: Tensor) -> Tensor:
            register_multi_grad_hook([x, y], lambda grads: seen[index].append([g.clone() for g in grads]))
            return x * y

        def outer(index: int, x: Tensor, y: Tensor) -> Tensor:
            return sum(apply([functools.partial(inner, index), torch.add], [(x, y), (x, y)]))  # type: ignore[return-value]

        results = apply([functools.partial(outer, i) for i in range(2)], list(zip(xs, ys, strict=True)))
        sum(result.sum() for result in results).backward()
        return seen, [t.grad for t in (*xs, *ys)]

    said = assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=1e-12
    )
    assert not isinstance(said, Raised)


def test_a_hook_on_an_input_and_on_what_the_call_computed_from_it_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"expected inputs of the call .* got inputs together with"
    ) as caught:
        calls_that_watch(parallel_apply, lambda x, y, w, h, z, r: [x, z])
    assert "raised by call 0" in str(caught.value.__notes__)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_a_hook_on_what_a_call_computes_for_a_map_of_its_own_runs_though_others_sleep(options: Any) -> None:
    """Those of the weight sleep in the call's own backward, which passes through the tensor and ends at the weight."""

    def program(apply: MapFunction) -> Any:
        xs, weight = [leaf(1), leaf(2)], leaf(3)
        seen: list[Tensor] = []
        weight.register_hook(lambda grad: seen.append(grad.clone()))

        def call(x: Tensor) -> Tensor:
            y = x * weight
            y.register_hook(lambda grad: grad * 2)
            return sum(apply([torch.sin, torch.cos], [(y,), (x,)]))  # type: ignore[return-value]

        sum(result.sum() for result in apply([call, call], [(x,) for x in xs])).backward()
        return seen, weight.grad, [x.grad for x in xs]

    said = assert_same_program(
        program,
        native_apply=one_after_another,
        mapped_apply=functools.partial(parallel_apply, **options),
        tolerance=1e-12,
    )
    assert not isinstance(said, Raised)


def test_a_hook_that_a_second_run_registers_on_an_input_runs_with_a_gradient_or_not_at_all() -> None:
    """The backward goes through a result that this input has not come to."""

    def program(apply: MapFunction) -> Any:
        x, y = leaf(1), leaf(2)

        def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a.register_hook(lambda grad: grad * 2)
            return a.sin(), b.sin()

        ((_, result),) = apply([call], [(x * 2, y)], recompute=True)
        result.sum().backward()
        return x.grad, y.grad

    said = assert_same_program(
        program, native_apply=checkpointed_loop, mapped_apply=parallel_apply, tolerance=1e-12
    )
    assert not isinstance(said, Raised)


def checkpointed_loop(modules: Any, inputs: Any, *, recompute: bool | Recompute) -> list[Any]:
    return [
        checkpoint(m, *x, use_reentrant=False, early_stop=False) if recompute else m(*x)
        for m, x in zip(modules, inputs, strict=True)
    ]


@pytest.mark.parametrize("watched", ["input", "weight"])
@pytest.mark.parametrize("outer", [False, True], ids=["outer kept", "outer recomputed"])
@pytest.mark.parametrize("inner", [False, True], ids=["inner kept", "inner recomputed"])
def test_hooks_in_nested_maps_run_as_often_as_under_nested_checkpoints(
    watched: str, outer: bool, inner: bool
) -> None:
    """A second run registers its hooks again, also on the weight where the inner backwards end.

    Not with an early stop, which in a loop comes before the last call, and among concurrent calls when all have run.
    """
    to_the_end = Recompute(early_stop=False)

    def program(apply: MapFunction) -> Any:
        x, names = leaf(1), [0, 1, *itertools.product((0, 1), (0, 1))]
        weights = {name: leaf(3 + i) for i, name in enumerate(names)}
        seen: dict[Any, list[float]] = {}

        def watch(tensor: Tensor, name: Any) -> None:
            def hook(grad: Tensor) -> Tensor:
                seen.setdefault(name, []).append(round(grad.sum().item(), 6))
                return grad * 2

            tensor.register_hook(hook)

        def inner_call(name: Any, x: Tensor) -> Tensor:
            watch(x if watched == "input" else weights[name], name)
            return (x * weights[name]).sin()

        def call(name: int, x: Tensor) -> Tensor:
            calls = [functools.partial(inner_call, (name, i)) for i in range(2)]
            watch(x if watched == "input" else weights[name], name)
            return weights[name] * sum(apply(calls, [(x,), (x * 2,)], recompute=inner and to_the_end))  # type: ignore[return-value]

        inputs = [(x * 1,), (x * 2,)]
        results = apply(
            [functools.partial(call, i) for i in range(2)], inputs, recompute=outer and to_the_end
        )
        sum(result.sum() for result in results).backward()
        return {name: sorted(own) for name, own in seen.items()}, x.grad, [w.grad for w in weights.values()]

    said = assert_same_program(
        program, native_apply=checkpointed_loop, mapped_apply=parallel_apply, tolerance=1e-9
    )
    assert not isinstance(said, Raised)


class PutsAHook(torch.autograd.Function):
    """Puts a hook on a weight in its backward, before that reaches the weight."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.put = weight.register_hook
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.put(lambda grad: grad * 2)
        return grad, None


@pytest.mark.parametrize("by", ["checkpoint", "function"])
@pytest.mark.parametrize("options", [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}], ids=str)
def test_a_hook_that_is_put_on_a_weight_while_a_calls_backward_runs_is_refused(
    by: str, options: dict[str, Any]
) -> None:
    """It had seen the gradient of one call, and then the whole one: four times the gradient, in silence."""
    weight = torch.ones(3, requires_grad=True)

    def with_a_hook(x: Tensor) -> Tensor:
        weight.register_hook(lambda grad: grad * 2)
        return (x * weight).exp()

    def call(x: Tensor) -> Tensor:
        if by == "checkpoint":
            return checkpoint(with_a_hook, x, use_reentrant=False)  # type: ignore[return-value]
        return PutsAHook.apply(x * weight, weight)  # type: ignore[return-value]

    x = torch.ones(3, requires_grad=True)
    results = parallel_apply([call, call], [(x,), (x,)], **options)
    with pytest.raises(
        RuntimeError, match=r"got one put on a tensor of shape .* while a call's backward ran"
    ):
        torch.stack(results).sum().backward()
