"""Ctrl-C may come anywhere within a step of offloaded experts. Then the next one is the same as if there had been none.

It could leave a lock taken for good, parts held for good, and weights that are nowhere.
"""

from __future__ import annotations

import copy
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.interrupting import interrupted_everywhere

D, NUM_EXPERTS = 8, 4
sgd = partial(torch.optim.SGD, lr=0.1)

# Where a generator is let go of, Python itself drops what is raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def one_by_one(experts: OffloadedExperts, x: Tensor) -> list[Tensor]:
    return [expert(x) for expert in experts]


def together(experts: OffloadedExperts, x: Tensor) -> list[Tensor]:
    return parallel_apply([*experts], [(x,)] * NUM_EXPERTS)


@pytest.mark.parametrize(
    ("call_all", "options", "every"),
    [(one_by_one, {}, 167), (together, {}, 167), (together, {"num_microbatches": 2}, 503)],
    ids=["one by one", "together", "in micro-batches"],
)
def test_a_step_after_ctrl_c_is_the_same(
    call_all: Any, options: dict[str, Any], every: int, tmp_path: Path
) -> None:
    modules = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(NUM_EXPERTS)]
    size = sum(4 * p.numel() for p in modules[0].parameters())
    tokens = torch.randn(6, D)
    with OffloadedExperts(
        modules, sgd, max_resident_bytes=int(3.5 * size), store=tmp_path, **options
    ) as experts:

        def step() -> list[Tensor | None]:
            experts.zero_grad()
            x = tokens.clone().requires_grad_()
            sum(call_all(experts, x)).square().sum().backward()
            return [x.grad, *[grad for i in range(NUM_EXPERTS) for grad in experts.gradients(i).values()]]

        expected, num_points = step(), 0
        for point in interrupted_everywhere(step, every=every):
            num_points += 1
            torch.testing.assert_close(step(), expected, msg=lambda text, at=point: f"{at}: {text}")
        assert num_points > 50


class Twins:
    """Offloaded experts and plain ones, after a step, with the gradients of the next."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        momentum = partial(sgd, momentum=0.9)
        self.plain = [nn.Linear(D, D) for _ in range(NUM_EXPERTS)]
        size = sum(4 * p.numel() for p in self.plain[0].parameters())
        self.experts = OffloadedExperts(
            copy.deepcopy(self.plain), momentum, max_resident_bytes=int(3.5 * size)
        )
        self.optimizers = [momentum(module.parameters()) for module in self.plain]
        self.notes: list[str] = []
        self.backward()
        self.step()
        self.step_plain()
        self.backward()

    def backward(self) -> None:
        self.is_done = False
        x = torch.randn(3, D)
        for module in [*self.experts, *self.plain]:
            module(x).square().sum().backward()

    def step(self) -> None:
        try:
            self.experts.step()
            self.is_done = True
        except KeyboardInterrupt as error:
            self.notes += getattr(error, "__notes__", [])
            raise

    def step_plain(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for module in [self.experts, *self.plain]:
            module.zero_grad()

    def check(self, at: str) -> None:
        """Compare those that no note names, in the next step as well."""
        for _ in range(2):
            if not self.is_done:
                self.step()
            self.step_plain()
            for i, module in enumerate(self.plain):
                if not any(f"expert-{i:05}" in note for note in self.notes):
                    torch.testing.assert_close(self.experts.state_dict(i), {**module.state_dict()}, msg=at)
            self.backward()
        self.experts.close()


def test_a_step_that_ctrl_c_ends_has_updated_each_expert_whole_or_not_or_names_it() -> None:
    num_points = 0
    twins = [Twins()]
    for point in interrupted_everywhere(lambda: twins[-1].step(), every=47):
        torch.set_grad_enabled(True)  # torch's own `no_grad` may stay on
        twins.pop().check(point)
        twins.append(Twins())
        num_points += 1
    assert num_points > 50
    twins.pop().experts.close()


def test_a_step_in_which_a_handler_of_ctrl_c_copies_weights_is_the_same(tmp_path: Path) -> None:
    modules = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(NUM_EXPERTS)]
    size = sum(4 * p.numel() for p in modules[0].parameters())
    tokens, num_points = torch.randn(6, D), 0
    with OffloadedExperts(modules, sgd, max_resident_bytes=int(3.5 * size), store=tmp_path) as experts:
        weights = [experts.state_dict(index) for index in range(NUM_EXPERTS)]

        def copy(*_: object) -> None:
            copies.append([experts.state_dict(index) for index in range(NUM_EXPERTS)])

        def step() -> None:
            experts.zero_grad()
            sum(one_by_one(experts, tokens)).square().sum().backward()
            gradients.append([experts.gradients(index) for index in range(NUM_EXPERTS)])

        gradients: list[Any] = []
        copies: list[Any] = []
        step()
        before = signal.signal(signal.SIGINT, copy)
        try:
            for point in interrupted_everywhere(step, every=167):
                num_points += 1
                at = f"{point}: {{}}".format
                torch.testing.assert_close(copies.pop(), weights, msg=at)
                torch.testing.assert_close(gradients.pop(), gradients[0], msg=at)
        finally:
            signal.signal(signal.SIGINT, before)
        assert num_points > 50
        assert not copies
