"""A template that calls share, weights of their own for each, and a part that keeps who is in it until all come."""

from __future__ import annotations

import threading
from typing import Any, cast

from torch import Tensor, nn

from tests.support.comparison import MapFunction, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import finish, leaves, seeded

Weights = dict[str, Tensor]
NUM_CALLS = 3


class Waits(nn.Module):
    """Keeps who is in the middle of the template there until the last call of the map has come."""

    def __init__(self, apply: MapFunction) -> None:
        super().__init__()
        self.has_come = threading.Event()
        if apply is one_after_another:
            self.has_come.set()

    def forward(self, x: Tensor) -> Tensor:
        assert self.has_come.wait(PATIENCE_S)
        return x.sin()

    def come(self, x: Tensor) -> Tensor:
        self.has_come.set()
        return x * 2


def template_and_weights(apply: MapFunction) -> tuple[nn.Sequential, Waits, list[Weights]]:
    waits = Waits(apply)
    (template,) = seeded(lambda: nn.Sequential(nn.Linear(4, 4), waits, nn.Linear(4, 4)), 1)
    own = [
        {name: (p.detach() * (i + 2)).requires_grad_() for name, p in template.named_parameters()}
        for i in range(NUM_CALLS)
    ]
    return cast(nn.Sequential, template), waits, own


def say(
    apply: MapFunction,
    template: nn.Module,
    waits: Waits,
    calls: list[Any],
    inputs: list[Any],
    *tensors: Tensor,
) -> Any:
    before = [id(p) for p in template.parameters()]
    outputs = apply([*calls, waits.come], [*inputs, (leaves(1)[0],)])
    is_as_before = before == [id(p) for p in template.parameters()]
    return is_as_before, finish(outputs, *tensors, *template.parameters())
