"""The layer as a module: its parts, what it refuses, and whom it names."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.moe.routing import Routing
from tests.support.plain_layer import D_MODEL, favour, layer_of


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


@pytest.mark.parametrize("kind", [TopKRouter, FeedForwardExpert, SwiGLUExpert])
def test_all_parameters_are_made_on_the_device_and_of_the_dtype_that_are_asked_for(kind: Any) -> None:
    sizes = (8, 4, 2) if kind is TopKRouter else (8, 4)
    module = kind(*sizes, device="meta", dtype=torch.bfloat16)
    parameters = dict(module.named_parameters())
    assert len(parameters) == {TopKRouter: 1, FeedForwardExpert: 4, SwiGLUExpert: 3}[kind]
    assert {(p.device.type, p.dtype) for p in parameters.values()} == {("meta", torch.bfloat16)}


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


@pytest.mark.parametrize(
    "change", [lambda e: e.append(nn.Identity()), lambda e: e.pop(2)], ids=["more", "fewer"]
)
def test_experts_that_are_no_longer_as_many_as_the_router_chooses_from_are_named(
    change: Callable[[nn.ModuleList], object],
) -> None:
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 2), [nn.Identity() for _ in range(3)])
    change(layer.experts)
    n = len(layer.experts)
    with pytest.raises(
        ValueError, match=rf"\(5, {n}\), got \(5, 3\)\..* as many as the router chooses from, and has {n}\."
    ):
        layer(torch.rand(5, D_MODEL))


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


class OwnRouter(nn.Module):
    """A router of a user's that returns what `change` has made of a routing."""

    num_experts = 3

    def __init__(self, change: dict[str, Callable[[Routing], object]]) -> None:
        super().__init__()
        self.router, self.change = TopKRouter(D_MODEL, 3, 2), change

    def forward(self, x: Tensor) -> Routing:
        routing = self.router(x)
        changes: dict[str, Any] = {name: change(routing) for name, change in self.change.items()}
        return dataclasses.replace(routing, **changes)


MISTAKES: dict[str, tuple[str, Callable[[Routing], object], str]] = {
    "tokens are not flattened": (
        "expert_index",
        lambda routing: routing.expert_index.reshape(2, 5, 2),
        r"expected expert_index of shape \(10, top_k\), got \(2, 5, 2\)\. A router flattens",
    ),
    "one choice without its dimension": (
        "expert_index",
        lambda routing: routing.expert_index[:, 0],
        r"expected expert_index of shape \(10, top_k\), got \(10,\)\. A token's choices are a row",
    ),
    "weights of all experts": (
        "combine_weights",
        lambda routing: routing.probabilities,
        r"expected combine_weights of shape \(10, 2\), got \(10, 3\)\. One for each choice",
    ),
    "probabilities of fewer experts": (
        "probabilities",
        lambda routing: routing.probabilities[:, :2],
        r"expected probabilities of shape \(10, 3\), got \(10, 2\)\. One for each expert: .* and has 3",
    ),
    "weights for choices": (
        "expert_index",
        lambda routing: routing.combine_weights,
        "of int64, got torch.float32",
    ),
    "an expert too many": (
        "expert_index",
        lambda routing: torch.full_like(routing.expert_index, 3),
        r"experts that exist in expert_index, got 3 \(num_experts=3\)",
    ),
    "-1 for no expert": (
        "expert_index",
        lambda routing: routing.expert_index - 3,
        "got a negative one.*is_kept",
    ),
    "weights kept": (
        "is_kept",
        lambda routing: routing.combine_weights,
        "is_kept of bool, got torch.float32",
    ),
    "tokens kept": (
        "is_kept",
        lambda routing: routing.expert_index[:, 0] > 0,
        r"of shape \(10, 2\), got \(10,\)\. One for each choice",
    ),
    "choices in a list": (
        "expert_index",
        lambda routing: routing.expert_index.tolist(),
        "expected expert_index to be a tensor, got list",
    ),
    "weights in an array": (
        "combine_weights",
        lambda routing: routing.combine_weights.detach().numpy(),
        "expected combine_weights to be a tensor, got ndarray",
    ),
    "no probabilities": (
        "probabilities",
        lambda routing: None,
        "expected probabilities to be a tensor, got NoneType",
    ),
    "what is kept in a list": (
        "is_kept",
        lambda routing: (routing.combine_weights > 0).tolist(),
        "expected is_kept to be a tensor, got list",
    ),
    "probabilities of other tokens": (
        "probabilities",
        lambda routing: routing.probabilities[1:],
        r"expected probabilities of shape \(10, 3\), got \(9, 3\)\. A router flattens",
    ),
}


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_router_of_ones_own_is_named(
    mistake: str, on_failure: Literal["raise", "drop"]
) -> None:
    name, change, expected = MISTAKES[mistake]
    experts = [nn.Identity() for _ in range(3)]
    layer = MixtureOfExperts(OwnRouter({name: change}), experts, on_failure=on_failure)
    with pytest.raises((TypeError, ValueError), match=expected):
        layer(torch.rand(2, 5, D_MODEL))
    right = MixtureOfExperts(OwnRouter({"expert_index": lambda routing: routing.expert_index.int()}), experts)
    assert right(torch.rand(2, 5, D_MODEL)).shape == (2, 5, D_MODEL)


def test_tokens_without_numbers_are_refused_as_such() -> None:
    with torch.device("meta"), pytest.raises(NotImplementedError, match=r"bincount.* Meta"):
        MixtureOfExperts(TopKRouter(4, 2, 1), [nn.Identity(), nn.Identity()])(torch.rand(5, 4))


def test_an_expert_that_is_no_module_is_refused_by_its_index() -> None:
    with pytest.raises(TypeError, match=r"an nn\.Module, got builtin_function_or_method \(expert_index=1\)"):
        MixtureOfExperts(TopKRouter(D_MODEL, 2, 1), [nn.Identity(), torch.relu])  # type: ignore[list-item]  # meant


@pytest.mark.parametrize("tokens", [[[1.0] * D_MODEL], None, 3])
def test_tokens_that_are_no_tensor_are_refused(tokens: Any) -> None:
    layer = layer_of()
    for module, name in ((layer, "MixtureOfExperts"), (layer.router, "TopKRouter")):
        with pytest.raises(
            TypeError, match=rf"{name}: expected a tensor .* got {type(tokens).__name__}.*as_tensor"
        ):
            module(tokens)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.int64, r"Pass x\.float\(\)"),
        (torch.bool, r"Pass x\.float\(\)"),
        (torch.complex64, r"x\.abs\(\)"),
    ],
    ids=str,
)
def test_tokens_that_are_not_floating_are_refused(dtype: torch.dtype, advice: str, autocast: bool) -> None:
    layer = layer_of()
    x = torch.ones(3, D_MODEL, dtype=dtype)
    for module in (layer, layer.router):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            pytest.raises(
                TypeError, match=rf"TopKRouter: expected floating numbers, got .* of {dtype}\. .*{advice}"
            ),
        ):
            module(x)


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize(
    ("tokens", "factor", "got"),
    [
        (torch.ones(3, D_MODEL), 1j, "torch.float32, got torch.complex64"),
        (torch.ones(3, D_MODEL, dtype=torch.int64), 0.5, "torch.int64, got torch.float32"),
    ],
    ids=["complex outputs", "whole tokens"],
)
def test_outputs_that_would_lose_a_part_are_refused(
    tokens: Tensor, factor: complex, got: str, on_failure: Literal["raise", "drop"]
) -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * factor

    class AnyTokens(TopKRouter):
        def forward(self, x: Tensor) -> Routing:
            return super().forward(x.float())

    layer = MixtureOfExperts(AnyTokens(D_MODEL, 3, 2), [Scale() for _ in range(3)], on_failure=on_failure)
    with pytest.raises(TypeError, match=rf"to fit the dtype of x, {got}\. Let experts and router"):
        layer(tokens)


def test_sizes_may_be_whole_numbers_of_other_types() -> None:
    class Own(nn.Module):
        num_experts = torch.tensor([3]).numpy()[0]

    assert len(MixtureOfExperts(Own(), [nn.Identity() for _ in range(3)]).experts) == 3


def test_a_class_of_activations_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"a function of a tensor, got <class .*ReLU'>\..* or torch\.nn\.ReLU\(\)"
    ):
        FeedForwardExpert(D_MODEL, activation=nn.ReLU)


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
