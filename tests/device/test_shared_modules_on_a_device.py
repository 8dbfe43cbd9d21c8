"""Calls of modules on a device that share weights, casts, statistics or embeddings, and derivatives of any order.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_autograd import parallel_apply
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, hold_up
from tests.support.experts_held_up import (
    EXPERTS,
    NUM_CALLS,
    WIDTH,
    Apply,
    Late,
    delayed,
    layer_of,
    tokens,
)
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu


class AfterTheFirst(nn.Module):
    """What several calls share: the first call's kernels come late, and the other calls begin when they are queued."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor, *, is_first: bool, begun: threading.Event) -> Tensor:
        if is_first:
            hold_up()
        else:
            begun.wait()
        y: Tensor = self.shared(x)
        begun.set()
        return y


def apply_after_the_first(apply: Apply, shared: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    begun = threading.Event()
    kwargs = [{"is_first": i == 0, "begun": begun} for i in range(len(xs))]
    return list(apply([AfterTheFirst(shared)] * len(xs), [(x,) for x in xs], kwargs))


@pytest.mark.parametrize("seed", range(3))
def test_a_cast_weight_that_one_call_has_put_into_the_cache_is_there_for_the_others(seed: int) -> None:
    def run(apply: Apply) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(seed)
        shared, xs = nn.Linear(256, 256).to(DEVICE), torch.randn(NUM_CALLS, 8, 256).to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            outputs = apply_after_the_first(apply, shared, list(xs))
        torch.stack(outputs).float().square().sum().backward()
        return [y.detach() for y in outputs], [g / g.abs().max() for g in grads_of(shared.parameters())]

    (ours, our_grads), (theirs, their_grads) = run(parallel_apply), run(one_after_another)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_grads, their_grads, rtol=0, atol=2e-2)  # the loop adds in bfloat16


class KeepsStatistics(nn.Module):
    """A module of a user's own that says so."""

    keeps_statistics = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(self.mean * 0.5 + x.detach().mean(0))
        return x - self.mean.clone()


def statistics_of(apply: Apply, shared: nn.Module) -> list[Tensor]:
    shared.to(DEVICE, torch.float64)
    xs = [(tokens() * (i + 1) + i).requires_grad_() for i in range(NUM_CALLS)]

    def call(x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            hold_up()
        y: Tensor = shared(x)
        return y

    outputs = apply([call] * NUM_CALLS, [(x,) for x in xs], [{"is_first": i == 0} for i in range(NUM_CALLS)])
    kept = [buffer.clone() for buffer in shared.buffers()]
    torch.stack(list(outputs)).square().sum().backward()
    return [*kept, *[y.detach() for y in outputs], *grads_of([*xs, *shared.parameters()])]


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(WIDTH), KeepsStatistics], ids=["batch norm", "own"])
def test_calls_that_share_running_statistics_take_turns_on_the_device_as_well(
    make: Callable[[], nn.Module],
) -> None:
    torch.testing.assert_close(
        statistics_of(parallel_apply, make()), statistics_of(one_after_another, make())
    )


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_the_weights_that_a_first_call_of_a_lazy_module_makes_are_there_for_the_others() -> None:
    shared = nn.LazyLinear(256, device=DEVICE)

    def call(x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            hold_up()
        y: Tensor = shared(x)
        return y

    xs = list(torch.randn(NUM_CALLS, 8, 256).to(DEVICE))
    kwargs = [{"is_first": i == 0} for i in range(NUM_CALLS)]
    outputs = parallel_apply([call] * NUM_CALLS, [(x,) for x in xs], kwargs)
    torch.testing.assert_close(outputs, [F.linear(x, shared.weight, shared.bias) for x in xs])


class Several(nn.Module):
    """Takes several tensors and other things, and returns tensors among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], count: int, *, scale: Tensor) -> dict[str, Any]:
        x, y = pair
        x, y = delayed(self.linear(x)), delayed(y)
        return {"sum": x + y * scale, "pair": [x * y, None], "count": count, "mask": x > 0}


def test_shared_weights_several_inputs_keywords_and_other_results_are_as_in_a_loop() -> None:
    def run(apply: Apply) -> Any:
        torch.manual_seed(3)
        modules = [Several().to(DEVICE, torch.float64) for _ in range(2)] * 2
        x, y, scale = tokens().requires_grad_(), tokens().requires_grad_(), tokens(1).requires_grad_()
        inputs = [((delayed(x), y * i), i) for i in range(4)]
        outputs = apply(modules, inputs, [{"scale": scale}] * 4)
        sum((o["sum"] + o["pair"][0]).square().sum() for o in outputs).backward()
        said = [{**o, "sum": o["sum"].detach(), "pair": o["pair"][0].detach()} for o in outputs]
        assert [o["pair"][1] for o in outputs] == [None] * 4
        assert [o["count"] for o in outputs] == [0, 1, 2, 3]
        return said, grads_of([x, y, scale, *parameters(modules[:2])])

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


def parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    grads = [tensor.grad for tensor in tensors]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_derivative_is_that_of_a_loop(recompute: bool) -> None:
    def run(apply: Apply) -> list[Tensor]:
        torch.manual_seed(4)
        modules = [Late(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(NUM_CALLS)]
        for module in modules:
            module.to(DEVICE, torch.float64)
        xs = [(tokens() + i).requires_grad_() for i in range(NUM_CALLS)]
        outputs = apply(modules, [(x * 2,) for x in xs], recompute=recompute)
        first = torch.autograd.grad(delayed(torch.stack(list(outputs))).sin().sum(), xs, create_graph=True)
        delayed(torch.stack(first)).square().sum().backward()
        return [*[g.detach() for g in first], *grads_of([*xs, *parameters(modules)])]

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


@pytest.mark.parametrize("is_shared", [False, True])
def test_sparse_gradients_of_embeddings_are_those_of_a_loop(is_shared: bool) -> None:
    def run(apply: Apply) -> list[Tensor]:
        torch.manual_seed(6)
        count = 1 if is_shared else NUM_CALLS
        tables = [nn.Embedding(20, WIDTH, sparse=True).to(DEVICE) for _ in range(count)]
        indices = torch.randint(20, (NUM_CALLS, 9)).to(DEVICE)
        called = [nn.Sequential(tables[i % count], Late(nn.Tanh())) for i in range(NUM_CALLS)]
        outputs = apply(called, [(index,) for index in indices])
        delayed(torch.stack(list(outputs))).square().sum().backward()
        grads = grads_of([table.weight for table in tables])
        assert [grad.is_sparse for grad in grads] == [True] * count
        return [grad.coalesce().to_dense() for grad in grads]

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


def test_a_scaler_that_meets_an_inf_leaves_out_the_same_step() -> None:
    def run(*, is_plain: bool) -> tuple[list[float], list[Tensor]]:
        layer = layer_of(EXPERTS["feed-forward"], dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=1)
        scales = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                x = tokens(dtype=torch.float32)
                y = plain_loop(layer, x) if is_plain else layer(x)
            scaler.scale((y * factor).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in layer.parameters()]

    expected = run(is_plain=True)
    assert expected[0] == [128.0, 64.0, 128.0]
    torch.testing.assert_close(run(is_plain=False), expected, rtol=2e-2, atol=2e-2)
