"""Gradients of each sample by `ExpandedWeight`, as of Opacus and `call_for_per_sample_grads`: those of a loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import CheckpointError, checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.contents import per_sample
from tests.support.limits_page import in_loop

D, NUM_SAMPLES = 6, 5
Apply = Callable[[Sequence[Callable[..., Any]], Sequence[tuple[Any, ...]]], Sequence[Any]]
OPTIONS: list[dict[str, Any]] = [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return result


class Ensemble(nn.Module):
    """Three calls, two of them of one expert, in a map or a loop; and, where it is nested, one in a map of its own."""

    def __init__(self, apply: Apply, *, is_nested: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([Expert(), Expert()])
        self.trunk, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.apply_, self.is_nested = apply, is_nested

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.experts

        def within(x: Tensor) -> Tensor:
            results: Sequence[Tensor] = self.apply_([first, second], [(x,), (x,)])
            return results[0] * results[1]

        calls = [first, second, within if self.is_nested else first]
        results = self.apply_(calls, [(x,), (self.trunk(x),), (3 * x,)])
        total: Tensor = self.head(results[0] + results[1] + results[2])
        return total


@pytest.fixture(autouse=True)
def _no_call_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)


def per_sample_grads(
    apply: Apply,
    backward: Callable[[Tensor, Tensor], Any],
    *,
    make: Callable[..., Ensemble] = Ensemble,
    **options: Any,
) -> dict[str, Any]:
    """Return the gradients of each sample, those of the weights, and what the backward returns."""
    model = make(apply, **options)
    x = torch.randn(NUM_SAMPLES, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    outputs = call_for_per_sample_grads(model, batch_size=NUM_SAMPLES)(x)
    returned = backward(outputs.square().sum(), x)
    named = dict(model.named_parameters())
    samples = {name: getattr(weight, "grad_sample", None) for name, weight in named.items()}
    return {"samples": samples, "grads": {name: weight.grad for name, weight in named.items()}, "x": returned}


def of_all(loss: Tensor, x: Tensor) -> Tensor | None:
    loss.backward()
    return x.grad


def of_the_input(loss: Tensor, x: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss, x)[0]


def twice(loss: Tensor, x: Tensor) -> Tensor | None:
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("backward", [of_all, of_the_input, twice])
def test_gradients_of_each_sample_are_those_of_a_loop(
    options: dict[str, Any], is_nested: bool, backward: Callable[[Tensor, Tensor], Any]
) -> None:
    def mapped(modules: Any, inputs: Any) -> Sequence[Any]:
        return parallel_apply(modules, inputs, **options)

    expected = per_sample_grads(in_loop, backward, is_nested=is_nested)
    assert all(grads is not None for grads in expected["samples"].values())
    found = per_sample_grads(mapped, backward, is_nested=is_nested)
    torch.testing.assert_close(found, expected)


class Meets(torch.autograd.Function):
    """Waits in its backward for another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: threading.Barrier) -> Tensor:
        ctx.meeting = meeting
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with contextlib.suppress(threading.BrokenBarrierError):
            ctx.meeting.wait(timeout=1.0)
        return grad, None


@pytest.mark.parametrize("is_per_sample", [True, False])
def test_calls_with_such_weights_are_made_one_after_the_other(is_per_sample: bool) -> None:
    """Two backwards could add to the gradients of one weight at once."""
    meeting = threading.Barrier(2)

    class Meeting(Expert):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Meets.apply(super().forward(x), meeting)  # type: ignore[no-untyped-call]
            return result

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Meeting(), Meeting()])

        def forward(self, x: Tensor) -> Tensor:
            results: list[Tensor] = parallel_apply(self.experts, [(x,), (x,)], max_concurrency=2)
            return results[0] + results[1]

    model, x = Two(), torch.ones(NUM_SAMPLES, D)
    call = call_for_per_sample_grads(model, batch_size=NUM_SAMPLES) if is_per_sample else model
    call(x).sum().backward()
    assert meeting.broken is is_per_sample


def checkpointed(modules: Any, inputs: Any) -> Sequence[Any]:
    return [
        checkpoint(module, *own, use_reentrant=False) for module, own in zip(modules, inputs, strict=True)
    ]


def recomputed(modules: Any, inputs: Any) -> Sequence[Any]:
    return parallel_apply(modules, inputs, recompute=True)


def test_running_forwards_again_raises_as_a_checkpoint_does() -> None:
    """Where they run again, the weights are those of the module."""

    for apply in (checkpointed, recomputed):
        with pytest.raises(CheckpointError, match="different metadata"):
            per_sample_grads(apply, of_all)


class Square(Ensemble):
    """Saves tensors of the same shapes in both runs."""

    def __init__(self, apply: Apply) -> None:
        super().__init__(apply)
        layers = [[nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)] for _ in self.experts]
        self.experts = nn.ModuleList([nn.Sequential(*each) for each in layers])


def test_where_that_does_not_see_it_gradients_are_those_of_a_checkpoint_and_not_of_a_loop() -> None:
    found = [per_sample_grads(apply, of_all, make=Square) for apply in (checkpointed, recomputed, in_loop)]
    torch.testing.assert_close(found[0], found[1])
    first = [grads["samples"]["experts.0.0.weight"] for grads in found]
    assert not torch.allclose(first[1], first[2])


def test_a_gradient_that_flows_to_such_a_weight_after_all_is_not_lost() -> None:
    """What stands for it at the join takes none."""
    weight = nn.Parameter(torch.ones(2))
    tied = per_sample.stand_in_for(ExpandedWeight(weight, 2, "sum"))
    assert (tied.shape, tied.is_leaf, tied.requires_grad) == ((0,), True, True)
    assert per_sample.stand_in_for(weight) is weight

    class Hands(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.ones(2)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    with pytest.raises(RuntimeError, match="invalid gradient"):
        Hands.apply(tied).sum().backward()  # type: ignore[no-untyped-call]
