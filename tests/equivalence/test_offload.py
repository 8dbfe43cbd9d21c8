"""Offloaded experts give the results, gradients, buffers, hooks and updates of the plain modules."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


def ffn() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))


class Gated(nn.Module):
    """Saves its weights in many ways: as they are, transposed, sliced, cast, broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.v = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.w).chunk(2, dim=-1)
        h = a.sigmoid() * b * self.scale + x * self.v[2] * self.frozen
        return h @ self.v.double().T.float() + (self.v[:, ::2] ** 2).sum()


def weights_of(modules: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]


def assert_same_weights(experts: OffloadedExperts, plain: list[nn.Module]) -> None:
    for i, module in enumerate(plain):
        got, want = experts.state_dict(i), module.state_dict()
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda text, n=name: f"{n}: {text}")


def assert_same_gradients(experts: OffloadedExperts, plain: list[nn.Module]) -> None:
    for i, module in enumerate(plain):
        got, want = experts.gradients(i), {n: p.grad for n, p in module.named_parameters()}
        assert {n for n, g in got.items() if g is not None} == {n for n, g in want.items() if g is not None}
        for name, grad in want.items():
            if grad is not None:
                torch.testing.assert_close(got[name], grad, msg=lambda text, n=name: f"{n}: {text}")


def both(
    make: Callable[[], nn.Module], num: int = 5, optimizer: Make | None = OPTIMIZERS["adam"], **options: Any
) -> tuple[OffloadedExperts, list[nn.Module]]:
    torch.manual_seed(0)
    plain = [make() for _ in range(num)]
    size = sum(t.nbytes for t in (*plain[0].parameters(), *plain[0].buffers()))
    options = {"max_resident_bytes": 5 * size + 64, **options}
    return OffloadedExperts(copy.deepcopy(plain), optimizer, **options), plain


@pytest.fixture(params=["ram", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    return "ram" if request.param == "ram" else tmp_path / "experts"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_same_losses_and_weights(optimizer: str, store: str | Path) -> None:
    experts, plain = both(ffn, optimizer=OPTIMIZERS[optimizer], store=store, max_resident_bytes=9000)
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module in plain]
    with experts:
        for step in range(6):
            x = torch.randn(4, 8)
            losses = []
            for modules in (experts, plain):
                h = x
                for module in modules:
                    h = h + module(h)
                loss = h.square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[0], losses[1])
            assert_same_gradients(experts, plain)
            experts.step()
            for one in optimizers:
                one.step()
            if step % 2:
                experts.zero_grad()
                for one in optimizers:
                    one.zero_grad()
        assert_same_weights(experts, plain)
        assert experts.residency.peak_bytes <= 9000 < experts.residency.known_bytes


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


class Counting(nn.Module):
    """Puts a new tensor in the place of a buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count


def test_buffers_that_are_replaced() -> None:
    experts, plain = both(Counting, num=20, optimizer=None, max_resident_bytes=8)
    for _ in range(3):
        for modules in (experts, plain):
            for module in modules:
                result = module(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3.0))
    assert_same_weights(experts, plain)


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


def test_tensor_hooks_inside_fire() -> None:
    fired = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.linear.weight.register_hook(lambda grad: (fired.append("weight"), grad * 2)[1])

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda grad: (fired.append("result"), grad * 3)[1])
            return y

    torch.manual_seed(0)
    plain = Hooked()
    experts = OffloadedExperts([Hooked()], OPTIMIZERS["sgd"], max_resident_bytes=5000)
    for module in (plain, experts[0]):
        fired.clear()
        module(torch.ones(4, 8)).sum().backward()
        assert fired == ["result", "weight"]
    torch.testing.assert_close(experts.gradients(0)["linear.weight"], plain.linear.weight.grad)


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


def test_an_update_between_forward_and_backward_raises() -> None:
    experts, _ = both(ffn)
    x = torch.randn(4, 8, requires_grad=True)
    experts[0](x).sum().backward()
    y = experts[0](x)
    experts.step()
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected the weights of the forward .* updated 1 times since"
    ):
        y.sum().backward()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("beside", [0, 2])
def test_random_numbers_are_those_of_a_map_whose_experts_are_all_in_memory(
    beside: int, options: dict[str, Any]
) -> None:
    """Also where some are not offloaded."""
    experts, plain = both(lambda: nn.Sequential(ffn(), nn.Dropout(0.5)))
    mixed = [*plain[:beside], *list(experts)[beside:]]
    said = []
    for modules, own in ((plain, {}), (mixed, options)):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(4)
        outputs = parallel_apply(modules, [(x,)] * 5, **own)
        torch.stack(outputs).square().sum().backward()
        said.append([*outputs, x.grad, torch.rand(3)])
    torch.testing.assert_close(said[1], said[0])
    assert not torch.equal(said[0][0], said[0][1])


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_by_the_caller_with_dropout(use_reentrant: bool) -> None:
    experts, plain = both(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for modules in (experts, plain):
        torch.manual_seed(3)
        h = x
        for module in modules:
            h = checkpoint(module, h, use_reentrant=use_reentrant)
        found.append((h.detach(), *torch.autograd.grad(h.sum(), x)) if not use_reentrant else (h.detach(),))
        torch.manual_seed(3)
        h = x
        for module in modules:
            h = checkpoint(module, h, use_reentrant=use_reentrant)
        h.sum().backward()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert_same_gradients(experts, plain)


def test_the_callers_saved_tensor_hooks_see_all_but_the_weights() -> None:
    experts, plain = both(ffn)
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = experts[0](x)
    assert torch.Size([4, 16]) in seen
    assert torch.Size([8, 16]) not in seen
    assert torch.Size([16, 8]) not in seen
    y.sum().backward()
    plain[0](x).sum().backward()
    assert_same_gradients(experts, plain)


def test_many_threads_call_experts_at_once() -> None:
    experts, plain = both(ffn, max_resident_bytes=9000)
    xs = [torch.randn(4, 8) for _ in range(16)]
    barrier = threading.Barrier(8)

    def work(k: int) -> None:
        barrier.wait()
        for i in range(k, 16, 8):
            sum(experts[(i + j) % 5](xs[i]) for j in range(3)).sum().backward()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(xs):
        sum(plain[(i + j) % 5](x) for j in range(3)).sum().backward()
    assert_same_gradients(experts, plain)
    assert experts.residency.peak_bytes <= 9000


def test_autocast_and_half_precision_experts() -> None:
    experts, plain = both(lambda: ffn().to(torch.bfloat16), optimizer=OPTIMIZERS["sgd"])
    for modules in (experts, plain):
        modules[0](torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
    assert_same_gradients(experts, plain)
    experts, plain = both(ffn)
    for modules in (experts, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = modules[0](torch.ones(4, 8))
        y.float().sum().backward()
    assert_same_gradients(experts, plain)


def test_a_mixture_of_offloaded_experts_trains_as_one_of_plain_experts(store: str | Path) -> None:
    experts, plain = both(ffn, store=store, max_resident_bytes=9000)
    torch.manual_seed(1)
    layers = [MixtureOfExperts(TopKRouter(8, 5, top_k=2), list(modules)) for modules in (experts, plain)]
    layers[0].router.load_state_dict(layers[1].router.state_dict())
    optimizers = [
        [torch.optim.Adam(layers[0].parameters(), lr=0.01)],
        [torch.optim.Adam(layers[1].parameters(), lr=0.01)],
    ]
    for _ in range(5):
        x = torch.randn(16, 8)
        losses = []
        for layer, (optimizer,) in zip(layers, optimizers, strict=True):
            loss = layer(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        experts.step()
        experts.zero_grad()
        torch.testing.assert_close(*losses)
    assert_same_weights(experts, plain)
    experts.close()


# updates in the backward


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_updates_in_the_backward_are_those_of_a_step_after_it(
    optimizer: str, num_microbatches: int | None, store: str | Path
) -> None:
    """Also of an expert that is called twice, whose update waits for both."""
    make = OPTIMIZERS[optimizer]
    options = {"store": store, "max_resident_bytes": 9000, "num_microbatches": num_microbatches}
    experts, plain = both(ffn, optimizer=make, update="on_backward", **options)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for _ in range(2):  # rounding of micro-batches grows with every step
            x, losses = torch.randn(4, 8), []
            for modules in (experts, plain):
                h = x
                for module in (*modules, modules[1]):
                    h = h + module(h)
                loss = h.square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[0], losses[1])
            experts.step()  # has nothing left to do
            for one in optimizers:
                one.step()
                one.zero_grad()
        assert_same_weights(experts, plain)
        assert set(experts.gradients(1).values()) == {None}
        assert experts.residency.peak_bytes <= 9000 < experts.residency.known_bytes


@pytest.mark.parametrize("way", ["recompute", "checkpoint"])
def test_updates_in_the_backward_of_experts_that_are_recomputed(way: str) -> None:
    make = OPTIMIZERS["adam"]
    experts, plain = both(
        lambda: nn.Sequential(ffn(), nn.Dropout(0.5)), update="on_backward", max_resident_bytes=9000
    )
    optimizers = [make(module.parameters()) for module in plain]
    for _ in range(3):
        for modules in (experts, plain):
            torch.manual_seed(4)
            x = torch.ones(4, 8)
            if way == "checkpoint":
                results = [checkpoint(module, x, use_reentrant=False) for module in modules]
            else:
                results = parallel_apply(list(modules), [(x,)] * 5, recompute=True)
            torch.stack(results).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert_same_weights(experts, plain)


def test_what_an_update_in_the_backward_cannot_do_is_told() -> None:
    experts, plain = both(ffn, update="on_backward", max_resident_bytes=9000)
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected a forward outside of any backward .*use_reen"
    ):
        checkpoint(experts[0], x, use_reentrant=True).sum().backward()
    torch.autograd.grad(experts[0](x).sum(), x)
    experts[0](x)  # its graph goes without a backward
    assert_same_weights(experts, plain)
    y = experts[1](x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="got weights that were updated 1 times since"):
        y.backward()


def test_an_optimizer_that_runs_in_a_backward_sees_none_of_the_callers_modes() -> None:
    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
            return super().step(closure)

    seen: list[tuple[bool, bool]] = []
    experts, _ = both(ffn, optimizer=lambda p: Watched(p, lr=0.1), update="on_backward")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        experts[0](torch.ones(4, 8)).sum().backward()
    assert seen == [(False, False)]


class Replacing(torch.optim.Optimizer):
    """Puts a new tensor into its state in each step, and from the third on keeps a second one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["num_steps"] = state.get("num_steps", 0) + 1
            state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
            if state["num_steps"] > 2:
                state["peak"] = torch.maximum(state.get("peak", parameter.grad), parameter.grad.abs())
            parameter -= 0.1 * state["mean"] / (1 + state.get("peak", 0.0))


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_an_optimizer_that_replaces_its_state(update: Any) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4) for _ in range(3)]
    twins = copy.deepcopy(modules)
    optimizers = [Replacing(twin.parameters()) for twin in twins]
    experts = OffloadedExperts(modules, Replacing, max_resident_bytes=500, update=update)
    for _ in range(5):
        x = torch.randn(3, 4)
        sum(expert(x) for expert in experts).square().sum().backward()  # type: ignore[union-attr]
        sum(twin(x) for twin in twins).square().sum().backward()  # type: ignore[union-attr]
        if update == "on_step":
            experts.step()
            experts.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for i, twin in enumerate(twins):
        torch.testing.assert_close(experts.state_dict(i)["weight"], twin.weight.detach())
