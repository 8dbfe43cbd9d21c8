"""`parallel_apply` gives what a plain loop over the modules gives: outputs, gradients, buffers, errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

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


class NormalizesOnceLetIn(nn.Module):
    """Its call for the first input waits until a later call of the map opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.gate = threading.Event()

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if is_first:
            assert self.gate.wait(PATIENCE_S)
        return cast(Tensor, self.norm(x))

    def open_the_gate(self, x: Tensor) -> Tensor:
        self.gate.set()
        return x * 2


def test_running_statistics_of_a_module_in_several_places_are_those_of_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        (module,) = seeded(NormalizesOnceLetIn, 1)
        assert isinstance(module, NormalizesOnceLetIn)
        if apply is one_after_another:
            module.gate.set()
        xs = leaves(9)
        calls = [module] * 8 + [module.open_the_gate]
        outputs = apply(calls, [*[(x, i == 0) for i, x in enumerate(xs[:8])], (xs[8],)])
        loss_of(outputs).backward()
        return list(module.buffers()), [x.grad for x in [*xs, *module.parameters()]]

    assert_same_modules_program(program)


def test_a_module_in_several_places_fails_as_in_a_loop_and_keeps_nobody_waiting() -> None:
    module = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="expected 2D or 3D input") as caught:
        parallel_apply([module] * 8, [(torch.ones(4),), *[(torch.randn(5, 4),)] * 7])
    assert any("call 0" in note for note in caught.value.__notes__)


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


def test_no_modules_give_an_empty_list() -> None:
    assert parallel_apply([], []) == []
