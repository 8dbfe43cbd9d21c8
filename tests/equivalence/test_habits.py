"""What only waited in the last map begins at once in the next, in forwards and backwards, of functions and modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from moe_autograd import _crew, map_with_parallel_backward, parallel_apply
from moe_autograd._habits import habit_of
from tests.support.lookouts import NobodyLooks
from tests.support.servers import START_S

NUM_CALLS = 16
ALL = threading.Barrier(NUM_CALLS)


class Meets(Function):
    """Each call waits for all others, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ALL.wait(START_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ALL.wait(START_S)
        return grad


class Client(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Meets.apply(x)


def call(x: Tensor) -> Any:
    return Meets.apply(x)


Map = Callable[[Sequence[Tensor]], Sequence[Tensor]]
MAPS: dict[str, tuple[object, Map]] = {
    "a function": (Meets, lambda xs: map_with_parallel_backward(Meets, *[(x,) for x in xs])),
    "modules": (Client, lambda xs: parallel_apply([Client() for _ in xs], [(x,) for x in xs])),
    "a callable": (call, lambda xs: parallel_apply([call] * len(xs), [(x,) for x in xs])),
}


@pytest.mark.parametrize("what", MAPS)
def test_what_only_waited_begins_without_a_look(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first threads have yet to be made, perhaps on a busy machine.
    monkeypatch.setattr(_crew, "LIGHT_S", 1.0)
    kind, map_over = MAPS[what]
    xs = [torch.full((2,), float(i), requires_grad=True) for i in range(NUM_CALLS)]
    for _ in range(2):
        results = map_over(xs)
        grads = torch.autograd.grad(results, xs, xs)
        assert all(map(torch.equal, [*results, *grads], [*xs, *xs]))
        assert habit_of(kind, is_backward=False).only_wait
        assert habit_of(kind, is_backward=True).only_wait
        monkeypatch.setattr(_crew, "lookout", NobodyLooks())


class Unhashable:
    """Some callable of a user's."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return x.sin()


def test_what_calls_have_nothing_in_common_has_no_habit() -> None:
    xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    callables = [Unhashable(), torch.sin, torch.sin]
    for result in parallel_apply(callables, [(x,) for x in xs]):
        torch.testing.assert_close(result, torch.ones(2).sin())
