"""Where hooks and parts that work in place make more of an expert than its layers, clients get what they get alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune, spectral_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from experts_server.hosting.calls import ForwardCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.separating import LateHooks, LinearTape
from moe_autograd.errors import ExpertFailedError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.server.test_joining import D, Scaled, _ignore, backward_call, forward_call, hosted, rows, step


def _with_a_hook(hook: Callable[..., Any]) -> nn.Module:
    layer = nn.Linear(D, D, dtype=torch.float64)
    layer.register_forward_hook(hook)
    return nn.Sequential(layer, nn.Tanh())


def _with_a_mask() -> nn.Module:
    module = nn.Linear(D, D, dtype=torch.float64)
    module.weight.register_hook(lambda grad: grad * torch.eye(D))
    return module


class CountsTwice(Tensor):
    """A weight that a linear layer counts twice."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, weight, bias = args
        return F.linear(x, 2 * weight.as_subclass(Tensor), bias)


def _with_a_weight_of_a_class() -> nn.Module:
    module = nn.Linear(D, D, dtype=torch.float64)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(CountsTwice))
    return module


def _called_otherwise(name: str) -> nn.Module:
    module = nn.Linear(D, D, dtype=torch.float64)
    module.__dict__[name] = lambda x: 2 * F.linear(x, module.weight, module.bias)
    return module


CHANGED_ON_THE_WAY: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D)).double(),
    "pruned": lambda: prune.random_unstructured(nn.Linear(D, D).double(), "weight", 0.5),
    "hook on a layer": lambda: _with_a_hook(lambda _, __, y: 2 * y),
    "hook on a weight": _with_a_mask,
    "activation in place": lambda: FeedForwardExpert(D, activation=torch.relu_, dtype=torch.float64),
    "weight of a class of one's own": _with_a_weight_of_a_class,
    "_call_impl put into the instance": lambda: _called_otherwise("_call_impl"),
    "_compiled_call_impl put into the instance": lambda: _called_otherwise("_compiled_call_impl"),
}


@pytest.mark.parametrize("name", CHANGED_ON_THE_WAY)
def test_where_more_happens_than_layers_do_each_client_has_its_own_update(name: str) -> None:
    experts = []
    for _ in range(2):
        torch.manual_seed(0)
        experts.append(hosted(CHANGED_ON_THE_WAY[name]()))
    together, apart = experts
    for expert in experts:
        expert.forward([forward_call(0, rows(2, seed=0), keep_graph=False)])  # looks at buffers
        calls = [backward_call(n, rows(2, seed=9 + n), inputs=(rows(2, seed=n),)) for n in range(2)]
        if expert is together and expert.join_key(calls[0]) is not None:
            expert.backward_joined(calls)
        else:
            for call in calls:
                expert.backward(call)
        for client in range(2):
            step(expert, client)
    torch.testing.assert_close(together.module.state_dict(), apart.module.state_dict())


def test_rows_that_a_hook_mixes_are_not_joined() -> None:
    expert = hosted(_with_a_hook(lambda _, __, y: y - y.mean(0)))
    with pytest.raises(ExpertFailedError, match="its calls are computed one by one"):
        expert.forward([forward_call(client, rows(2, seed=client)) for client in range(2)])
    assert expert.join_key(forward_call(0, rows(2, seed=0))) is None


def _mixed(_: Any, __: Any, y: Tensor) -> Tensor:
    return y - y.mean(0)


@contextmanager
def _a_hook_on(module: nn.Module) -> Iterator[None]:
    hook = module.register_forward_hook(_mixed)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _a_hook_on_all(module: nn.Module) -> Iterator[None]:
    hook = register_module_forward_hook(lambda part, x, y: _mixed(part, x, y) if part is module else None)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _a_forward_put_into(module: nn.Module) -> Iterator[None]:
    module.forward = lambda x: x - x.mean(0)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


LATE = {
    "hook": _a_hook_on,
    "hook on all modules": _a_hook_on_all,
    "forward put into the instance": _a_forward_put_into,
}


def look_for_buffers(expert: HostedExpert, calls: list[ForwardCall]) -> None:
    """Join none until one call alone has shown whether late hooks change buffers."""
    with pytest.raises(ExpertFailedError, match="that do, or may since hooks have come"):
        expert.forward(calls)
    assert expert.join_key(calls[0]) is None
    expert.forward(calls[:1])
    assert expert.join_key(calls[0]) is not None


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(D, D, dtype=torch.float64), Scaled], ids=["linear", "own"]
)
@pytest.mark.parametrize("name", LATE)
def test_rows_that_are_mixed_once_it_is_hosted_are_not_joined(
    name: str, make: Callable[[], nn.Module]
) -> None:
    expert = hosted(make())
    calls = [forward_call(client, rows(2, seed=client)) for client in range(2)]
    for _ in range(4):  # after the 4th, the 8th were looked at
        expert.forward(calls)
    with LATE[name](expert.module):
        look_for_buffers(expert, calls)
        with pytest.raises(ExpertFailedError, match="its calls are computed one by one"):
            expert.forward(calls)
        assert expert.join_key(calls[0]) is None


def test_a_hook_that_comes_to_a_weight_once_it_is_hosted_sees_the_gradient_of_each_client() -> None:
    expert = hosted(nn.Sequential(layer := nn.Linear(D, D, dtype=torch.float64)))
    call = backward_call(0, rows(2, seed=9), inputs=(rows(2, seed=0),), wants_weight_grads=True)
    assert expert.join_key(call) is not None
    hook = layer.weight.register_hook(lambda grad: 2 * grad)
    assert expert.join_key(call) is None
    hook.remove()
    assert expert.join_key(call) is not None


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


class OwnLinear(nn.Linear): ...


PUT_IN_LATE: dict[str, Callable[[nn.Sequential], object]] = {
    "parametrization": lambda m: register_parametrization(m[0], "weight", Symmetric()),
    "weight norm": lambda m: weight_norm(m[0]),
    "activation in place": lambda m: m.__setitem__(1, nn.ReLU(inplace=True)),
    "class": lambda m: setattr(m[0], "__class__", OwnLinear),
    "weight of a class of one's own": lambda m: setattr(m, "0", _with_a_weight_of_a_class()),
}


@pytest.mark.parametrize("name", PUT_IN_LATE)
def test_where_parts_are_of_other_classes_than_they_were_each_client_has_its_own_update(name: str) -> None:
    experts = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [nn.Linear(D, D, dtype=torch.float64) for _ in range(2)]
        module = nn.Sequential(layers[0], nn.GELU(), layers[1])
        experts.append(expert := hosted(module))
        expert.forward([forward_call(0, rows(2, seed=0), keep_graph=False)])
        PUT_IN_LATE[name](module)
    together, apart = experts
    calls = [backward_call(n, rows(2, seed=9 + n), inputs=(rows(2, seed=n),)) for n in range(2)]
    assert together.join_key(calls[0]) is not None  # nobody looks at each call
    with pytest.raises(ExpertFailedError, match="expected the parts and weights that it was hosted with"):
        together.backward_joined(calls)
    for call in calls:
        together.backward(call)
    for call in reversed(calls):
        apart.backward(call)
    for client in range(2):
        step(together, client)
        step(apart, client)
    torch.testing.assert_close(together.module.state_dict(), apart.module.state_dict())


def test_a_hook_that_draws_once_it_is_hosted_ends_the_joining_in_training() -> None:
    expert = hosted(nn.Linear(D, D, dtype=torch.float64))
    calls = [forward_call(client, rows(2, seed=client)) for client in range(2)]
    expert.forward(calls)
    expert.module.register_forward_hook(lambda _, __, y: F.dropout(y, 0.5))
    look_for_buffers(expert, calls)
    with pytest.raises(ExpertFailedError, match="expected no random numbers in a joined call"):
        expert.forward(calls)
    assert expert.join_key(calls[0]) is None


def _counting(module: nn.Module) -> None:
    module.register_buffer("num_calls", torch.zeros(()))
    module.register_forward_hook(lambda part, _, __: _ignore(part.num_calls.add_(1)))


def _registering(module: nn.Module) -> None:
    def count(part: nn.Module, _: Any, __: Any) -> None:
        part.register_buffer("num_calls", getattr(part, "num_calls", torch.zeros(())) + 1)

    module.register_forward_hook(count)


class ScaledByABuffer(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


COME_WITH_BUFFERS: dict[str, Callable[[nn.Module], object]] = {
    "spectral norm": lambda module: spectral_norm(
        module, "scale" if isinstance(module, Scaled) else "weight"
    ),
    "count of calls": _counting,
    "buffer that the first call registers": _registering,
}
MAKES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D, dtype=torch.float64),
    "own": Scaled,
    "own with a buffer": ScaledByABuffer,
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", COME_WITH_BUFFERS)
def test_buffers_that_come_with_hooks_once_it_is_hosted_go_on_with_each_call(name: str, make: str) -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(MAKES[make]())
    expert, plain = hosted(modules[0]), modules[1]
    calls = [forward_call(client, rows(2, seed=client)) for client in range(2)]
    for _ in range(2):
        expert.forward(calls[:1])
        expert.forward(calls)
    for module in modules:
        torch.manual_seed(1)
        COME_WITH_BUFFERS[name](module)
    with pytest.raises(ExpertFailedError, match="that do, or may since hooks have come"):
        expert.forward(calls)
    for call in calls:
        expert.forward([call])
        plain(*call.inputs)
    torch.testing.assert_close(dict(expert.module.named_buffers()), dict(plain.named_buffers()))
    assert expert.join_key(calls[0]) is None


def test_once_such_hooks_are_gone_calls_are_joined_again() -> None:
    expert = hosted(nn.Linear(D, D, dtype=torch.float64))
    calls = [forward_call(client, rows(2, seed=client)) for client in range(2)]
    with _a_hook_on(expert.module):
        look_for_buffers(expert, calls)
    look_for_buffers(expert, calls)
    expert.forward(calls)


def test_what_a_tape_notes_with_is_no_late_hook() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.ReLU())
    late_hooks = LateHooks(module)
    with LinearTape(module).recording():
        assert not late_hooks
        hook = module[0].register_forward_hook(_mixed)
        assert late_hooks
    hook.remove()
    assert not late_hooks
