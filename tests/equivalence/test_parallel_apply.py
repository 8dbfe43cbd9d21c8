"""`parallel_apply` gives what a plain loop over the modules gives: outputs, gradients, buffers, errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same,
    assert_same_program,
    attempt,
    loss_of,
    one_after_another,
)
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import NUM_CALLS, PROGRAMS, leaves, parameters, seeded
from tests.support.module_programs_shared import ESCAPES, hidden_from_every_look, hooks_on_a_tensor

ORDER = 1e-12  # gradients that several calls share may be added up in another order


def assert_same_modules_program(
    program: Callable[[MapFunction], Any], mapped: MapFunction = parallel_apply
) -> Any:
    return assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=ORDER)


def name_of(program: Callable[[MapFunction], Any]) -> str:
    return program.__name__


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same(program: Callable[[MapFunction], Any]) -> None:
    said = assert_same_modules_program(program)
    refused = (
        "a_saved_",
        "a_base_",
        "a_once_",
        "slices_changed_in_place_by",
    )  # by PyTorch, and so by the map
    assert isinstance(said, Raised) == program.__name__.startswith(refused)


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same_one_call_at_a_time(program: Callable[[MapFunction], Any]) -> None:
    assert_same_modules_program(
        program, lambda *args, **kwargs: parallel_apply(*args, max_concurrency=1, **kwargs)
    )


def checkpointed_one_after_another(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
) -> list[Any]:
    checkpointed = [functools.partial(checkpoint, module, use_reentrant=False) for module in modules]
    return one_after_another(checkpointed, inputs, kwargs_tup)


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same_when_it_recomputes_as_under_checkpoint(
    program: Callable[[MapFunction], Any],
) -> None:
    recomputing = functools.partial(parallel_apply, recompute=True)
    if program.__name__ == "slices_changed_in_place":  # both refuse it; which version they expect is another
        assert isinstance(attempt(program, recomputing), Raised)
        assert isinstance(attempt(program, checkpointed_one_after_another), Raised)
        return
    assert_same_program(
        program,
        native_apply=checkpointed_one_after_another,
        mapped_apply=recomputing,
        tolerance=ORDER,
    )


def test_a_hook_on_a_tensor_that_no_look_finds_runs_once_a_call() -> None:
    """A limit, said in the docstring of `module_calls`: the gradients are right, the hook sees them in parts."""
    ways = (one_after_another, parallel_apply)
    native, mapped = (hooks_on_a_tensor(apply, hidden_from_every_look) for apply in ways)
    assert_same(native[0], mapped[0], tolerance=ORDER)
    assert len(native[1]) == 1
    assert_same(native[1][0], sum(mapped[1]), tolerance=ORDER)


@pytest.mark.parametrize("program", ESCAPES, ids=name_of)
def test_what_passes_behind_the_maps_back_is_differentiated_right_or_refused(
    program: Callable[[MapFunction], Any],
) -> None:
    native, mapped = program(one_after_another), attempt(program, parallel_apply)
    if not isinstance(mapped, Raised):
        assert_same(native, mapped, tolerance=ORDER)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_history_is_built_where_gradients_are_off(mode: Callable[[], Any]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        with mode():
            return apply(modules, [(x,) for x in xs])

    assert_same_modules_program(program)


@pytest.mark.parametrize("wanted", ["inputs", "parameters", "one parameter", "one input", "a mixture"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_gradients_of_a_few_tensors_are_the_same_and_no_others_are_touched(wanted: str, how: str) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        weights = parameters(modules)
        chosen = {
            "inputs": xs,
            "parameters": weights,
            "one parameter": [weights[3]],
            "one input": [xs[2]],
            "a mixture": [xs[0], weights[1], weights[6]],
        }[wanted]
        loss = loss_of(apply(modules, [(x * 1,) for x in xs]))
        grads = torch.autograd.grad(loss, chosen) if how == "grad" else loss.backward(inputs=chosen)
        return grads, [x.grad for x in [*xs, *weights]]

    assert_same_modules_program(program)


@pytest.mark.parametrize("chosen", [[0], [3], [1, 2]])
def test_a_loss_over_some_outputs_leaves_the_other_modules_without_gradients(chosen: list[int]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        outputs = apply(modules, [(x,) for x in xs])
        loss_of([outputs[i] for i in chosen]).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)


def test_one_backward_after_another_over_different_outputs_gives_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        outputs = apply(modules, [(x,) for x in xs])
        for output in outputs:
            loss_of(output).backward(retain_graph=True)
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)


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


def test_the_second_order_is_the_same() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))), leaves()
        weights = parameters(modules)
        outputs = apply(modules, [(x.sin(),) for x in xs])
        grads = torch.autograd.grad(loss_of([y**2 for y in outputs]), [*xs, *weights], create_graph=True)
        loss_of([grad**2 for grad in grads]).backward()
        return [grad.detach().clone() for grad in grads], [x.grad for x in [*xs, *weights]]

    assert_same_modules_program(program)


def test_the_second_order_through_shared_weights_and_closures_agrees_with_numerical_differentiation() -> None:
    (weight, scale), xs = leaves(2, 3), leaves(2, 2, 3)

    def compute(weight: Tensor, scale: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        hidden = weight.sin()
        calls = [lambda x: (x * hidden * scale).tanh(), lambda x: (x + hidden).sin() * scale]
        return tuple(parallel_apply(calls, [(x,) for x in xs]))

    assert torch.autograd.gradcheck(compute, (weight, scale, *xs))
    assert torch.autograd.gradgradcheck(compute, (weight, scale, *xs))


def test_a_second_backward_without_retain_graph_raises_as_pytorch() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), leaves()
        loss = loss_of(apply(modules, [(x,) for x in xs]))
        loss.backward()
        loss.backward()

    assert isinstance(assert_same_modules_program(program), Raised)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failing_module_raises_its_own_error_with_a_note(where: str) -> None:
    def fail(x: Tensor) -> Tensor:
        if where == "forward":
            raise LookupError("broken")
        y = x * 1
        y.register_hook(lambda grad: {}["broken"])
        return y

    xs = leaves()
    with pytest.raises(LookupError, match="broken") as caught:
        loss_of(parallel_apply([torch.sin, torch.cos, fail, fail], [(x,) for x in xs])).backward()
    (note,) = caught.value.__notes__
    assert "2" in note
    assert where in note
    assert "1 other" in note


@pytest.mark.parametrize(("num_inputs", "num_kwargs"), [(1, 2), (3, 2), (2, 1)])
def test_lists_of_different_lengths_are_refused(num_inputs: int, num_kwargs: int) -> None:
    with pytest.raises(ValueError, match=f"2 modules, {num_inputs} inputs and {num_kwargs} kwargs"):
        parallel_apply([torch.sin] * 2, [(torch.ones(2),)] * num_inputs, [{}] * num_kwargs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_taken_where_pytorchs_functions_take_them_and_else_refused_by_name() -> None:
    def program(apply: MapFunction, layout: torch.layout) -> Any:
        xs = [leaves(1, length, 4)[0] for length in (2, 3)]
        nested = torch.nested.as_nested_tensor(xs, layout=layout)
        outputs = apply([torch.sin] * 2, [(nested,)] * 2)
        loss_of([part for output in outputs for part in output.unbind()]).backward()
        return [x.grad for x in xs]

    assert_same_modules_program(functools.partial(program, layout=torch.jagged))
    with pytest.raises(TypeError, match=r"got a nested tensor .* Make it with layout=torch.jagged"):
        program(parallel_apply, torch.strided)
    to_nested = lambda *xs: torch.nested.as_nested_tensor(list(xs))  # noqa: E731
    with pytest.raises(TypeError, match=r"got a nested tensor .* Make it with layout=torch.jagged"):
        parallel_apply([to_nested] * 2, [tuple(leaves(2))] * 2)


def test_no_modules_give_an_empty_list() -> None:
    assert parallel_apply([], []) == []
