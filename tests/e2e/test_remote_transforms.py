"""Transforms and traces around one remote expert, which its server cannot see: refused, and never a wrong number."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import UnsupportedTransformError
from moe_autograd.remote import connect

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def expert():
    with ExpertsServer({"linear": nn.Linear(4, 4)}) as server, connect(server.address) as experts:
        yield experts["linear"]


TRANSFORMS = {
    "vmap": lambda expert, x: torch.vmap(expert)(x),
    "jvp": lambda expert, x: torch.func.jvp(expert, (x,), (x,)),
    "grad": lambda expert, x: torch.func.grad(lambda x: expert(x).sum())(x),
    "trace": lambda expert, x: torch.jit.trace(expert, x, check_trace=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_server_cannot_see_is_refused(expert, transform):
    with pytest.raises(
        UnsupportedTransformError, match=r"expert 'linear': expected no torch\.func transform"
    ):
        TRANSFORMS[transform](expert, X)


def test_a_forward_mode_tangent_is_refused(expert):
    with forward_ad.dual_level(), pytest.raises(UnsupportedTransformError, match="expert 'linear'"):
        expert(forward_ad.make_dual(X, X))


def test_gradients_of_many_backwards_at_once_are_refused(expert):
    x = X.clone().requires_grad_()
    y = expert(x)
    with pytest.raises(UnsupportedTransformError, match="remote expert: expected gradients of one backward"):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    torch.autograd.grad(y, x, torch.ones_like(y))


def test_a_sparse_gradient_is_taken_as_a_dense_one(expert):
    grads = []
    for sparse_grad in (False, True):
        x = X.clone().requires_grad_()
        expert(x).gather(1, torch.tensor([[1], [2]]), sparse_grad=sparse_grad).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


RECORDERS = {
    "export": lambda expert, x: torch.export.export(nn.Sequential(expert), (x,)),
    "make_fx": lambda expert, x: make_fx(expert)(x),
    "fake": lambda expert, x: _in_fake_mode(expert),
    "parallel": lambda expert, x: make_fx(lambda x: parallel_apply([expert, expert], [(x,), (x,)])[0])(x),
}


def _in_fake_mode(expert):
    with FakeTensorMode():
        expert(torch.ones(2, 4))


@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_has_no_numbers_is_refused(expert, recorder):
    with pytest.raises(
        UnsupportedTransformError, match=r"expert 'linear': expected numbers, got torch\.export"
    ):
        RECORDERS[recorder](expert, X)


def test_a_tensor_without_memory_of_its_own_is_refused(expert):
    fake = FakeTensorMode().from_tensor(X)
    for x in (fake, TwoTensor(X, X)):
        with pytest.raises(
            TypeError, match=f"expert 'linear', input 0: .* plain memory, got a {type(x).__name__}"
        ):
            expert(x)


def test_what_compiles_around_it_goes_on(expert):
    compiled = torch.compile(nn.Sequential(nn.ReLU(), expert), backend="eager")
    torch.testing.assert_close(compiled(X), expert(X))
