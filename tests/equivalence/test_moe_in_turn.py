"""Without gradients a layer calls experts that only compute as a loop does, in its memory, to the same bits."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.moe import in_turn, layer
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routing import Routing
from moe_autograd.timeline import record_timeline
from tests.support.plain_layer import D_MODEL, layer_of, plain_loop

NUM_TOKENS = 40


class Loops:
    """Counts the passes that were a loop, each of several additions."""

    num_loops = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def compute_in_turn(*args: Any) -> Tensor:
            self.num_loops += 1
            return in_turn.compute_in_turn(*args)

        monkeypatch.setattr(layer, "compute_in_turn", compute_in_turn)
        monkeypatch.setattr(in_turn, "_LEAST_AT_ONCE", 10 * D_MODEL)


@pytest.fixture
def loops(some_are_small: None, monkeypatch: pytest.MonkeyPatch) -> Loops:
    return Loops(monkeypatch)


class InPlace(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D_MODEL, D_MODEL)

    def only_computes(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2)).relu_()


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "ffn": lambda: FeedForwardExpert(D_MODEL, 20),
    "swiglu": lambda: SwiGLUExpert(D_MODEL, 20),
    "returns its input": nn.Identity,
    "in place": InPlace,
    "with a batch norm": lambda: nn.Sequential(nn.Linear(D_MODEL, D_MODEL), nn.BatchNorm1d(D_MODEL)).eval(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make_expert", EXPERTS.values(), ids=EXPERTS)
def test_values_are_those_with_gradients_to_the_bit(
    make_expert: Callable[[], nn.Module], dtype: torch.dtype, loops: Loops
) -> None:
    moe, x = layer_of(make_expert, top_k=3, dtype=dtype), torch.randn(NUM_TOKENS, D_MODEL, dtype=dtype)
    expected = moe(x)
    assert loops.num_loops == 0
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            actual = moe(x.reshape(5, 8, D_MODEL)).reshape(x.shape)
        assert torch.equal(actual, expected)
        assert not actual.requires_grad
    assert loops.num_loops == 2
    if dtype.itemsize > 2:
        torch.testing.assert_close(expected, plain_loop(moe, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_likewise(dtype: torch.dtype, loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    with torch.autocast("cpu", dtype):
        expected = moe(x)
        with torch.no_grad():
            assert torch.equal(moe(x), expected)
    assert loops.num_loops == 1


def test_choices_that_are_dropped_add_nothing(loops: Loops) -> None:
    moe, x = layer_of(top_k=3), torch.randn(NUM_TOKENS, D_MODEL, dtype=torch.float64)
    moe.router.capacity_factor = 0.5
    expected, routing = moe(x, return_routing=True)
    assert routing.num_dropped > 0
    with torch.no_grad():
        assert torch.equal(moe(x), expected)
    assert loops.num_loops == 1


class Twice(nn.Module):
    """A router that chooses one expert twice for each token."""

    num_experts = 2

    def forward(self, x: Tensor) -> Routing:
        num_tokens = x.numel() // x.shape[-1]
        logits = torch.zeros(num_tokens, 2)
        index = torch.ones(num_tokens, 2, dtype=torch.int64)
        return Routing(logits, logits.softmax(1), index, torch.full((num_tokens, 2), 0.5))


def test_an_expert_may_have_more_calls_than_there_are_tokens(loops: Loops) -> None:
    moe = MixtureOfExperts(Twice(), [FeedForwardExpert(D_MODEL) for _ in range(2)])
    x = torch.randn(NUM_TOKENS, D_MODEL)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), moe.experts[1](x))
    assert loops.num_loops == 1


class Noting(nn.Module):
    """Notes how many tensors that it or others of its kind were given, or have returned, there are at its calls."""

    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def only_computes(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        self.counts.append(sum(tensor() is not None for tensor in self.alive))
        y = x * 2
        self.alive += [weakref.ref(x), weakref.ref(y)]
        return y


def test_tokens_and_results_of_an_expert_go_before_the_next_is_called(loops: Loops, no_gc: None) -> None:
    moe, x = layer_of(Noting), torch.randn(NUM_TOKENS, D_MODEL, dtype=torch.float64)
    Noting.alive, Noting.counts = [], []
    with torch.no_grad():
        moe(x)
    assert len(Noting.counts) == 6
    assert max(Noting.counts) <= 1  # a result that is small enough to wait for the next
    Noting.alive, Noting.counts = [], []
    moe(x)
    assert max(Noting.counts) > 5


class Failing(FeedForwardExpert):
    def only_computes(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("of an expert")


def test_an_expert_that_fails_is_named_as_with_gradients(loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    moe.experts[2] = Failing(D_MODEL)
    notes = []
    for has_grad in (True, False):
        with torch.set_grad_enabled(has_grad), pytest.raises(ArithmeticError, match="of an expert") as caught:
            moe(x)
        notes.append(caught.value.__notes__)
    assert notes[0] == notes[1] == ["parallel_apply, forward: raised by expert 2 (Failing) of 6."]
    assert loops.num_loops == 1


def test_an_expert_that_changes_the_shape_is_named(loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    moe.experts[2] = nn.Linear(D_MODEL, 3)
    with torch.no_grad(), pytest.raises(ValueError, match=r"keep the shape .* \(expert_index=2\)"):
        moe(x)
    assert loops.num_loops == 1


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def test_experts_may_return_several_dtypes(loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    moe.experts[3] = Wide()
    expected = moe(x)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), expected)
    assert loops.num_loops == 1


def _with_a_hook(moe: MixtureOfExperts) -> None:
    moe.experts[1].register_forward_hook(lambda *_: None)


def _that_drops_out(moe: MixtureOfExperts) -> None:
    moe.experts[1] = nn.Sequential(moe.experts[1], nn.Dropout())


@pytest.mark.parametrize("change", [_with_a_hook, _that_drops_out])
def test_experts_that_are_watched_or_draw_are_called_all_at_once(
    change: Callable[[MixtureOfExperts], None], loops: Loops
) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    change(moe)
    torch.manual_seed(0)
    expected = moe(x)
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), expected)
    assert loops.num_loops == 0


class Marked(Tensor):
    """A tensor that computes as others do, and whose results are marked."""


class Weighing(nn.Module):
    """A router that makes something else of its weights."""

    def __init__(self, router: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.num_experts, self.change = router, router.num_experts, change

    def forward(self, x: Tensor) -> Routing:
        routing = self.router(x)
        return dataclasses.replace(routing, combine_weights=self.change(routing.combine_weights))


def test_weights_of_another_class_make_results_of_that_class(loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    moe.router = Weighing(moe.router, lambda weights: weights.as_subclass(Marked))
    expected = moe(x)
    with torch.no_grad():
        actual = moe(x)
    assert type(actual) is type(expected) is Marked
    assert torch.equal(actual, expected)
    assert loops.num_loops == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_half_precision_are_rounded_as_with_gradients(dtype: torch.dtype, loops: Loops) -> None:
    moe, x = layer_of(top_k=4, dtype=dtype), torch.randn(NUM_TOKENS, D_MODEL, dtype=dtype)
    moe.router = Weighing(moe.router, lambda weights: weights.to(dtype))
    expected = moe(x)
    with torch.no_grad():
        assert torch.equal(moe(x), expected)
    assert loops.num_loops == 1


def test_few_tokens_are_called_all_at_once(loops: Loops) -> None:
    with torch.no_grad():
        layer_of()(torch.randn(9, D_MODEL, dtype=torch.float64))
    assert loops.num_loops == 0


def test_a_timeline_shows_each_expert(loops: Loops) -> None:
    moe, x = layer_of(dtype=torch.float32), torch.randn(NUM_TOKENS, D_MODEL)
    with torch.no_grad(), record_timeline() as timeline:
        moe(x)
    assert {span.name for span in timeline.spans} == {f"expert {index}" for index in range(6)}
    assert loops.num_loops == 0
