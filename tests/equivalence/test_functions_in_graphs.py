"""Mapped functions in larger graphs: in-place changes, hooks, views, subclasses and mixed precision around them.

Each program runs natively and through the map; every fact, value and gradient has to agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from moe_autograd.autograd.emulated import EmulatedAutogradContext
from tests.support.comparison import MapFunction, Raised, assert_same_program, loss_of
from tests.support.functions_context import ChangesInPlace, MaterializesGrads, SavesInput, SavesOutput
from tests.support.functions_numbers import Multiplies
from tests.support.module_programs import leaves

PROGRAMS: list[Callable[[MapFunction], Any]] = []


def program(function: Callable[[MapFunction], Any]) -> Callable[[MapFunction], Any]:
    PROGRAMS.append(function)
    return function


@program
def a_default_argument_that_requires_a_gradient(apply: MapFunction) -> Any:
    (scale, *xs) = leaves(3, 4)

    class Scales(Function):
        @staticmethod
        def forward(x: Tensor, factor: Tensor = scale) -> Tensor:
            return x * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, factor = ctx.saved_tensors
            return grad * factor, grad * x

    loss_of(apply(Scales, *[(x,) for x in xs])).backward()
    return scale.grad, [x.grad for x in xs]


class ReturnsBoth(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, is_marked: bool) -> tuple[Tensor, Tensor]:
        if is_marked:
            ctx.mark_non_differentiable(y)
        return x, y

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_x + 2 * grad_y, grad_y, None


@program
def one_input_that_calls_return_with_a_gradient_and_without(apply: MapFunction) -> Any:
    """One call made it a result without a gradient for all."""
    (*xs, shared), (constant, *_) = leaves(3), leaves(2)
    results = []
    for y in (shared, shared * 1, constant.detach()):
        results += apply(ReturnsBoth, (y.detach(), y.detach(), False), (xs[0], y, False), (xs[1], y, True))
        results += apply(ReturnsBoth, (xs[0], y, True), (xs[1], y, False))
    loss_of(results).backward()
    return results, [x.grad for x in [*xs, shared]]


@program
def slices_of_one_tensor_changed_in_place(apply: MapFunction) -> Any:
    (x,) = leaves(1, 6)
    base = x * 1
    results = apply(ChangesInPlace, (base[:2],), (base[2:3],), (base[3:],))
    loss_of([*results, base]).backward()
    return base.detach(), x.grad


@program
def a_base_whose_view_was_changed(apply: MapFunction) -> Any:
    (x, y) = leaves(2, 6)
    base = x * 1
    apply(ChangesInPlace, (base[2:],), (y * 1,))
    loss_of(base).backward()
    return base.detach(), x.grad, y.grad


@program
def results_changed_through_views(apply: MapFunction) -> Any:
    xs = leaves()
    results = apply(SavesInput, *[(x,) for x in xs])
    results[1].view(-1)[2:5].mul_(3)
    results[2][0] = 7.0
    results[3].t().add_(results[0].t())
    loss_of(results).backward()
    return [result.detach() for result in results], [x.grad for x in xs]


@program
def results_detached_in_place(apply: MapFunction) -> Any:
    xs = leaves()
    results = apply(SavesInput, *[(x,) for x in xs])
    results[1].detach_()
    loss_of(results).backward()
    return [result.requires_grad for result in results], [x.grad for x in xs]


@program
def hooks_on_inputs_and_results(apply: MapFunction) -> Any:
    xs, log = leaves(), []
    middles = [x * 2 for x in xs]
    results = apply(SavesInput, *[(m,) for m in middles])
    for name, tensors in (("leaf", xs), ("input", middles), ("result", results)):
        for i, tensor in enumerate(tensors):
            tensor.retain_grad()
            tensor.register_hook(
                lambda grad, name=name, i=i: (log.append((name, i, grad.clone())), grad * 2)[1]
            )
    loss_of(results).backward()
    log.sort(key=lambda entry: entry[:2])
    return log, [tensor.grad for tensor in [*xs, *middles, *results]]


@program
def one_tensor_in_every_call_and_twice_in_one(apply: MapFunction) -> Any:
    (x, y) = leaves(2)
    loss_of(apply(Multiplies, (x, x), (x, y), (y, x * 2), (y, y))).backward()
    return x.grad, y.grad


@program
def maps_over_results_of_maps(apply: MapFunction) -> Any:
    xs = leaves()
    first = apply(SavesOutput, *[(x.sin(),) for x in xs])
    second = apply(SavesInput, (first[3],), (first[0] * first[1],), (first[1],))
    third = apply(MaterializesGrads, (second[2],), (first[2],), (second[0] + second[2],))
    loss_of([third[0][0], third[2][1], second[1]]).backward()
    return [x.grad for x in xs]


@program
def gradients_of_results_in_the_middle(apply: MapFunction) -> Any:
    xs = leaves()
    first = apply(SavesOutput, *[(x,) for x in xs])
    second = apply(SavesInput, *[(y,) for y in first])
    return torch.autograd.grad(loss_of(second), [first[2], xs[0], first[1]])


@program
def a_backward_for_chosen_leaves_only(apply: MapFunction) -> Any:
    xs = leaves()
    loss_of(apply(SavesInput, *[(x * 1,) for x in xs])).backward(inputs=[xs[1], xs[3]])
    return [x.grad for x in xs]


@program
def a_function_in_mixed_precision(apply: MapFunction) -> Any:
    class MatMul(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            return grad @ y.t(), x.t() @ grad

    xs = [x.detach().bfloat16().requires_grad_() for x in leaves(4, 3, 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = apply(MatMul, (xs[0], xs[1]), (xs[2], xs[3]))
    loss_of(results).backward()
    return [result.detach() for result in results], [x.grad for x in xs]


class ScalesTwice(Function):
    """Notes what the gradients of its results are like."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any], layout: torch.layout) -> tuple[Tensor, Tensor]:
        ctx.log = log
        second = x * 3
        return x * 2, second if second.layout is layout else second.to_sparse(layout=layout)

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append((one.layout, one.is_nested, other.layout, other.is_nested))
        return one * 2 + (other if other.is_nested else other.to_dense()) * 3, None, None


@program
def a_sparse_result_without_a_gradient(apply: MapFunction) -> Any:
    log: list[Any] = []
    xs = leaves(2, 3, 3)
    results = apply(ScalesTwice, *[(x, log, torch.sparse_coo) for x in xs])
    loss_of([one for one, _ in results]).backward()
    return log, [x.grad for x in xs]


@program
def a_jagged_result_without_a_gradient(apply: MapFunction) -> Any:
    log: list[Any] = []
    xs = [
        torch.nested.nested_tensor(leaves(2, length, 2), layout=torch.jagged).requires_grad_()
        for length in (2, 5)
    ]
    results = apply(ScalesTwice, *[(x, log, torch.jagged) for x in xs])
    loss_of([one.values() for one, _ in results]).backward()
    return log, [x.grad.values() for x in xs if x.grad is not None]


class Tagged(torch.Tensor):
    """A subclass that does nothing but stay what it is."""


@program
def tensors_of_a_subclass(apply: MapFunction) -> Any:
    xs = [x.detach().as_subclass(Tagged).requires_grad_() for x in leaves()]
    results = apply(SavesInput, *[(x,) for x in xs])
    loss_of(results).backward()
    return [type(result) for result in results], [x.grad for x in xs]


@program
def a_function_with_an_apply_of_its_own(apply: MapFunction) -> Any:
    """A common way to give an autograd function keyword arguments and defaults."""

    class Scales(Function):
        @classmethod
        def apply(cls, x: Tensor) -> Any:
            return super().apply(x * 10, 3.0)

        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> Tensor:
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.scale, None

    xs = leaves()
    results = apply(Scales, *[(x,) for x in xs])
    loss_of(results).backward()
    return [result.detach() for result in results], [x.grad for x in xs]


@program
def attributes_of_whatever_name(apply: MapFunction) -> Any:
    """The context's attributes belong to the function, whatever it calls them; the library's have a prefix."""
    own = vars(EmulatedAutogradContext)
    names = [name for name in own if not name.startswith(("__", "_emulated_")) and not callable(own[name])]
    names = [name for name in names if not isinstance(own[name], property)]
    # These names are torch's.
    taken = {
        "to_save",
        "dirty_tensors",
        "non_differentiable",
        "materialize_grads",
        "needs_input_grad",
        "output_grad_dtypes",
    }

    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, names: Any) -> Tensor:
            ctx.save_for_backward(x)
            for name in names:
                setattr(ctx, name, f"mine: {name}")
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            assert all(getattr(ctx, name) == f"mine: {name}" for name in names)
            return grad * 2 * ctx.saved_tensors[0], None

    names = [*set(names) - taken, "saved", "name_of_mine"]
    xs = leaves()
    loss_of(apply(Keeps, *[(x, names) for x in xs])).backward()
    return [x.grad for x in xs]


@program
def a_function_that_maps_itself(apply: MapFunction) -> Any:
    class Halves(Function):
        """Squares by halving the tensor until single rows are left."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            if len(x) == 1:
                return x * x
            return torch.cat(apply(Halves, (x[: len(x) // 2],), (x[len(x) // 2 :],)))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 * x

    (x,) = leaves(1, 16, 2)
    loss_of(apply(Halves, (x,), (x + 1,))).backward()
    return x.grad


@program
def hooks_on_leaves_of_calls_without_a_gradient(apply: MapFunction) -> Any:
    xs = leaves()
    for x in xs:
        x.register_hook(lambda grad: grad * 2)
    loss_of(apply(SavesInput, *[(x,) for x in xs])[1::2]).backward()
    return [x.grad for x in xs]


@program
def saved_tensors_that_go_when_they_are_asked_for(apply: MapFunction) -> Any:
    log = []

    class Clears(Function):
        clear_saved_tensors_on_access = True  # which older versions of torch do not know

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.cos())
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (cosine,) = ctx.saved_tensors
            is_gone, grad = weakref.ref(cosine), grad * cosine
            del cosine
            log.append(is_gone() is None)
            try:
                log.append(len(ctx.saved_tensors))
            except RuntimeError as error:
                log.append(str(error))
            return grad

    xs = leaves()
    loss_of(apply(Clears, *[(x,) for x in xs])).backward()
    return log, [x.grad for x in xs]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_says_the_same(program: Callable[[MapFunction], Any]) -> None:
    said = assert_same_program(program, tolerance=1e-12)
    assert not isinstance(said, Raised)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_says_the_same_one_call_at_a_time(program: Callable[[MapFunction], Any]) -> None:
    def one_at_a_time(*args: Any) -> Any:
        return map_with_parallel_backward(*args, max_concurrency=1)

    assert_same_program(program, mapped_apply=one_at_a_time, tolerance=1e-12)


def test_maps_thirty_deep_come_to_an_end() -> None:
    class Descends(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                return x * 1
            return map_with_parallel_backward(Descends, (x, depth - 1), (x, 0))[0] * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    x = torch.ones(2, requires_grad=True)
    map_with_parallel_backward(Descends, (x, 30), (x, 30))[0].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_what_was_saved_has_its_name_of_old_and_pytorchs_warning() -> None:
    class Cubes(SavesInput):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_variables
            return grad * 3 * x**2

    def program(apply: MapFunction) -> Any:
        xs = leaves(3, 3)
        with pytest.warns(DeprecationWarning, match="'saved_variables' is deprecated; use 'saved_tensors'"):
            loss_of(apply(Cubes, *[(x,) for x in xs])).backward()
        return [x.grad for x in xs]

    assert_same_program(program)
