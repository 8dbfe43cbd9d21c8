"""Transforms and recorders around an offloaded expert, blind to its weights: refused, and no wrong number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import UnsupportedTransformError
from tests.support.offloading import OPTIMIZERS

X = torch.ones(2, 4)


def with_a_tangent(expert: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return expert(forward_ad.make_dual(X, X))  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda expert: torch.vmap(expert)(X),
    "jvp": lambda expert: torch.func.jvp(expert, (X,), (X,)),
    "grad": lambda expert: torch.func.grad(lambda x: expert(x).sum())(X),
    "functionalize": lambda expert: torch.func.functionalize(expert)(X),
    "a tangent": with_a_tangent,
    "a tangent without gradients": torch.no_grad()(with_a_tangent),
    "trace": lambda expert: torch.jit.trace(expert, X, check_trace=False),
    "export": lambda expert: torch.export.export(nn.Sequential(expert), (X,)),
    "make_fx": lambda expert: make_fx(expert)(X),
    "make_fx before dispatch": lambda expert: make_fx(expert, pre_dispatch=True)(X),
    "symbolic_trace": lambda expert: torch.fx.symbolic_trace(nn.Sequential(expert)),
}


@pytest.fixture(scope="module", params=["trained", "untrained"])
def expert(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    optimizer = OPTIMIZERS["sgd"] if request.param == "trained" else None
    with OffloadedExperts([nn.Linear(4, 4)], optimizer, max_resident_bytes=1000) as experts:
        yield experts[0]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_does_not_see_the_weights_is_refused(expert: nn.Module, transform: str) -> None:
    with pytest.raises(
        UnsupportedTransformError, match=r"expert-00000: expected no torch\.func transform, .*use the plain"
    ):
        TRANSFORMS[transform](expert)
    assert expert(X).shape == (2, 4)  # and nothing is left of it


@pytest.mark.parametrize("is_vmap", [True, False])
def test_gradients_of_many_backwards_at_once_are_right_and_no_constants(is_vmap: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with OffloadedExperts([copy.deepcopy(plain)], OPTIMIZERS["sgd"], max_resident_bytes=1000) as experts:

        def gradients(expert: nn.Module) -> Tensor:
            x = X.clone().requires_grad_()
            y, many = expert(x), torch.arange(24.0).view(3, *X.shape)
            if not is_vmap:
                return torch.autograd.grad(y, x, many, is_grads_batched=True, create_graph=True)[0]

            def of_one(grad: Tensor) -> Tensor:
                return torch.autograd.grad(y, x, grad, retain_graph=True, create_graph=True)[0]

            return torch.vmap(of_one)(many)

        found = gradients(experts[0])
        torch.testing.assert_close(found, gradients(plain))
        with pytest.raises(RuntimeError, match="expected a gradient of first order"):
            found.sum().backward()


def test_a_level_of_forward_mode_without_tangents_is_fine(expert: nn.Module) -> None:
    with forward_ad.dual_level():
        assert torch.equal(expert(X), expert(X))
