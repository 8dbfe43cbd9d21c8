"""Recompute among concurrent calls gives the gradients, masks and modes of a plain loop.

Both ways: `parallel_apply(..., recompute=True)`, and `torch.utils.checkpoint.checkpoint` used by the user's own
modules inside concurrent calls.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import FeedForwardExpert
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.autograd.reading.work import DROPOUTS
from moe_autograd.autograd.saved_tensors import is_checkpointed
from tests.support.recomputing import WORKERS, Checkpointed, assert_same, experts_of, ffn, gradients


@pytest.mark.parametrize("workers", WORKERS)
def test_gradients_are_those_of_a_plain_loop(workers: int) -> None:
    experts = experts_of(ffn)
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4, requires_grad=True)
    want = torch.stack([module(x * i) for i, module in enumerate(plain)])
    got = torch.stack(
        parallel_apply(experts, [(x * i,) for i in range(8)], max_concurrency=workers, recompute=True)
    )
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sin().sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad(want.sin().sum(), x, retain_graph=True)
    torch.testing.assert_close(grad, wanted)
    got.sin().sum().backward()
    want.sin().sum().backward()
    assert_same(gradients(experts), gradients(plain))


@pytest.mark.usefixtures("some_are_small")
@pytest.mark.parametrize("kind", sorted(DROPOUTS, key=str))
def test_small_calls_that_draw_are_a_loop_of_checkpoints_and_draw_what_they_draw_on_threads(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again in each backward; and the caller's stream goes on as if the map had drawn once."""
    modules = experts_of(lambda: nn.Sequential(nn.Linear(4, 4), kind(0.5), nn.Linear(4, 4)), num=4)
    weights = [weight for module in modules for weight in module.parameters()]
    shape = (3, 4, 4) if kind is nn.Dropout1d else (3, 2, 2, 4)

    def run() -> tuple[bool, list[Any]]:
        x = torch.linspace(-1, 1, 48).view(shape).requires_grad_()
        torch.manual_seed(3)
        outputs = parallel_apply(modules, [(x,)] * 4, recompute=True)
        y, after = torch.stack(outputs), [torch.rand(3)]
        grads: list[Tensor] = []
        x.register_hook(lambda grad: grad + torch.rand_like(grad))
        for is_last in (False, True):
            grads += torch.autograd.grad(y.sin().sum(), [x, *weights], retain_graph=not is_last)
            after.append(torch.rand(3))
        return "Join" in type(outputs[0].grad_fn).__name__, [y, *after, *grads]

    is_joined, found = run()
    assert not is_joined
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    monkeypatch.setattr(in_turn, "LEAST_LARGE", math.inf)
    is_joined, wanted = run()
    assert is_joined
    assert_same(found, wanted)  # there with other intra-op threads
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.usefixtures("some_are_small")
def test_the_second_run_of_a_small_call_leaves_the_generator_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It belongs to all threads: to lend it out for a moment, as `checkpoint` does, would change what others draw."""
    noted: list[Tensor] = []
    monkeypatch.setattr(torch, "set_rng_state", noted.append)
    for make in (
        lambda: ffn(0.5),
        lambda: nn.Sequential(FeedForwardExpert(4, 8), nn.Dropout(0.5), nn.Linear(4, 4)),
    ):
        experts, x = experts_of(make, num=2), torch.ones(5, 4, requires_grad=True)
        (y, _) = parallel_apply(experts, [(x,)] * 2, recompute=True)
        assert is_checkpointed(y.grad_fn)
        y.sum().backward()
        assert noted == []


def test_dropout_masks_are_the_same_with_any_number_of_workers_and_without_recompute() -> None:
    runs = []
    for workers in WORKERS:
        for recompute in (False, True):
            experts = experts_of(lambda: ffn(0.5))
            x = torch.ones(5, 4, requires_grad=True)
            torch.manual_seed(7)
            outputs = parallel_apply(experts, [(x,)] * 8, max_concurrency=workers, recompute=recompute)
            torch.stack(outputs).sum().backward()
            runs.append([*outputs, x.grad, *gradients(experts), torch.rand(3)])
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert not torch.equal(runs[0][0], runs[0][1])


@pytest.mark.stress
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_users_own_checkpoint_with_dropout_inside_concurrent_experts(
    workers: int, recompute: bool
) -> None:
    """With ones as inputs and weights the gradient of the input is the mask, which is the result."""

    for repetition in range(10):
        torch.manual_seed(repetition)
        xs = [torch.ones(50, requires_grad=True) for _ in range(8)]
        outputs = parallel_apply(
            [Checkpointed(OneMask()) for _ in range(8)],
            [(x,) for x in xs],
            max_concurrency=workers,
            recompute=recompute,
        )
        torch.stack(outputs).sum().backward()
        for x, output in zip(xs, outputs, strict=True):
            assert torch.equal(x.grad, output)
        assert len({tuple(output.tolist()) for output in outputs}) == 8


class OneMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x * x.detach(), 0.3) * 1.0, 0.3)


@pytest.mark.parametrize("workers", WORKERS)
def test_autocast_is_the_same_in_the_recomputation(workers: int) -> None:
    experts = experts_of(lambda: Checkpointed(ffn()))
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = parallel_apply(experts, [(x,)] * 8, max_concurrency=workers, recompute=True)
        want = [module(x) for module in plain]
    assert {output.dtype for output in got} == {torch.bfloat16}
    torch.stack(got).float().sum().backward()
    torch.stack(want).float().sum().backward()
    assert_same(gradients(experts), gradients(plain))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, pair: tuple[Tensor, dict[str, Any]], *, scale: Tensor, name: str) -> dict[str, Any]:
        x, rest = pair
        y = (x * self.weight * scale + rest["bias"]).tanh()
        return {"y": y, "seen": [y.detach(), name], "z": y * rest["detached"]}


def test_keyword_arguments_nested_inputs_and_detached_tensors() -> None:
    experts = experts_of(Nested)
    plain = copy.deepcopy(experts)
    x, bias, scale = (torch.randn(4, requires_grad=True) for _ in range(3))
    inputs = [((x * i, {"bias": bias, "detached": bias.detach()}),) for i in range(8)]
    kwargs = [{"scale": scale, "name": f"ffn.{i}"} for i in range(8)]
    got = parallel_apply(experts, inputs, kwargs, recompute=True)
    want = [m(*i, **k) for m, i, k in zip(plain, inputs, kwargs, strict=True)]
    totals = [sum(result["y"].sum() + result["z"].sum() for result in results) for results in (got, want)]
    found = [torch.autograd.grad(total, [x, bias, scale], retain_graph=True) for total in totals]
    assert_same(*found)
    for total in totals:
        total.backward(retain_graph=True)  # both share the graph of the inputs
    assert_same(gradients(experts), gradients(plain))
    assert [result["seen"][1] for result in got] == [f"ffn.{i}" for i in range(8)]
    assert not got[0]["seen"][0].requires_grad


def test_what_an_expert_calls_recomputed_is_its_own_business() -> None:
    expert, x = ffn(), torch.randn(5, 4, requires_grad=True)
    expert.recomputed = False  # type: ignore[assignment]
    (got,) = parallel_apply([expert], [(x,)], recompute=True)
    assert torch.equal(got, expert(x))


def test_partial_backwards_and_inputs_without_gradients() -> None:
    experts = experts_of(lambda: Checkpointed(ffn()))
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4)
    for modules, recompute in ((experts, True), (plain, False)):
        outputs = parallel_apply(modules, [(x,)] * 8, recompute=recompute)
        outputs[3].sum().backward(retain_graph=True)
        first = next(iter(modules[5].parameters()))
        (outputs[5].sum() + outputs[6].sum()).backward(inputs=[first], retain_graph=True)
        torch.stack(outputs[:2]).sum().backward()
    assert_same(gradients(experts), gradients(plain))
    assert experts[6].inside[0].weight.grad is None


@pytest.mark.parametrize("workers", WORKERS)
def test_nested_three_deep(workers: int) -> None:
    experts = experts_of(
        lambda: Checkpointed(nn.Sequential(Checkpointed(ffn(0.5)), nn.Tanh(), Checkpointed(ffn())))
    )
    runs = []
    for recompute in (False, True):
        modules, x = copy.deepcopy(experts), torch.ones(5, 4, requires_grad=True)
        torch.manual_seed(3)
        outputs = parallel_apply(modules, [(x,)] * 8, max_concurrency=workers, recompute=recompute)
        torch.stack(outputs).sum().backward()
        runs.append([*outputs, x.grad, *gradients(modules)])
    assert_same(*runs)


@pytest.mark.parametrize(("call", "num_runs"), [(parallel_apply, 2), (None, 1)], ids=["map", "checkpoint"])
def test_the_backward_of_a_second_derivative_runs_forwards_as_often_as_the_page_says(
    call: Any, num_runs: int
) -> None:
    """Running statistics tell. `torch.utils.checkpoint` is here for what the page says of it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = call([module], [(x,)], recompute=True)[0] if call else checkpoint(module, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    before = module[1].num_batches_tracked.item()
    assert before == 2
    grad.square().sum().backward()
    assert module[1].num_batches_tracked.item() - before == num_runs
