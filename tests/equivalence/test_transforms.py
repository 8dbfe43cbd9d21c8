"""What worker threads cannot see raises `UnsupportedTransformError`; it never gives a wrong number.

Forward-mode tangents and `torch.func` transforms live in dispatcher entries of one thread. The same holds for
`torch.jit.trace`, whose recording would bake a worker's results in as constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from moe_autograd import MixtureOfExperts, TopKRouter, map_with_parallel_backward, parallel_apply
from moe_autograd.errors import UnsupportedTransformError

# torch's own, on first use
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * 2 * x


def mapped(x: Tensor) -> Tensor:
    return torch.stack(map_with_parallel_backward(Square, (x,), (x + 1,))).sum()


def applied(x: Tensor) -> Tensor:
    return torch.stack(parallel_apply([torch.square] * 2, [(x,), (x + 1,)])).sum()


def applied_to_constants(x: Tensor) -> Tensor:
    """What is transformed reaches the calls only through their closures."""
    one = torch.ones(3)
    return torch.stack(parallel_apply([lambda y: (x * y) ** 2] * 2, [(one,), (one,)])).sum()


LAYER = MixtureOfExperts(TopKRouter(3, 2, 1), [nn.Linear(3, 3), nn.Linear(3, 3)])


def through_a_layer(x: Tensor) -> Tensor:
    return LAYER(x).sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(3)),
    "vjp": lambda f: torch.func.vjp(f, torch.ones(3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
    "jacrev": lambda f: torch.func.jacrev(f)(torch.ones(3)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(torch.ones(3)),
    "hessian": lambda f: torch.func.hessian(f)(torch.ones(3)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(3)),
    "linearize": lambda f: torch.func.linearize(f, torch.ones(3)),
    "grad inside grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(torch.ones(3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", [mapped, applied, applied_to_constants, through_a_layer])
def test_a_transform_around_a_map_is_refused(transform: str, function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedTransformError, match="plain loop"):
        TRANSFORMS[transform](function)


@pytest.mark.parametrize("function", [mapped, applied, through_a_layer])
def test_a_dual_tensor_among_the_arguments_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with forward_ad.dual_level(), pytest.raises(UnsupportedTransformError, match="tangent"):
        function(forward_ad.make_dual(torch.ones(3), torch.ones(3)))


def test_a_dual_tensor_in_a_closure_or_on_a_module_never_loses_its_tangent_in_silence() -> None:
    """Refused, or right."""
    one = torch.ones(3, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        module = nn.Linear(3, 3)
        del module.weight
        module.weight = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))  # type: ignore[assignment]
        for call in (lambda x: x * dual, module):
            native = forward_ad.unpack_dual(call(one)).tangent
            try:
                (output,) = parallel_apply([call], [(one,)])
            except UnsupportedTransformError:
                continue
            tangent = forward_ad.unpack_dual(output).tangent
            assert native is not None
            assert tangent is not None
            assert torch.equal(tangent, native)


def test_a_map_inside_a_dual_level_works_on_tensors_without_tangents() -> None:
    with forward_ad.dual_level():
        x = torch.full((3,), 2.0, requires_grad=True)
        mapped(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10.0] * 3


@pytest.mark.parametrize("function", [mapped, applied, through_a_layer])
def test_a_vectorised_backward_is_refused_or_right(function: Callable[[Tensor], Tensor]) -> None:
    """`is_grads_batched` and `autograd.functional.jacobian(vectorize=True)` run the backward under vmap."""
    x = torch.arange(3.0, requires_grad=True)
    output = function(x) * x
    basis = torch.eye(3)
    expected = torch.stack([torch.autograd.grad(output, x, v, retain_graph=True)[0] for v in basis])
    try:
        (batched,) = torch.autograd.grad(output, x, basis, is_grads_batched=True)
    except UnsupportedTransformError:
        return
    torch.testing.assert_close(batched, expected)


@pytest.mark.parametrize("how", [{"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_a_vectorised_backward_may_have_random_numbers_of_its_own(how: dict[str, Any]) -> None:
    """PyTorch refuses to draw under vmap; the calls' numbers follow from a draw, and masks are drawn again."""
    modules = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(4)]
    xs = [torch.ones(3, requires_grad=True) for _ in modules]
    outputs = parallel_apply(modules, [(x,) for x in xs], **how)
    wanted = [*xs, *[p for module in modules for p in module.parameters()]]
    one_by_one = [torch.autograd.grad(outputs, wanted, [v] * 4, retain_graph=True) for v in torch.eye(3)]
    batched = torch.autograd.grad(outputs, wanted, [torch.eye(3)] * 4, is_grads_batched=True)
    for grad, *expected in zip(batched, *one_by_one, strict=True):
        torch.testing.assert_close(grad, torch.stack(expected))


def test_a_map_works_again_after_it_was_refused() -> None:
    with pytest.raises(UnsupportedTransformError):
        torch.func.grad(mapped)(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    mapped(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("function", [mapped, applied, through_a_layer])
def test_a_trace_follows_its_inputs_or_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said = torch.jit.trace(function, (torch.ones(3),), check_trace=False)(torch.full((3,), 2.0))
        except RuntimeError:
            return
        assert torch.equal(said, function(torch.full((3,), 2.0)))


@pytest.mark.parametrize("function", [mapped, applied])
def test_a_map_is_not_exported(function: Callable[[Tensor], Tensor]) -> None:
    """The program had the values, and `detach` where a gradient would have to flow."""

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(UnsupportedTransformError, match=r"expected no torch\.export around it"):
        torch.export.export(Calls(), (torch.ones(3),), strict=False)


@pytest.mark.parametrize("record", [lambda f: make_fx(f)(torch.ones(3, 4)), torch.fx.symbolic_trace])
def test_what_is_recorded_of_a_layer_is_refused(record: Callable[[nn.Module], nn.Module]) -> None:
    """It would send the tokens of all inputs where those of this one go."""
    layer = MixtureOfExperts(TopKRouter(4, 2, top_k=1), [nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(UnsupportedTransformError, match=r"expected to be run, got make_fx or symbolic_trace"):
        record(layer)


def test_a_layer_is_not_exported() -> None:
    layer = MixtureOfExperts(TopKRouter(4, 2, top_k=1), [nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(UnsupportedTransformError, match=r"expected to be run, got torch\.export around it"):
        torch.export.export(layer, (torch.ones(3, 4),))
