"""Hooks on parameters, inputs, outputs and modules of a map run once, with what they see in a plain loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_modules_program
from tests.support.comparison import (
    MapFunction,
    Raised,
    loss_of,
    one_after_another,
)
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import NUM_CALLS, leaves, parameters, seeded


def test_hooks_on_parameters_run_once_with_the_whole_gradient() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        modules[3] = modules[0]  # its gradient comes from two calls
        log: list[Any] = []
        for i, p in enumerate(parameters(modules[:3])):
            p.register_hook(lambda grad, i=i: (log.append(("tensor", i, grad.clone())), grad * 2)[1])
            p.register_post_accumulate_grad_hook(
                lambda q, i=i: log.append(("accumulated", i, q.grad.clone()))
            )
        loss_of(apply(modules, [(x,) for x in xs])).backward()
        return sorted(log, key=lambda entry: entry[:2]), [p.grad for p in parameters(modules)]

    assert len(assert_same_modules_program(program)[0]) == 2 * 6


def test_hooks_on_inputs_and_outputs_run_once_and_may_change_the_gradient() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        middles = [x * 2 for x in xs]
        log: list[Any] = []

        def watch(tensors: list[Tensor], name: str) -> None:
            for i, tensor in enumerate(tensors):
                tensor.retain_grad()
                tensor.register_hook(lambda grad, i=i: (log.append((name, i, grad.clone())), grad * 3)[1])

        watch(middles, "input")
        watch(xs, "leaf")
        outputs = apply(modules, [(m,) for m in middles])
        watch(outputs, "output")
        loss_of(outputs).backward()
        return sorted(log, key=lambda entry: entry[:2]), [x.grad for x in [*xs, *middles, *outputs]]

    assert len(assert_same_modules_program(program)[0]) == 3 * NUM_CALLS


def test_hooks_on_what_only_calls_without_a_gradient_use_do_not_run() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        inputs = [*xs[:2], *[x * 1 for x in xs[2:]]]
        for tensor in [*inputs, *parameters(modules)]:
            tensor.register_hook(lambda grad: grad * 2)
        outputs = apply(modules, [(x,) for x in inputs])
        loss_of([outputs[1], outputs[3]]).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert not isinstance(assert_same_modules_program(program), Raised)


@pytest.mark.parametrize("apply", [one_after_another, parallel_apply])
def test_a_hook_after_an_accumulation_that_returns_something_is_refused(apply: MapFunction) -> None:
    (weight,) = leaves(1)
    weight.register_post_accumulate_grad_hook(lambda tensor: (tensor,))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="hook returned"):
        sum(y.sum() for y in apply([lambda x: x * 2] * 2, [(weight,)] * 2)).backward()


def test_hooks_registered_inside_a_module_run_once() -> None:
    def program(apply: MapFunction) -> Any:
        log: list[Any] = []

        def call(x: Tensor) -> Tensor:
            inside = x.sin()
            inside.register_hook(lambda grad: (log.append(grad.sum().item()), grad * 2)[1])
            return inside * x

        xs = leaves()
        loss_of(apply([call] * NUM_CALLS, [(x,) for x in xs])).backward()
        return sorted(log), [x.grad for x in xs]

    assert_same_modules_program(program)


@pytest.mark.parametrize("returns", ["result", "input", "both", "changed"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own_inputs", "one_input"])
def test_hooks_that_a_call_registers_on_its_input_see_the_whole_gradient_once(
    returns: str, is_shared: bool
) -> None:
    def program(apply: MapFunction) -> Any:
        log: list[Any] = []

        def call(x: Tensor) -> Any:
            if returns == "changed" and not is_shared:
                x.mul_(2)
            x.register_hook(lambda grad: (log.append(round(grad.sum().item(), 9)), grad * 2)[1])
            x.register_hook(lambda grad: grad * 100).remove()
            return {"input": x, "both": (x, x.sin())}.get(returns, x.cos())

        leaf = leaves()
        xs = [leaf[0] * 1] * NUM_CALLS if is_shared else [x * 1 for x in leaf]
        xs[0].register_hook(lambda grad: (log.append(round(grad.sum().item(), 9)), grad + 1)[1])
        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
        loss_of(outputs).backward()
        return sorted(log), [x.grad for x in leaf]

    assert_same_modules_program(program)


def test_a_hook_that_a_call_registers_on_its_input_can_be_removed_later() -> None:
    def program(apply: MapFunction) -> Any:
        handles: list[Any] = []
        xs = leaves()
        outputs = apply(
            [lambda x: (handles.append(x.register_hook(lambda grad: grad * 2)), x * x)[1]] * NUM_CALLS,
            [(x,) for x in xs],
        )
        for handle in handles:
            handle.remove()
        loss_of(outputs).backward()
        return [x.grad for x in xs]

    assert_same_modules_program(program)


def test_hooks_on_one_input_of_several_calls_run_in_the_order_of_the_calls() -> None:
    """The first call registers its hook last."""

    def program(apply: MapFunction) -> Any:
        registered = threading.Event()
        if apply is one_after_another:
            registered.set()

        def first(x: Tensor) -> Tensor:
            assert registered.wait(PATIENCE_S)
            x.register_hook(lambda grad: grad * 2)
            return x.sin()

        def second(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: grad + 1)
            registered.set()
            return x.cos()

        (x,) = leaves(1)
        loss_of(apply([first, second], [(x,)] * 2)).backward()
        return x.grad

    assert_same_modules_program(program)


def test_a_backward_inside_one_call_runs_no_hook_on_another_calls_input() -> None:
    def program(apply: MapFunction) -> Any:
        has_hook, log = threading.Event(), []

        def registers(x: Tensor) -> Tensor:
            x.register_hook(log.append)
            has_hook.set()
            return x.sin()

        def differentiates(x: Tensor) -> Tensor:
            assert has_hook.wait(PATIENCE_S)
            (slope,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
            return slope * x

        xs = leaves(2)
        loss_of(apply([registers, differentiates], [(x,) for x in xs])).backward()
        return log, [x.grad for x in xs]

    assert_same_modules_program(program)


@pytest.mark.parametrize("used", [[1, 3], [0], [0, 1, 2, 3]], ids=str)
def test_a_hook_on_several_tensors_runs_though_some_get_no_gradient(used: list[int]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        seen: list[list[Tensor | None]] = []
        torch.autograd.graph.register_multi_grad_hook([*xs, *parameters(modules)], seen.append)
        for _ in range(2):
            outputs = apply(modules, [(x,) for x in xs])
            loss_of([outputs[i] for i in used]).backward()
        return [[None if grad is None else grad.clone() for grad in grads] for grads in seen]

    assert len(assert_same_modules_program(program)) == 2


def test_a_hook_on_an_input_counts_in_the_backwards_that_its_call_starts() -> None:
    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: grad * 2)
            (slope,) = torch.autograd.grad((x * x).sum(), x)
            return x * slope.exp()

        xs = leaves()
        loss_of(apply([call] * NUM_CALLS, [(x,) for x in xs])).backward()
        return [x.grad for x in xs]

    assert_same_modules_program(program)


def test_an_input_whose_gradient_a_call_wants_retained_has_it() -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        middles = [x * 2 for x in xs]
        outputs = apply([lambda x: (x.retain_grad(), x.sin())[1]] * NUM_CALLS, [(m,) for m in middles])
        loss_of([*outputs, *middles]).backward()
        return [m.grad for m in middles], [x.grad for x in xs]

    assert_same_modules_program(program)


def test_what_calls_hold_retains_its_gradient_as_in_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        held = xs[0] * 2
        held.retain_grad()
        outputs = apply([lambda x: x * held] * NUM_CALLS, [(x,) for x in xs])
        for _ in range(2):
            loss_of(outputs).backward(retain_graph=True)
        return held.grad, [x.grad for x in xs]

    assert_same_modules_program(program)


def test_hooks_on_modules_run_once_and_may_change_what_passes() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        log: list[str] = []
        for module in modules:
            module.register_forward_pre_hook(lambda m, args: (log.append("pre"), (args[0] + 1,))[1])
            module.register_forward_hook(lambda m, args, out: (log.append("post"), out * 2)[1])
            module.register_full_backward_pre_hook(lambda m, grads: (log.append("back"), (grads[0] * 3,))[1])
            module.register_full_backward_hook(lambda m, ins, outs: (log.append("done"), (ins[0] * 5,))[1])
        loss_of(apply(modules, [(x,) for x in xs])).backward()
        return sorted(log), [x.grad for x in [*xs, *parameters(modules)]]

    assert len(assert_same_modules_program(program)[0]) == 4 * NUM_CALLS


def test_a_hook_counts_for_all_ways_of_a_tensor_that_a_call_takes_and_holds() -> None:
    """It slept where the inner backward went through the tensor, to a weight that the call has as well."""

    def program(apply: MapFunction) -> Any:
        (weight,), (x,) = leaves(1, 4, 4), leaves(1)
        hidden = x @ weight
        hidden.register_hook(lambda grad: grad * 2)
        outputs = apply([lambda h: (h @ weight) * hidden, torch.sin], [(hidden,), (hidden,)])
        loss_of(outputs).backward()
        return x.grad, weight.grad

    assert_same_modules_program(program)
