"""Gradients whose dtype is not their tensor's, and what a context may say of them: as in a plain loop."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import parallel_apply, run_isolated_backward, run_isolated_forward
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.comparison import MapFunction, Raised, assert_same, assert_same_program, one_after_another

BF16 = torch.bfloat16
SGD = functools.partial(torch.optim.SGD, lr=2.0**-4)
GRADIENT = 1 + 2.0**-12  # what bfloat16 has no digits for

may_declare = pytest.mark.skipif(
    not hasattr(Function, "set_output_grad_dtype"), reason="this torch has no set_output_grad_dtype"
)


class Precise(Function):
    """Half in, and a gradient in single precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].float() * GRADIENT


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Precise.apply(x) + Precise.apply(self.weight)
        return y


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, None])
@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"defer_weight_grads": True}])
def test_gradients_of_inputs_and_weights_have_the_dtype_that_these_ask_for(
    how: dict[str, bool], grad_dtype: torch.dtype | None
) -> None:
    def program(apply: MapFunction) -> Any:
        experts = [Expert() for _ in range(3)]
        xs = [torch.ones(3, dtype=BF16, requires_grad=True) for _ in experts]
        wanted = [*xs, *[expert.weight for expert in experts]]
        for tensor in wanted:
            tensor.grad_dtype = grad_dtype
        outputs = apply([*experts, experts[0]], [(x,) for x in [*xs, xs[1]]])
        torch.stack(list(outputs)).float().sum().backward()
        grads = [tensor.grad for tensor in wanted]
        assert grads[2] is not None
        assert grads[2].double().tolist() == [GRADIENT] * 3
        return grads

    mapped = functools.partial(parallel_apply, **how)
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped)
    assert not isinstance(said, Raised)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_gradients_of_inputs_of_offloaded_experts_have_it_too(num_microbatches: int | None) -> None:
    x = torch.ones(4, 3, dtype=BF16, requires_grad=True)
    x.grad_dtype = torch.float32
    experts = OffloadedExperts([Expert()], max_resident_bytes=1 << 20, num_microbatches=num_microbatches)
    y = experts[0](x)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert x.grad.tolist() == [[GRADIENT] * 3] * 4


def offloaded(grad_dtype: torch.dtype | None, **options: Any) -> tuple[OffloadedExperts, Expert]:
    """Return an expert whose weight says so, and the plain module."""
    experts = [Expert(), Expert()]
    for expert in experts:
        expert.weight.grad_dtype = grad_dtype
    made = OffloadedExperts(experts[:1], SGD, max_resident_bytes=1 << 20, **options)
    return made, experts[1]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_gradients_of_weights_of_offloaded_experts_have_it_too(
    grad_dtype: torch.dtype, num_microbatches: int | None, update: Any
) -> None:
    """They had been rounded, and each step had raised."""
    experts, plain = offloaded(grad_dtype, num_microbatches=num_microbatches, update=update)
    optimizer, seen = SGD(plain.parameters()), list[Any]()
    for one in (optimizer, *experts.optimizers):
        one.register_step_pre_hook(
            lambda made, *_: seen.append(made.param_groups[0]["params"][0].grad.clone())
        )
    for _ in range(2):
        for module in (experts[0], plain):
            sum(module(torch.ones(4, 3, dtype=BF16)).float().sum() for _ in range(2)).backward()
        if update == "on_step":
            torch.testing.assert_close(experts.gradients(0)["weight"], plain.weight.grad, rtol=0, atol=0)
            experts.step()
            experts.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(seen[::2], seen[1::2], rtol=0, atol=0)
    assert seen[0].dtype is grad_dtype
    assert torch.equal(experts.state_dict(0)["weight"], plain.weight)


@pytest.mark.parametrize("is_before", [True, False])
def test_an_offloaded_expert_refuses_weights_that_take_gradients_of_any_dtype(is_before: bool) -> None:
    experts, _ = offloaded(None if is_before else torch.float32)
    if not is_before:
        experts[0].stands_for.weight.grad_dtype = None  # type: ignore[assignment,union-attr]
    with pytest.raises(
        ValueError, match=r"expert-00000: expected weight with grad_dtype=torch\..*, got None"
    ):
        experts[0](torch.ones(4, 3, dtype=BF16))
    with torch.no_grad():
        experts[0](torch.ones(4, 3, dtype=BF16))


got: list[Any] = []  # the dtypes of the gradients in each backward


class Declares(Function):
    """Returns two tensors and something else, and says in which dtypes it wants their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtypes: Any, marks: bool, materializes: bool
    ) -> tuple[Tensor, Tensor, str]:
        ctx.set_output_grad_dtype(*dtypes)
        ctx.set_materialize_grads(materializes)
        results = (x * 2, x.to(BF16), "no tensor")
        if marks:
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        got.append([grad if grad is None else grad.dtype for grad in grads])
        given = [grad.float() for grad in grads if grad is not None]
        return sum(given[1:], given[0]) * GRADIENT, None, None, None


ALL_DTYPES = [
    (torch.float64, torch.float32, None),
    (None, None, None),
    (torch.float16, BF16, None),
    (None,),
    (None, None, torch.float32),
    (None, "float32", None),
]


@may_declare
@pytest.mark.parametrize("materializes", [True, False])
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("num_calls", [1, 3])
def test_a_backward_gets_gradients_of_the_dtypes_that_its_forward_declared(
    num_calls: int, dtypes: Any, requires_grad: bool, marks: bool, materializes: bool
) -> None:
    def program(apply: MapFunction) -> Any:
        got.clear()
        xs = [torch.ones(3, requires_grad=requires_grad) for _ in range(num_calls)]
        outputs = apply(Declares, *[(x, dtypes, marks, materializes) for x in xs])
        said = [[t.grad_dtype for t in results[:2]] for results in outputs]
        if requires_grad:
            first = sum((results[0].double().sum() for results in outputs), torch.zeros(()))
            first.backward(retain_graph=True)
            both = [t for results in outputs for t in results[:2] if t.requires_grad]
            torch.autograd.backward(both, [torch.ones(3, dtype=torch.float64) for _ in both])
        return said, sorted(map(str, got)), [x.grad for x in xs]

    assert_same_program(program)


@may_declare
def test_what_a_function_in_a_call_declared_holds_outside_of_the_call() -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Declares.apply(x, (torch.float64, None, None), False, True)[0]
            return y

    def program(apply: MapFunction) -> Any:
        got.clear()
        modules, xs = [Ends() for _ in range(3)], [torch.ones(3, requires_grad=True) for _ in range(3)]
        inner = apply(modules, [(x,) for x in xs])
        # Its gradients are kept precise.
        outer = apply([lambda x: Precise.apply(x)] * 3, [(y,) for y in inner])
        torch.autograd.backward(list(outer), [torch.ones(3, dtype=torch.float64)] * 3)
        said = [y.grad_dtype for y in inner] if hasattr(Tensor, "_has_grad_dtype_override") else ()
        return said, sorted(map(str, got)), [x.grad for x in xs]

    assert not isinstance(
        assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply), Raised
    )


class Halves(Function):
    """Returns two tensors of half precision, and says in which dtypes it wants their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtypes: Any) -> tuple[Tensor, Tensor]:
        ctx.set_output_grad_dtype(*dtypes)
        return x.to(BF16), x.to(torch.complex64)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        got.append([grad.dtype for grad in grads])
        return grads[0].float() + grads[1].real.float(), None


@may_declare
@pytest.mark.parametrize(
    "how", [{}, {"recompute": True}, {"defer_weight_grads": True}, {"max_concurrency": 1}]
)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.complex128),
        (None, None),
        (torch.float64, torch.complex64),
        (BF16, torch.complex64),
    ],
    ids=str,
)
def test_what_was_declared_before_the_map_holds_within_it(dtypes: Any, how: dict[str, Any]) -> None:
    def program(apply: MapFunction) -> Any:
        got.clear()
        x = torch.ones(3, requires_grad=True)
        given = Halves.apply(x, dtypes)
        calls = [lambda y: Precise.apply(y), lambda y: Precise.apply(y.real)]
        seen: list[Any] = []  # by hooks, which nobody calls but the backward
        for one in given:
            one.retain_grad()
            one.register_hook(lambda grad: seen.append((grad.dtype, grad)))
        outputs = apply([*calls, *calls], [(one,) for one in [*given, *given]])
        torch.autograd.backward(list(outputs), [torch.ones(3, dtype=torch.float64)] * 4)
        return seen, got[:], x.grad, [one.grad for one in given]

    mapped = functools.partial(parallel_apply, **how)
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped)
    assert not isinstance(said, Raised)


@may_declare
def test_what_was_declared_in_a_call_holds_behind_the_map() -> None:
    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        halves = apply([lambda x: Halves.apply(x, (torch.float32, None))] * 2, [(x,)] * 2)
        (Precise.apply(halves[0][0]) + Precise.apply(halves[1][1].real)).sum().backward()
        return x.grad

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)


@may_declare
def test_it_holds_in_an_offloaded_expert_and_in_an_isolated_backward() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    y = Halves.apply(x, (torch.float32, None))[0]
    OffloadedExperts([Expert()], max_resident_bytes=1 << 20)[0](y).float().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[GRADIENT] * 3] * 4
    ctx, _ = run_isolated_forward(Precise, y)
    (found,) = run_isolated_backward(Precise, ctx, torch.ones(4, 3, dtype=BF16))
    assert found is not None
    assert found.tolist() == x.grad.tolist()


@may_declare
def test_an_isolated_backward_gets_them_too() -> None:
    got.clear()
    ctx, _ = run_isolated_forward(Declares, torch.ones(3), (torch.float64, None, None), False, True)
    run_isolated_backward(Declares, ctx, torch.ones(3), torch.ones(3, dtype=BF16), None)
    assert got == [[torch.float64, BF16, None]]


@pytest.mark.skipif(
    not hasattr(Function, "input_grad_buffers"), reason="this torch has no input_grad_buffers"
)
def test_calls_side_by_side_have_no_buffers_to_add_to() -> None:
    class Adds(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            buffer, other = ctx.input_grad_buffers
            assert other is None
            if buffer is None:
                return grads[0] * ctx.factor, None
            buffer += grads[0] * ctx.factor
            return None, None

    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        (torch.stack(apply(Adds, *[(x, float(i)) for i in range(4)])).sum() + x.sum()).backward()
        return x.grad

    assert_same(assert_same_program(program), torch.full((3,), 7.0))
