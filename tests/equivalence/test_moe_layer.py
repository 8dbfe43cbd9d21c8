"""The layer equals a plain loop over experts, and the plain loop equals the Mixtral mathematics."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.plain_layer import D_MODEL, assert_equals_plain_loop, grads_of, layer_of, plain_loop

# ---- values and gradients


@pytest.mark.parametrize(
    "shape", [(D_MODEL,), (1, D_MODEL), (40, D_MODEL), (3, 5, D_MODEL), (2, 1, 4, D_MODEL)]
)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_values_and_all_gradients_are_those_of_a_plain_loop(shape: tuple[int, ...], top_k: int) -> None:
    assert_equals_plain_loop(layer_of(top_k=top_k), torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [{"max_concurrency": 1}, {"max_concurrency": 2}, {"recompute": True}, {"defer_weight_grads": True}],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize(
    "make_expert", [FeedForwardExpert, lambda d: SwiGLUExpert(d, 20)], ids=["ffn", "swiglu"]
)
def test_no_option_changes_a_number(make_expert: Callable[[int], nn.Module], options: dict[str, Any]) -> None:
    layer = layer_of(lambda: make_expert(D_MODEL), **options)
    assert_equals_plain_loop(layer, torch.randn(40, D_MODEL, dtype=torch.float64))


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_dropped_choices_add_nothing_to_values_and_gradients(top_k: int, on_failure: str) -> None:
    layer = layer_of(top_k=top_k, on_failure=on_failure)
    layer.router.capacity_factor = 0.5
    x = torch.randn(4, 10, D_MODEL, dtype=torch.float64)
    assert_equals_plain_loop(layer, x)
    y, routing = layer(x, return_routing=True)
    without_any = ~routing.is_kept.any(dim=1)
    assert routing.num_dropped > 0
    assert top_k > 1 or without_any.any()
    assert not y.reshape(40, D_MODEL)[without_any].any()


@pytest.mark.parametrize("option", ["", "recompute", "defer_weight_grads"])
def test_losses_of_layers_within_experts_are_added_as_the_page_says(option: str) -> None:
    """By the code of docs/index.md; the plain loop adds them to what it is about."""
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text("utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "AddLoss" in code]
    names: dict[str, Any] = {}
    torch.manual_seed(1)
    exec(code, names)
    model, tokens = names["model"].double(), torch.randn(30, 16, dtype=torch.float64)
    losses = list[Tensor]()

    def plainly(within: nn.Module, x: Tensor) -> Tensor:
        losses.append(0.01 * within.router(x).load_balancing_loss)
        return plain_loop(within, x)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        x = tokens.clone().requires_grad_()
        y = function(x)
        torch.stack([y.square().mean(), *losses]).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    setattr(model, option or "recompute", bool(option))
    got = gradients(model)
    for expert in model.experts:
        expert.forward = functools.partial(plainly, expert.layer)
    for mine, same in zip(got, gradients(lambda x: plain_loop(model, x)), strict=True):
        torch.testing.assert_close(mine, same)
    assert len(losses) == 4


def test_tokens_that_do_not_lie_contiguously_are_taken_as_they_read() -> None:
    x = torch.randn(D_MODEL, 10, 3, dtype=torch.float64).permute(2, 1, 0)
    assert_equals_plain_loop(layer_of(), x)


def test_bfloat16_layers_agree_within_bfloat16() -> None:
    layer = layer_of(dtype=torch.bfloat16)
    x = torch.randn(40, D_MODEL, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert_equals_plain_loop(layer, x, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_experts_compute_in_bfloat16_and_the_output_keeps_the_dtype_of_x(
    dtype: torch.dtype,
) -> None:
    seen: list[torch.dtype] = []

    class Watching(FeedForwardExpert):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    layer = layer_of(lambda: Watching(D_MODEL), dtype=torch.float32)
    x = torch.randn(40, D_MODEL, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = layer(x, return_routing=True)
    assert set(seen) == {torch.bfloat16}
    assert y.dtype == dtype
    assert routing.probabilities.dtype == torch.float32


def test_autocast_gives_the_numbers_of_a_plain_loop_under_autocast() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(40, D_MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equals_plain_loop(layer, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("of_experts", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_autocast", [torch.float16, torch.bfloat16])
def test_under_autocast_to_another_dtype_experts_may_return_what_they_are_hosted_in(
    of_autocast: torch.dtype, of_experts: torch.dtype, on_failure: str
) -> None:
    class Elsewhere(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ConnectionError("gone")
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float()).to(of_experts)

    layer = layer_of(lambda: Elsewhere(D_MODEL, D_MODEL), dtype=torch.float32, on_failure=on_failure)
    if on_failure == "drop":
        layer.experts[0].fails = True
    with torch.autocast("cpu", dtype=of_autocast):
        y = layer(torch.randn(40, D_MODEL))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert layer.experts[1].weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("check", "options"), [(gradcheck, {}), (gradgradcheck, {"fast_mode": True})], ids=["first", "second"]
)
def test_derivatives_are_exact(check: Callable[..., bool], options: dict[str, bool]) -> None:
    layer = layer_of(lambda: nn.Sequential(nn.Linear(D_MODEL, D_MODEL), nn.Tanh()), num_experts=3)
    names = ("router.weight", "experts.0.0.weight", "experts.2.0.bias")

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = leaf(torch.randn(4, D_MODEL, dtype=torch.float64))
    assert check(call, (x, *(leaf(layer.get_parameter(name)) for name in names)), **options)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def test_the_layer_trains_as_the_plain_loop_trains() -> None:
    layer = layer_of()
    twin = copy.deepcopy(layer)
    x, target = torch.randn(2, 64, D_MODEL, dtype=torch.float64)
    losses: list[list[float]] = [[], []]
    for curve, module, function in (
        (losses[0], layer, layer),
        (losses[1], twin, lambda x: plain_loop(twin, x)),
    ):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.mse_loss(function(x), target)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict(), rtol=1e-7, atol=1e-9)


# ---- Mixtral


def test_the_layer_computes_the_formula_of_the_mixtral_paper() -> None:
    """y = sum_i Softmax(Top2(x W_g))_i * SwiGLU_i(x): the softmax over the kept logits alone is the same."""
    layer, x = layer_of(lambda: SwiGLUExpert(D_MODEL, 20)), torch.randn(30, D_MODEL, dtype=torch.float64)
    logits = x @ layer.router.weight.T
    best, index = logits.topk(2, dim=-1)
    kept = torch.full_like(logits, float("-inf")).scatter(1, index, best)
    gates_TE = torch.softmax(kept, dim=-1)
    expected = torch.zeros_like(x)
    for i, expert in enumerate(layer.experts):
        swiglu = (F.silu(x @ expert.gate.weight.T) * (x @ expert.up.weight.T)) @ expert.down.weight.T
        expected = expected + gates_TE[:, i : i + 1] * swiglu
    torch.testing.assert_close(layer(x), expected)


def test_a_feed_forward_expert_is_widen_activate_narrow() -> None:
    expert, x = FeedForwardExpert(D_MODEL, activation=torch.relu), torch.randn(5, D_MODEL)
    assert expert.up.out_features == 4 * D_MODEL
    hidden = torch.relu(x @ expert.up.weight.T + expert.up.bias)
    torch.testing.assert_close(expert(x), hidden @ expert.down.weight.T + expert.down.bias)


# ---- in company


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself, and around a plain loop as well
def test_a_compiled_model_with_the_layer_inside_gives_the_same_gradients() -> None:
    layer = layer_of()
    model = nn.Sequential(nn.Linear(D_MODEL, D_MODEL), layer, nn.Linear(D_MODEL, D_MODEL)).double()
    x = torch.randn(40, D_MODEL, dtype=torch.float64)
    expected = grads_of(model, model, x)
    torch.testing.assert_close(grads_of(torch.compile(model, backend="aot_eager"), model, x), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_layer_gives_the_same_gradients(use_reentrant: bool) -> None:
    layer, x = layer_of(), torch.randn(40, D_MODEL, dtype=torch.float64)
    expected = grads_of(layer, layer, x)
    actual = grads_of(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), layer, x)
    torch.testing.assert_close(actual, expected)


def test_what_the_experts_save_passes_through_the_callers_saved_tensor_hooks() -> None:
    layer, x = layer_of(), torch.randn(40, D_MODEL, dtype=torch.float64)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, routing = layer(x.requires_grad_(), return_routing=True)
    hidden = [(num_tokens, 20) for num_tokens in routing.tokens_per_expert.tolist() if num_tokens]
    assert set(hidden) <= set(packed), "each expert saves what its activation was given"
