"""Transforms and traces around one remote expert, which its server cannot see: refused, and never a wrong number."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import UnsupportedTransformError
from moe_autograd.remote import RemoteOptimizer, connect

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
    with pytest.raises(UnsupportedTransformError, match="remote expert: expected gradients of one backward"):
        torch.vmap(lambda grad: torch.autograd.grad(y, x, grad, retain_graph=True))(torch.ones(3, *y.shape))
    torch.autograd.grad(y, x, torch.ones_like(y))


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_under_vmap_that_is_the_same_for_all_is_one(expert, create_graph):
    x = X.clone().requires_grad_()
    y = expert(x)

    def of_one(factor):
        options = {"retain_graph": True, "create_graph": create_graph}
        return factor * torch.autograd.grad(y, x, torch.ones_like(y), **options)[0]

    found = torch.vmap(of_one)(torch.arange(3.0))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(found.detach(), torch.stack([0 * grad, grad, 2 * grad]))


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
    "make_fx before dispatch": lambda expert, x: make_fx(expert, pre_dispatch=True)(x),
    "symbolic_trace": lambda expert, x: torch.fx.symbolic_trace(nn.Sequential(expert)),
    "fake": lambda expert, x: _in_mode(FakeTensorMode(), expert),
    "functional": lambda expert, x: _in_mode(FunctionalTensorMode(), expert),
    "parallel": lambda expert, x: make_fx(lambda x: parallel_apply([expert, expert], [(x,), (x,)])[0])(x),
}


def _in_mode(mode, expert):
    with mode:
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


def test_what_only_counts_operators_around_it_goes_on(expert):
    with FlopCounterMode(display=False):
        y = expert(X)
    torch.testing.assert_close(y, expert(X))


def test_what_compiles_around_it_goes_on(expert):
    compiled = torch.compile(nn.Sequential(nn.ReLU(), expert), backend="eager")
    torch.testing.assert_close(compiled(X), expert(X))


@pytest.fixture
def trained():
    modules = {name: nn.Linear(4, 4) for name in ("a", "b")}
    with (
        ExpertsServer(modules, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)) as server,
        connect(server.address) as experts,
    ):
        yield experts


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_training_step_that_is_compiled_as_a_whole(trained):
    """The backward that it begins was compiled as well, down to what is sent."""
    optimizer = RemoteOptimizer(trained)

    def step(x):
        optimizer.zero_grad()
        loss = (trained["a"](x) * trained["b"](x)).sum()
        loss.backward()
        return loss.detach(), x.grad

    compiled = torch.compile(step, backend="eager")
    for rows in (2, 3, 4, 5):
        expected = step(torch.ones(rows, 4, requires_grad=True))
        torch.testing.assert_close(compiled(torch.ones(rows, 4, requires_grad=True)), expected)
        optimizer.step()


@pytest.mark.parametrize("compiler", [lambda graph: graph, torch.compile(backend="eager")])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_backward_through_several_passes(trained, compiler):
    """Its graph adds up what each returns for the weights, which are not here; one of them takes a tensor twice."""

    def grads(enabled):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        both, first = parallel_apply([trained["a"], trained["b"]], [(x,), (x,)]), trained["a"](x * 2)
        with enabled:
            (both[0] * first).sum().backward()
        return x.grad

    torch.testing.assert_close(grads(compiled_autograd._enable(compiler)), grads(nullcontext()))
