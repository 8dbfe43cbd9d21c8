"""`parallel_apply` gives what a plain loop over the modules gives: outputs, gradients, buffers, errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from tests.support.comparing_modules import ORDER, PROGRAMS, assert_same_modules_program, name_of
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same,
    assert_same_program,
    attempt,
    loss_of,
    one_after_another,
)
from tests.support.module_programs import finish, gradients_of_a_few, leaves, parameters, seeded
from tests.support.module_programs_shared import ESCAPES, hidden_from_every_look, hooks_on_a_tensor
from tests.support.module_programs_tensors import CONTAINERS


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same(program: Callable[[MapFunction], Any]) -> None:
    said = assert_same_modules_program(program)
    # PyTorch refuses these, and so does the map.
    refused = ("a_saved_", "a_base_", "a_once_", "slices_changed_in_place_by")
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


@pytest.mark.parametrize("program", ESCAPES + CONTAINERS, ids=name_of)
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
    assert_same_modules_program(functools.partial(gradients_of_a_few, wanted=wanted, how=how))


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


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c"]])
def test_names_have_to_be_as_many_as_the_calls(names: list[str]) -> None:
    for module in (torch.sin, nn.Linear(2, 2)):
        with pytest.raises(
            ValueError, match=f"parallel_apply: expected as many names as modules, 2, got {len(names)}"
        ):
            parallel_apply([module] * 2, [(torch.ones(2),)] * 2, names=names)


def test_one_module_and_keyword_arguments_that_are_no_dict_are_refused_by_name() -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(
        TypeError, match=r"expected several modules, got one Linear\. Write \[module\] \* len"
    ):
        parallel_apply(module, [x, x])  # type: ignore[arg-type]
    for modules in ({"a": module}, nn.ModuleDict({"a": module})):
        with pytest.raises(
            TypeError, match=r"expected modules in a sequence, got a .*[dD]ict\. Pass its values"
        ):
            parallel_apply(modules, [x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a dict of keywords for each call, got NoneType"):
        parallel_apply([module], [x], [None])  # type: ignore[list-item]


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
    small = torch.nested.as_nested_tensor(leaves(2), layout=torch.strided)
    with pytest.raises(TypeError, match=r"got a nested tensor .* Make it with layout=torch.jagged"):
        parallel_apply([nn.Linear(4, 4)] * 2, [(small,)] * 2)  # small enough to be called without a thread


def test_weights_that_parametrize_keeps_for_a_while_serve_several_maps() -> None:
    def program(apply: MapFunction) -> Any:
        modules = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        xs = leaves()
        outputs: Any = xs
        with nn.utils.parametrize.cached():
            for _ in range(3):
                outputs = apply([lambda x, m=m: m(x).tanh() for m in modules], [(x,) for x in outputs])
            squares = [module.weight.square() for module in modules]  # type: ignore[union-attr, operator]
        return finish([*outputs, *squares], *xs, *parameters(modules))

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_no_modules_give_an_empty_list() -> None:
    assert parallel_apply([], []) == []


@pytest.mark.filterwarnings("ignore:`torch.jit")  # they are deprecated
def test_scripted_traced_and_rewritten_modules_are_called_as_others() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), leaves()
        scripted, rewritten = torch.jit.script(modules[0]), torch.fx.symbolic_trace(modules[2])
        traced = torch.jit.trace(modules[1], torch.ones(3, 4, dtype=torch.float64), check_trace=False)
        outputs = apply([scripted, traced, rewritten, modules[3]], [(x,) for x in xs])
        return finish(outputs, *xs, *parameters(modules)), [list(m.buffers()) for m in modules]

    assert_same_modules_program(program)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_calls_that_share_a_scripted_batch_norm_side_by_side_are_told() -> None:
    module = torch.jit.script(nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        parallel_apply([module] * 2, [(torch.randn(3, 4),)] * 2)


def test_the_arguments_are_those_of_torchs_parallel_apply() -> None:
    """Up to `devices`: calls run where their tensors are."""
    ours, torchs = (
        [*inspect.signature(apply).parameters.values()]
        for apply in (parallel_apply, torch.nn.parallel.parallel_apply)
    )
    positional = [p for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in torchs][:3]
