"""What is done to offloaded experts between their calls counts as with plain modules: freezing them, for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.flat import Layout
from tests.support.offloading import OPTIMIZERS, Make, assert_same_gradients, assert_same_weights, both, ffn
from tests.support.stores import WatchedStore

sgd = OPTIMIZERS["sgd"]
X = torch.linspace(-1, 1, 32).view(4, 8)


def loss_of(modules: OffloadedExperts | list[nn.Module], x: Tensor = X) -> Tensor:
    return sum(module(x).square().mean() for module in modules)


def step(experts: OffloadedExperts, optimizers: list[torch.optim.Optimizer]) -> None:
    experts.step()
    experts.zero_grad()
    for one in optimizers:
        one.step()
        one.zero_grad()


# ---- freezing


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_frozen_expert_stays_as_it_is_until_it_thaws(
    optimizer: str, update: str, store: str | Path
) -> None:
    make = OPTIMIZERS[optimizer]
    experts, plain = both(ffn, optimizer=make, update=update, store=store)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for is_frozen in (False, True, True, False):
            for modules in (experts, plain):
                assert modules[1].requires_grad_(not is_frozen) is modules[1]  # it may be absent
                leaf = X.clone().requires_grad_()
                loss_of(modules, leaf).backward()
                assert leaf.grad is not None
            if update == "on_step":
                assert_same_gradients(experts, plain)
            step(experts, optimizers)
            assert_same_weights(experts, plain)


def test_when_all_are_frozen_nothing_requires_a_gradient_and_no_step_updates() -> None:
    experts, plain = both(ffn, optimizer=sgd)
    for expert in experts:
        expert.requires_grad_(False)
    assert not experts[0](X).requires_grad
    loss_of(experts, X.clone().requires_grad_()).backward()
    experts.step()
    assert_same_weights(experts, plain)


class Gradual(nn.Linear):
    num_calls = 0  # its first two are with frozen weights

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.requires_grad_(self.num_calls > 2)
        return super().forward(x)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("wants_input_grad", [False, True])
def test_an_expert_may_freeze_and_thaw_in_its_forward(wants_input_grad: bool, update: str) -> None:
    experts, plain = both(lambda: Gradual(8, 8), num=2, optimizer=sgd, update=update)
    optimizers = [sgd(module.parameters()) for module in plain]
    for _ in range(4):
        leaves = [X.clone().requires_grad_(wants_input_grad) for _ in range(2)]
        losses = [loss_of(*each) for each in zip((experts, plain), leaves, strict=True)]
        assert losses[0].requires_grad == losses[1].requires_grad
        if losses[0].requires_grad:
            sum(losses).backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        step(experts, optimizers)
        assert_same_weights(experts, plain)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_a_backward_asks_as_well_whether_an_expert_is_frozen(num_microbatches: int | None) -> None:
    experts, plain = both(ffn, optimizer=sgd, num_microbatches=num_microbatches)
    for modules in (experts, plain):
        loss = loss_of(modules)
        modules[2].requires_grad_(False)
        loss.backward()
    assert_same_gradients(experts, plain)


def test_gradients_of_before_it_froze_update_an_expert() -> None:
    experts, plain = both(ffn, optimizer=sgd)
    optimizers = [sgd(module.parameters()) for module in plain]
    for modules in (experts, plain):
        loss_of(modules).backward()
        modules[0].requires_grad_(False)
    step(experts, optimizers)
    assert_same_weights(experts, plain)


def test_what_was_frozen_when_it_was_taken_over_does_not_thaw() -> None:
    module = ffn()
    module[0].weight.requires_grad_(False)
    experts = OffloadedExperts([module], sgd, max_resident_bytes=10_000)
    experts[0].requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected 0\.weight to stay frozen, as it was when it"
    ):
        experts[0].requires_grad_()
    assert not any(parameter.requires_grad for parameter in module.parameters())


# ---- changes of weights in place


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_a_weight_that_is_changed_in_place_between_calls_stays_so(
    optimizer: Make | None, store: str | Path
) -> None:
    plain = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(5)]
    modules = copy.deepcopy(plain)
    with OffloadedExperts(modules, optimizer, max_resident_bytes=1500, store=store) as experts:
        for round_ in range(2):
            for i, expert in enumerate(experts):
                for called in (expert, plain[i]):
                    called(X)  # it is in memory
                for module in (modules[i], plain[i]):
                    with torch.no_grad():
                        module[0].weight.mul_(0.5 + round_)
                        torch._foreach_add_([module[0].bias, module[1].running_mean], 1.0)
            loss_of(experts), loss_of(plain)  # all have left memory since
            assert_same_weights(experts, plain)
        assert experts.residency.peak_bytes <= 1500 < experts.residency.known_bytes


def test_what_was_changed_in_place_is_in_a_checkpoint_and_goes_when_one_is_restored(tmp_path: Path) -> None:
    module = nn.Linear(8, 8)
    with OffloadedExperts([module], sgd, max_resident_bytes=10_000, store=tmp_path) as experts:
        experts.checkpoint("before")
        before = experts.state_dict(0)
        for value in (0.0, 1.0):
            with torch.no_grad():
                module.weight.fill_(value)
            experts.checkpoint(value)
            with torch.no_grad():
                module.weight.fill_(7)
            assert experts.restore() == value
            assert torch.equal(experts.state_dict(0)["weight"], torch.full((8, 8), value))
        assert torch.equal(experts.state_dict(0)["bias"], before["bias"])


class _ChangedMeanwhile(WatchedStore):
    """What it has just written is changed, once."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weights = [weight]

    def write(self, name: str, layout: Layout, flat: Tensor) -> None:
        super().write(name, layout, flat)
        while name == "expert-00000.weights" and self._weights:
            with torch.no_grad():
                self._weights.pop().fill_(1)


def test_a_weight_that_is_changed_while_it_is_written_is_written_again() -> None:
    modules = [nn.Linear(8, 8) for _ in range(3)]
    store = _ChangedMeanwhile(modules[0].weight)
    with OffloadedExperts(modules, max_resident_bytes=600, store=store) as experts:
        loss_of(experts)
        assert torch.equal(experts.state_dict(0)["weight"], torch.ones(8, 8))


def test_what_nobody_has_changed_is_not_written() -> None:
    store = WatchedStore()
    modules = [nn.Linear(8, 8) for _ in range(3)]
    with OffloadedExperts(modules, max_resident_bytes=600, store=store) as experts:
        loss_of(experts)
        store.events.clear()
        loss_of(experts)
        assert {event.split()[0] for event in store.events} == {"read"}


# ---- settings of a whole model


@torch.no_grad()
def in_place(weight: nn.Parameter) -> None:
    weight.fill_(0.1)


def by_data(weight: nn.Parameter) -> None:
    weight.data.fill_(0.1)


def by_other_memory(weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 0.1)


@pytest.mark.parametrize("change", [in_place, by_data, by_other_memory])
def test_what_is_applied_to_a_model_reaches_weights_of_experts_wherever_they_are(
    change: Callable[[nn.Parameter], None], store: str | Path
) -> None:
    """It had passed them by."""
    experts, plain = both(ffn, optimizer=sgd, store=store)
    optimizers = [sgd(module.parameters()) for module in plain]
    visited: list[list[type[nn.Module]]] = []

    def apply(part: nn.Module) -> None:
        visited[-1].append(type(part))
        if isinstance(part, nn.Linear):
            change(part.weight)

    with experts:
        for modules in (experts, plain):
            visited.append([])
            model = nn.ModuleList(modules)
            assert model.apply(apply) is model
            loss_of(modules).backward()
        assert visited[0] == visited[1]
        step(experts, optimizers)
        assert_same_weights(experts, plain)


def turn(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        part.weight.data = part.weight.data.t()


def exchange(part: nn.Module) -> None:
    if isinstance(part, nn.Sequential):
        first, last = part[0].weight, part[2].weight
        first.data, last.data = last.data, first.data


@pytest.mark.parametrize("change", [turn, exchange])
def test_weights_that_change_places_are_kept(change: Callable[[nn.Module], None]) -> None:
    """They had stayed as they were once the expert had left memory, or one became the other."""
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    expected = copy.deepcopy(modules[0]).apply(change).state_dict()
    with OffloadedExperts(modules, max_resident_bytes=1200) as experts:
        experts[0].apply(change)
        loss_of(experts)
        torch.testing.assert_close(experts.state_dict(0), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda weight: weight[:4], r"shape \(8, 8\) and torch.float32, got \(4, 8\) and torch.float32"),
        (lambda weight: torch.ones(2), r"shape \(8, 8\) and torch.float32, got \(2,\) and torch.float32"),
        (lambda weight: weight.double(), r"shape \(8, 8\) and torch.float32, got \(8, 8\) and torch.float64"),
    ],
)
def test_weights_keep_their_shapes_and_dtypes(change: Callable[[Tensor], Tensor], text: str) -> None:
    def apply(part: nn.Module) -> None:
        part.weight.data = change(part.weight.data)
        part.bias.data.zero_()

    modules = [nn.Linear(8, 8) for _ in range(3)]
    before = modules[0].weight.detach().clone()
    with OffloadedExperts(modules, max_resident_bytes=600) as experts:
        with pytest.raises(RuntimeError, match=f"expert-00000: expected weight to stay of {text}"):
            experts[0].apply(apply)
        loss_of(experts)
        assert torch.equal(experts.state_dict(0)["weight"], before)
        assert not experts.state_dict(0)["bias"].any()


def test_what_is_applied_and_raises_stays_as_far_as_it_came() -> None:
    def zero_and_fail(part: nn.Module) -> None:
        part.weight.data.zero_()
        raise KeyError(part)

    modules = [nn.Linear(8, 8) for _ in range(3)]
    with OffloadedExperts(modules, max_resident_bytes=600) as experts:
        with pytest.raises(KeyError):
            experts[0].apply(zero_and_fail)
        loss_of(experts)  # it has left memory since
        assert not experts.state_dict(0)["weight"].any()


@pytest.mark.parametrize(
    ("convert", "got"),
    [
        (lambda model: model.half(), r"torch\.float16 on cpu"),
        (lambda model: model.to("cpu", torch.float64), r"torch\.float64 on cpu"),
        (lambda model: model.to("meta"), r"torch\.float32 on meta"),
        (lambda model: model.to_empty(device="meta"), r"torch\.float32 on meta"),
    ],
)
def test_a_model_that_gets_another_dtype_or_device_is_told_that_its_experts_do_not(
    convert: Callable[[nn.Module], nn.Module], got: str
) -> None:
    experts, _ = both(ffn)
    model = nn.ModuleList(experts)
    with pytest.raises(
        TypeError, match=rf"'expert-00000': expected to stay torch\.float32 on cpu, got {got}\. Build"
    ):
        convert(model)
    assert model.float().cpu().to("cpu", torch.float32).share_memory() is model, "all of that changes nothing"


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize(("name", "value"), [("scale", 2.0), ("weight", nn.Parameter(torch.ones(8, 8)))])
def test_an_attribute_is_set_where_it_counts(name: str, value: object) -> None:
    """It had been taken, and the expert went on without it."""
    with OffloadedExperts([Scaled(8, 8)], sgd, max_resident_bytes=1000) as experts:
        (expert,) = experts
        with pytest.raises(
            AttributeError, match=rf"'expert-00000': expected {name} to be set on .* got it set"
        ):
            setattr(expert, name, value)
        assert not list(expert.parameters())
        want = 2 * expert(X)
        expert.stands_for.scale = 2.0
        assert torch.equal(expert(X), want)


def test_attributes_that_every_module_has_and_those_of_others_are_set_as_ever() -> None:
    with OffloadedExperts([nn.Linear(8, 8)], sgd, max_resident_bytes=1000) as experts:
        (expert,) = experts
        expert.stands_for._of_a_framework = 1
        expert.note, expert.training, expert._of_a_framework = "mine", False, 2
        assert (expert.note, expert.training, expert._of_a_framework) == ("mine", False, 2)


# ---- state that is cleared


def cleared(optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "all of it":
        optimizer.state.clear()
    else:
        for state in [*optimizer.state.values()][::2]:
            state.clear()


@pytest.mark.parametrize("how", ["all of it", "that of some weights"])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw fused"])
def test_state_that_is_cleared_stays_so_where_it_was_absent(
    optimizer: str, update: str, how: str, store: str | Path
) -> None:
    make = OPTIMIZERS[optimizer]
    experts, plain = both(ffn, optimizer=make, update=update, store=store, max_resident_bytes=9000)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for round_ in range(4):
            for modules in (experts, plain):
                loss_of(modules).backward()
            step(experts, optimizers)
            assert_same_weights(experts, plain)
            if round_ != 1:
                for one in (*experts.optimizers, *optimizers):
                    cleared(one, how)
        assert experts.residency.peak_bytes <= 9000 < experts.residency.known_bytes


@pytest.mark.parametrize("limit", [9000, 1_000_000])
@pytest.mark.parametrize("how", ["all of it", "that of some weights"])
def test_state_that_is_cleared_is_not_in_a_checkpoint(how: str, limit: int, tmp_path: Path) -> None:
    make = OPTIMIZERS["adam"]
    experts, plain = both(ffn, optimizer=make, store=tmp_path, max_resident_bytes=limit)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for is_restored in (False, True):
            for modules in (experts, plain):
                loss_of(modules).backward()
            step(experts, optimizers)
            if not is_restored:
                for one in (*experts.optimizers, *optimizers):
                    cleared(one, how)
                known = experts.residency.known_bytes
                experts.checkpoint()
                assert experts.residency.known_bytes < known
                experts.restore()
                experts.checkpoint()  # of what was not read since
                experts.restore()
            assert_same_weights(experts, plain)
