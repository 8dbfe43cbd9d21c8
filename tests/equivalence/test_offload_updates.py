"""Updates of offloaded experts, in `step` or in the backward, are those of the plain modules' optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, assert_same_weights, both, ffn

PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")


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


def test_gradients_are_clipped_as_the_page_says(store: str | Path) -> None:
    make = OPTIMIZERS["momentum"]
    experts, plain = both(ffn, optimizer=make, store=store, max_resident_bytes=5000)
    parameters = list(nn.ModuleList(plain).parameters())
    optimizer = make(parameters)
    _, _, after = PAGE.partition("## Clipping")
    page: dict[str, Any] = {"torch": torch, "experts": experts}
    registering, each_step = after.split("```")[1].removeprefix("python").split("norm = norm_of_all")
    exec(registering, page)
    for _ in range(3):
        x = torch.randn(4, 8)
        for modules in (experts, plain):
            torch.stack([module(x) for module in modules]).square().sum().backward()
        exec(f"norm = norm_of_all{each_step}", page)
        assert nn.utils.clip_grad_norm_(parameters, 1.0) > 1, "there was nothing to clip"
        optimizer.step()
        experts.zero_grad()
        optimizer.zero_grad()
    assert_same_weights(experts, plain)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_each_expert_is_clipped_by_its_own_norm_in_a_hook(update: Any) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1))

    make, norms = OPTIMIZERS["sgd"], list[Tensor]()
    experts, plain = both(ffn, optimizer=make, update=update)
    optimizers = [make(module.parameters()) for module in plain]
    for one in (*experts.optimizers, *optimizers):
        one.register_step_pre_hook(clip)
    for modules in (experts, plain):
        torch.stack([module(torch.ones(4, 8)) for module in modules]).square().sum().backward()
    for update_all in (experts, *optimizers):
        update_all.step()
    assert len(norms) == 10
    assert min(norms) > 0.1
    assert_same_weights(experts, plain)


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


@pytest.mark.parametrize("trained", [0, 1])
def test_a_hook_of_an_update_in_a_backward_that_trains_an_expert_is_told(trained: int) -> None:
    """It waited for itself."""
    experts, _ = both(ffn, 2, update="on_backward", max_resident_bytes=10**6)
    x = torch.randn(4, 8)
    hook = experts.optimizers[0].register_step_post_hook(lambda *_: experts[trained](x).sum().backward())
    told = "expected one update in a backward after the other, got one within another's step"
    with pytest.raises(RuntimeError, match=told):
        experts[0](x).sum().backward()
    hook.remove()
    experts[1](x).sum().backward()


def test_state_that_is_there_before_the_first_step_lies_as_the_weights_do() -> None:
    """Adagrad's does; fused, it takes one element after the other, wherever each lies."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, fused=True)

    def transposed() -> nn.Module:
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(module.weight.detach().t())
        return module

    experts, plain = both(transposed, num=3, optimizer=make)
    optimizers = [make(module.parameters()) for module in plain]
    for _ in range(3):
        x = torch.randn(3, 4)
        for modules in (experts, plain):
            sum(module(x) for module in modules).square().sum().backward()  # type: ignore[union-attr]
        for update in (experts, *optimizers):
            update.step()
            update.zero_grad()
    assert_same_weights(experts, plain)


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


class Extrapolating(torch.optim.Optimizer):
    """Keeps the last gradient as it is, which PyTorch makes anew for each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("before", parameter.grad)
            parameter.sub_(2 * parameter.grad - before, alpha=0.1)
            self.state[parameter]["before"] = parameter.grad


class Swapping(torch.optim.Optimizer):
    """Has two tensors that change places in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["odd"], state["even"] = torch.zeros_like(parameter), torch.ones_like(parameter)
            state["odd"], state["even"] = state["even"].add_(parameter.grad), state["odd"]
            parameter.sub_(state["odd"], alpha=0.1)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("make", [Extrapolating, Swapping])
def test_state_that_lies_in_memory_that_is_used_again(make: Any, update: Any, store: str | Path) -> None:
    """Another expert's gradients had been there, and the one tensor over the other."""
    experts, plain = both(ffn, 6, make, update=update, store=store, max_resident_bytes=6000)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for _ in range(4):
            x = torch.randn(4, 8)
            for modules in (experts, plain):
                sum(module(x) for module in modules).square().mean().backward()  # type: ignore[union-attr]
            for one in [*optimizers, *([experts] if update == "on_step" else [])]:
                one.step()
                one.zero_grad()
        assert_same_weights(experts, plain)


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, adapts: bool) -> Tensor:
        y: Tensor = self.trunk(x)
        return self.adapter(y) if adapts else y


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_an_optimizer_of_some_weights_steps_also_where_the_others_alone_have_gradients(update: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[2:], lr=0.1)

    experts, plain = both(_Adapted, 2, make, update=update, max_resident_bytes=2000)
    optimizers = [make(module.parameters()) for module in plain]
    for adapts in (False, True, False):
        x = torch.randn(4, 4)
        for modules in (experts, plain):
            sum(module(x, adapts) for module in modules).square().mean().backward()  # type: ignore[union-attr]
        for one in [*optimizers, *([experts] if update == "on_step" else [])]:
            one.step()
            one.zero_grad()
    assert_same_weights(experts, plain)


class _SetsData(torch.optim.SGD):
    """Gives the weights other memory, as sharpness-aware ones do that go back to what they had put aside."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_an_optimizer_that_sets_the_data_of_weights(update: Any, store: str | Path) -> None:
    """That leaves their versions as they are, and what it set was lost as soon as the expert left memory."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return _SetsData(parameters, lr=0.1)

    experts, plain = both(ffn, 3, make, update=update, store=store, max_resident_bytes=4000)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for _ in range(3):
            x = torch.randn(4, 8)
            for modules in (experts, plain):
                torch.stack([module(x) for module in modules]).sum(0).square().mean().backward()
            for one in [*optimizers, *([experts] if update == "on_step" else [])]:
                one.step()
                one.zero_grad()
        assert_same_weights(experts, plain)
