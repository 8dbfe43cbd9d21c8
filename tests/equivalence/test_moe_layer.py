"""The layer equals a plain loop over experts, and the plain loop equals the Mixtral mathematics."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.moe.routing import Routing

D_MODEL = 12


def plain_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """The definition: one expert after the other, in the calling thread."""
    x_TD = x.reshape(-1, x.shape[-1])
    routing = layer.router(x_TD)
    y_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(layer.experts):
        tokens, choice = (routing.expert_index == index).nonzero(as_tuple=True)
        if len(tokens):
            weights = routing.combine_weights[tokens, choice].unsqueeze(1)
            y_TD = y_TD.index_add(0, tokens, (weights * expert(x_TD[tokens])).to(x.dtype))
    return y_TD.reshape(x.shape)


def layer_of(
    make_expert: Callable[[], nn.Module] = lambda: FeedForwardExpert(D_MODEL, 20),
    num_experts: int = 6,
    top_k: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> MixtureOfExperts:
    torch.manual_seed(1)
    router = TopKRouter(D_MODEL, num_experts, top_k)
    return MixtureOfExperts(router, [make_expert() for _ in range(num_experts)], **options).to(dtype)


def grads_of(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Values and gradients of a weighted sum of the outputs."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_equals_plain_loop(layer: MixtureOfExperts, x: Tensor, **tolerance: float) -> None:
    actual, expected = grads_of(layer, layer, x), grads_of(lambda x: plain_loop(layer, x), layer, x)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                actual[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


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


# ---- which experts are called, and with what


class Counting(nn.Module):
    """An expert that notes the shapes it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, D_MODEL)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return self.linear(x)


def favour(layer: MixtureOfExperts, expert_index: int) -> None:
    """Make the router send every positive token to one expert first."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[expert_index] = 1.0


def test_an_expert_is_called_once_with_all_its_tokens_and_idle_ones_are_not() -> None:
    layer = layer_of(Counting, num_experts=30, top_k=2)
    _, routing = layer(torch.randn(2, 9, D_MODEL, dtype=torch.float64), return_routing=True)
    loads = routing.tokens_per_expert.tolist()
    assert 0 in loads
    assert [expert.shapes for expert in layer.experts] == [[(n, D_MODEL)] if n else [] for n in loads]


def test_an_expert_is_not_called_with_more_tokens_than_its_capacity() -> None:
    layer = layer_of(Counting, dtype=torch.float32)
    favour(layer, 2)
    layer.router.capacity_factor = 1.5
    layer(torch.rand(10, 3, D_MODEL))
    sizes = [rows for expert in layer.experts for rows, _ in expert.shapes]
    assert max(sizes) == layer.experts[2].shapes[0][0] == 15


def test_a_router_of_ones_own_may_drop_everything() -> None:
    class DropsAll(TopKRouter):
        def forward(self, x: Tensor) -> Routing:
            return dataclasses.replace(super().forward(x), is_kept=torch.zeros(7, 2, dtype=torch.bool))

    experts = [nn.Linear(4, 4) for _ in range(3)]
    for on_failure in ("raise", "drop"):
        layer = MixtureOfExperts(DropsAll(4, 3, 2), experts, on_failure=on_failure)
        assert torch.equal(layer(torch.randn(7, 4)), torch.zeros(7, 4))


def test_parameters_of_idle_experts_get_no_gradient() -> None:
    layer = layer_of(num_experts=3, top_k=1)
    favour(layer, 1)
    layer(torch.rand(5, D_MODEL, dtype=torch.float64)).sum().backward()
    has_grad = [all(p.grad is not None for p in expert.parameters()) for expert in layer.experts]
    has_none = [all(p.grad is None for p in expert.parameters()) for expert in layer.experts]
    assert (has_grad, has_none) == ([False, True, False], [True, False, True])


def test_idle_experts_get_zeros_when_asked_and_busy_ones_what_they_got_before() -> None:
    plain, zeros = (
        layer_of(num_experts=3, top_k=1),
        layer_of(num_experts=3, top_k=1, zero_grads_for_idle_experts=True),
    )
    x = torch.rand(5, D_MODEL, dtype=torch.float64)
    for layer in (plain, zeros):
        favour(layer, 1)
        layer(x).sum().backward()
    for name, parameter in zeros.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad, torch.zeros_like(parameter) if expected is None else expected
        )


@pytest.mark.parametrize("zero_grads_for_idle_experts", [False, True])
def test_the_caller_may_change_the_output_in_place(zero_grads_for_idle_experts: bool) -> None:
    layer = layer_of(zero_grads_for_idle_experts=zero_grads_for_idle_experts)
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y += x
    y.mul_(2).sum().backward()
    (expected,) = torch.autograd.grad((2 * (plain_loop(layer, x) + x)).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_no_token_calls_no_expert_and_still_has_gradients_to_give() -> None:
    layer = layer_of(Counting)
    x = torch.empty(2, 0, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    assert y.shape == x.shape
    assert routing.tokens_per_expert.sum() == 0
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(layer.router.weight.grad, torch.zeros_like(layer.router.weight))
    assert all(expert.shapes == [] for expert in layer.experts)


def test_an_expert_may_work_in_place_on_what_it_is_given() -> None:
    layer = layer_of(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D_MODEL, D_MODEL)))
    assert_equals_plain_loop(layer, torch.randn(40, D_MODEL, dtype=torch.float64))


def test_one_module_may_serve_as_several_experts() -> None:
    shared = FeedForwardExpert(D_MODEL)
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 2), [shared, FeedForwardExpert(D_MODEL), shared]).double()
    assert_equals_plain_loop(layer, torch.randn(40, D_MODEL, dtype=torch.float64))


def test_without_gradients_nothing_is_recorded() -> None:
    layer, x = layer_of(), torch.randn(4, D_MODEL, dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, plain_loop(layer, x).detach())


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


# ---- the module


@pytest.mark.parametrize("container", [list, tuple, iter, nn.ModuleList])
def test_experts_may_come_in_any_order_keeping_container(container: Callable[[list[nn.Module]], Any]) -> None:
    experts = [FeedForwardExpert(D_MODEL) for _ in range(3)]
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 1), container(experts))
    assert list(layer.experts) == experts


@pytest.mark.parametrize("container", [dict, OrderedDict, nn.ModuleDict])
def test_of_a_mapping_the_values_are_taken_in_its_order(container: Callable[[Any], Any]) -> None:
    experts = {name: FeedForwardExpert(D_MODEL) for name in ("ffn_2", "ffn_10", "ffn_0")}
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 1), container(experts))
    assert list(layer.experts) == list(experts.values())


def test_local_experts_are_submodules_that_move_save_and_load_with_the_layer() -> None:
    layer = layer_of(dtype=torch.float32)
    names = [name for name, _ in layer.named_parameters()]
    assert "router.weight" in names
    assert [name for name in names if name.startswith("experts.5.")]
    assert next(layer.double().experts[0].parameters()).dtype == torch.float64
    other = layer_of().double()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, D_MODEL, dtype=torch.float64)
    assert torch.equal(other(x), layer(x))


def test_the_routing_is_returned_not_kept() -> None:
    layer, x = layer_of(), torch.randn(10, D_MODEL, dtype=torch.float64)
    before = set(vars(layer))
    _, routing = layer(x, return_routing=True)
    assert isinstance(routing, Routing)
    assert set(vars(layer)) == before
    assert layer(x).shape == x.shape


def test_the_repr_names_only_options_that_were_chosen() -> None:
    assert "max_concurrency" not in repr(layer_of())
    assert "max_concurrency=3" in repr(layer_of(max_concurrency=3))


# ---- bad calls


def test_another_number_of_experts_than_the_router_chooses_from_is_refused() -> None:
    with pytest.raises(ValueError, match=r"as the router chooses from, 4, got 3 \(num_experts=4\)"):
        MixtureOfExperts(TopKRouter(D_MODEL, 4, 2), [nn.Identity()] * 3)


def test_one_module_for_all_experts_is_refused() -> None:
    with pytest.raises(TypeError, match="expected several experts, got one Linear"):
        MixtureOfExperts(TopKRouter(4, 2, 1), nn.Linear(4, 4))  # type: ignore[arg-type]  # the point of the test


def test_a_router_that_is_none_is_refused() -> None:
    experts = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(
        TypeError, match=r"expected a router with an int num_experts, got Linear \(num_experts=None\)"
    ):
        MixtureOfExperts(nn.Linear(4, 2), experts)
    no_router = nn.Identity()
    no_router.num_experts = 2  # type: ignore[assignment]  # the point of the test
    with pytest.raises(TypeError, match="expected the router to return a Routing, got Tensor"):
        MixtureOfExperts(no_router, experts)(torch.randn(3, 4))


def test_an_expert_that_is_no_module_is_refused_by_its_index() -> None:
    with pytest.raises(TypeError, match=r"an nn\.Module, got builtin_function_or_method \(expert_index=1\)"):
        MixtureOfExperts(TopKRouter(D_MODEL, 2, 1), [nn.Identity(), torch.relu])  # type: ignore[list-item]  # meant


def test_tokens_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected x of shape \(\.\.\., 12\), got \(5, 13\)"):
        layer_of()(torch.randn(5, 13, dtype=torch.float64))


@pytest.fixture(params=["narrower", "fewer rows", "flat"])
def misshaping(request: pytest.FixtureRequest) -> nn.Module:
    class Misshaping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return {"narrower": x[:, :-1], "fewer rows": x[1:], "flat": x.flatten()}[request.param]

    return Misshaping()


def test_an_expert_that_changes_the_shape_is_named_with_both_shapes(misshaping: nn.Module) -> None:
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 1), [nn.Identity(), nn.Identity(), misshaping])
    favour(layer, 2)
    with pytest.raises(
        ValueError, match=r"keep the shape \(5, 12\) of its tokens, got \(.*\) \(expert_index=2\)"
    ):
        layer(torch.rand(5, D_MODEL))


def test_an_expert_that_returns_no_tensor_is_named() -> None:
    class Tupled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    layer = MixtureOfExperts(TopKRouter(D_MODEL, 2, 1), [nn.Identity(), Tupled()])
    favour(layer, 1)
    with pytest.raises(TypeError, match=r"expected a tensor from an expert, got tuple \(expert_index=1\)"):
        layer(torch.rand(5, D_MODEL))
