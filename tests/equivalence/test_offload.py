"""Offloaded experts give the results, gradients and buffers of the plain modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, assert_same_weights, both, ffn


class Gated(nn.Module):
    """Saves its weights in many ways: as they are, transposed, sliced, cast, broadcast; beside bytes of no float."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))  # first: those after it have gradients all the same
        self.w = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.v = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.mask: Tensor
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.w).chunk(2, dim=-1)
        h = a.sigmoid() * b * self.scale + x * self.v[2] * self.frozen
        return h @ self.v.double().T.float() + (self.v[:, ::2] ** 2).sum()


@pytest.mark.parametrize("num_microbatches", [None, 1, 3, 50])
def test_weights_saved_in_any_form_are_found_again(num_microbatches: int | None, store: str | Path) -> None:
    experts, plain = both(Gated, max_resident_bytes=12_000, num_microbatches=num_microbatches, store=store)
    x = torch.randn(6, 8, requires_grad=True)
    found = []
    with experts:
        for modules in (experts, plain):
            h = x
            for module in modules:
                h = torch.tanh(module(h) * 0.1)
            (grad_x,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
            h.sum().backward()
            found.append((h, grad_x))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        assert_same_gradients(experts, plain)


class ReadsAsOthers(nn.Module):
    """Reads pairs of numbers as complex ones, and bytes as numbers; others of odd lengths come before."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.turns = nn.Parameter(torch.randn(5, 2))
        self.zeros: Tensor
        self.packed: Tensor
        self.register_buffer("zeros", torch.zeros(5, dtype=torch.uint8))
        self.register_buffer("packed", torch.arange(16, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = x * torch.view_as_complex(self.turns).pow(2).abs().sum() + self.bias.sum()
        return turned + self.packed.view(torch.int32).sum() * 1e-9


def test_weights_and_buffers_may_be_read_as_wider_ones() -> None:
    experts, plain = both(ReadsAsOthers)
    with experts:
        for modules in (experts, plain):
            sum(module(torch.ones(2)) for module in modules).sum().backward()  # type: ignore[union-attr]
        assert_same_gradients(experts, plain)
        assert torch.equal(experts[0](torch.ones(2)), plain[0](torch.ones(2)))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7, 100])
def test_micro_batches_change_nothing(num_microbatches: int, store: str | Path) -> None:
    experts, plain = both(ffn, num_microbatches=num_microbatches, max_resident_bytes=15_000, store=store)
    x = torch.randn(7, 8, requires_grad=True)
    with experts:
        got = torch.stack([expert(x) for expert in experts])
        want = torch.stack([module(x) for module in plain])
        torch.testing.assert_close(got, want)
        weight = torch.randn_like(got)
        (grad,) = torch.autograd.grad((got * weight).sum(), x, retain_graph=True)
        (grad_plain,) = torch.autograd.grad((want * weight).sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, grad_plain)
        (got * weight).sum().backward()
        (want * weight).sum().backward()
        assert_same_gradients(experts, plain)


class Structured(nn.Module):
    """Nested inputs, keyword arguments, several results, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: Tensor, name: str) -> dict[str, Any]:
        x, rest = pair
        y = self.linear(x) * scale + rest["bias"]
        return {"y": y, "parts": [y.sin(), y.argmax(-1)], "name": name}


@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("way", ["leading 1", "buffer"])
def test_what_has_as_many_elements_as_there_are_rows_is_not_cut_if_given_as_the_page_says(
    way: str, num_microbatches: int
) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scale", torch.arange(8.0))

        def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x) * mask[:, None] * (self.scale if scale is None else scale)

    experts, plain = both(Scaled, num=1, num_microbatches=num_microbatches, max_resident_bytes=9000)
    x, mask = torch.randn(8, 8), torch.arange(8.0) % 2
    scale = (torch.arange(8.0)[None],) if way == "leading 1" else ()
    results = [modules[0](x, mask, *scale) for modules in (experts, plain)]
    torch.testing.assert_close(*results)
    for result in results:
        result.square().sum().backward()
    assert_same_gradients(experts, plain)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_nested_arguments_and_results(num_microbatches: int | None) -> None:
    experts, plain = both(Structured, num=2, num_microbatches=num_microbatches, max_resident_bytes=5000)
    x, bias, scale = (torch.randn(shape, requires_grad=True) for shape in ((6, 8), (8,), ()))
    found = []
    for modules in (experts, plain):
        result = modules[1]((x, {"bias": bias}), scale=scale, name="ffn.1")
        assert result["name"] == "ffn.1"
        assert not result["parts"][1].requires_grad
        total = result["y"].sum() + result["parts"][0].square().sum()
        total.backward(retain_graph=True)
        found.append([result["y"], *result["parts"], *torch.autograd.grad(total, [x, bias, scale])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert_same_gradients(experts, plain)


def test_batch_norm_statistics_and_modes() -> None:
    experts, plain = both(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), max_resident_bytes=1500)
    for training in (True, True, False):
        for modules in (experts, plain):
            for module in modules:
                module.train(training)
                module(torch.arange(32.0).view(4, 8)).sum().backward()
        assert_same_gradients(experts, plain)
    assert_same_weights(experts, plain)


def test_sparse_gradients() -> None:
    experts, plain = both(lambda: nn.Embedding(10, 8, sparse=True), optimizer=OPTIMIZERS["sgd"])
    for _ in range(2):
        for modules in (experts, plain):
            for i, module in enumerate(modules):
                module(torch.tensor([i, i, 3])).square().sum().backward()
    for i, module in enumerate(plain):
        torch.testing.assert_close(experts.gradients(i)["weight"], module.weight.grad.to_dense())


def test_gradients_add_up_over_calls_and_backwards() -> None:
    experts, plain = both(ffn)
    x = torch.randn(4, 8)
    for modules in (experts, plain):
        (modules[0](x) + modules[0](x * 2)).sum().backward()
        modules[0](x * 3).sum().backward()
    assert_same_gradients(experts, plain)


def test_only_what_a_backward_wants_is_gathered() -> None:
    experts, _ = both(ffn)
    x = torch.randn(4, 8, requires_grad=True)
    y = experts[0](x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    assert set(experts.gradients(0).values()) == {None}
    y.backward()
    assert None not in experts.gradients(0).values()


def test_without_grad_no_graph_is_made() -> None:
    experts, plain = both(ffn)
    x = torch.randn(4, 8, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = experts[2](x)
        assert not y.requires_grad
        torch.testing.assert_close(y, plain[2](x).detach())


def test_inputs_that_need_no_gradient_and_experts_that_are_not_trained() -> None:
    experts, plain = both(ffn)
    for modules in (experts, plain):
        modules[0](torch.ones(4, 8)).sum().backward()
    assert_same_gradients(experts, plain)
    fixed, plain = both(ffn, optimizer=None)
    x = torch.randn(4, 8, requires_grad=True)
    assert not fixed[0](torch.ones(4, 8)).requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(fixed[0](x).sum(), x), torch.autograd.grad(plain[0](x).sum(), x)
    )


def test_an_expert_that_returns_its_weights_returns_a_copy() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.table

    experts, plain = both(Table, num=4, max_resident_bytes=64)
    results = [expert(torch.ones(())) for expert in experts]
    for got, module in zip(results, plain, strict=True):
        torch.testing.assert_close(got, module(torch.ones(())))
    torch.stack(results).sum().backward()
    torch.testing.assert_close(experts.gradients(3)["table"], torch.ones(8))


class Named(Tensor):
    """A class of one's own, of which operators make others."""


def with_named_weight(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Named))
    return module


def test_weights_and_inputs_of_classes_of_ones_own(store: str | Path) -> None:
    """A call raised that its own weight is none of its own; torch finds no gradient edge of such leaves."""
    plain = [with_named_weight(seed) for seed in range(2)]
    same = (with_named_weight(seed) for seed in range(2))  # torch cannot copy them
    experts = OffloadedExperts(same, OPTIMIZERS["sgd"], max_resident_bytes=1000, store=store)
    x = torch.randn(3, 8).as_subclass(Named).requires_grad_()
    with experts:
        outputs = parallel_apply(list(experts), [(x,)] * 2)
        assert [type(y) for y in outputs] == [Named] * 2
        found = []
        for results in (outputs, [module(x) for module in plain]):
            x.grad = None
            torch.stack(results).sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)
        assert_same_gradients(experts, plain)
        experts.step()
        for module in plain:
            OPTIMIZERS["sgd"](module.parameters()).step()
        assert_same_weights(experts, plain)


def test_second_backward_and_second_order_raise_as_in_pytorch() -> None:
    experts, _ = both(ffn)
    x = torch.randn(4, 8, requires_grad=True)
    y = experts[0](x).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    (grad,) = torch.autograd.grad(experts[0](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected a gradient of first order"):
        torch.autograd.grad((grad + x**3).sum(), x)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_update_between_forward_and_backward_raises(recompute: bool) -> None:
    experts, _ = both(ffn)
    x = torch.randn(4, 8, requires_grad=True)
    experts[0](x).sum().backward()
    (y,) = parallel_apply([experts[0]], [(x,)], recompute=recompute)
    experts.step()
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected the weights of the forward .* updated 1 times since"
    ):
        y.sum().backward()


@pytest.mark.parametrize("what", ["input", "result"])
def test_a_change_in_place_between_forward_and_backward_raises(what: str) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).exp()

    experts = OffloadedExperts([Squared()], OPTIMIZERS["sgd"], max_resident_bytes=100)
    x = torch.randn(4) * 1
    y = experts[0](x)
    (x if what == "input" else y.detach()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
