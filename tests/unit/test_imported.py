"""What torch loads late may be asked for while another thread is just importing it."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd._imported import imported
from moe_autograd.autograd import deferred
from moe_autograd.autograd.contents import compiled, ranks
from tests.support.functions_waiting import Meets

LATE = [
    "torch._dynamo.compiled_autograd",
    "torch._dynamo.utils",
    "torch.distributed._composable.replicate",
    "torch.distributed._composable_state",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining._backward",
    "torch.distributed.tensor",
]


@pytest.fixture
def half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is listed, and nothing of it is there yet."""
    for name in LATE:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


class Meeting(nn.Linear):
    """Its calls wait for each other, so that they are on threads."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(2, 2)
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        met: Tensor = Meets.apply(super().forward(x), self.barrier)  # type: ignore[no-untyped-call]
        return met


@pytest.mark.usefixtures("half_imported")
@pytest.mark.parametrize("defer_weight_grads", [False, True])
def test_a_map_runs_while_others_import_what_it_asks(defer_weight_grads: bool) -> None:
    barrier = threading.Barrier(2)
    experts = [Meeting(barrier) for _ in range(2)]
    x = torch.ones(1, 2, requires_grad=True)
    sum(parallel_apply(experts, [(x,)] * 2, defer_weight_grads=defer_weight_grads)).sum().backward()
    want = sum(2 * expert.weight.sum(0) for expert in experts)
    assert x.grad is not None
    assert torch.allclose(x.grad[0], torch.as_tensor(want))
    for expert in experts:
        assert expert.bias.grad is not None
        assert torch.equal(expert.bias.grad, torch.full((2,), 2.0))


@pytest.mark.usefixtures("half_imported")
def test_what_is_not_there_yet_nobody_has_used() -> None:
    module = nn.Linear(2, 2)
    assert deferred.may_defer() or torch.accelerator.is_available()
    assert compiled.meet([module], [(torch.ones(2),)]), "it may compile"
    assert not ranks.are_for_one_call([torch.ones(2), 1])
    assert len(ranks.modules_that_talk()) == 2
    ranks.refuse_reducing(module)


def test_what_is_imported_is_found_and_nothing_is_imported_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported("torch.nn", "Linear") is nn.Linear
    assert imported("torch.nn", "nothing of the kind") is None
    assert imported("torch.nn", "nothing of the kind", int) is int
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert imported("this", "s") is None
    assert "this" not in sys.modules
