"""Where hooks and parts that work in place make more of an expert than its layers, clients get what they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from moe_autograd.errors import ExpertFailedError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.server.test_joining import D, backward_call, forward_call, hosted, rows, step


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
