"""Who else has a tensor that a call of an offloaded expert makes a buffer: results, inputs, graphs, the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_weights, both

SIZE = 224  # bytes of one module, with the gradients
ROOMS = [SIZE, 8 * SIZE]
Call = Callable[["Renewing", Tensor], Any]


class Renewing(nn.Module):
    """Puts others in the place of its buffers, and keeps what it likes of them."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("last", torch.ones(2, 4))
        self.register_buffer("scale", torch.ones(4))
        self.kept: list[Tensor] = []
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def inputs(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(num)]


def return_what_it_keeps(module: Renewing, x: Tensor) -> Any:
    module.mean = 0.5 * module.mean + x.mean(0)
    module.last = 0.5 * module.last + module.linear(x).detach()
    module.kept = [*module.kept[-2:], module.mean, module.last[-1:]]
    return module.mean, module.last, module.mean[None], torch.cat([one.flatten() for one in module.kept])


def keep_the_input(module: Renewing, x: Tensor) -> Any:
    module.kept = [x]
    module.last = x
    return module.linear(x) + module.last


def give_and_take(module: Renewing, x: Tensor) -> Any:
    module.kept = [module.last]
    module.last = x.detach()
    return module.linear(x) * module.kept[0] * module.last


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", [return_what_it_keeps, keep_the_input, give_and_take])
def test_results_and_inputs_that_become_buffers_keep_their_values(
    call: Call, mode: Callable[[], Any], room: int
) -> None:
    """They had come to lie in the part, with what the module kept of them, and read as NaN, or another's numbers."""
    experts, plain = both(lambda: Renewing(call), num=3, optimizer=None, max_resident_bytes=room)
    given, seen = inputs(6), []
    wanted = [x.clone() for x in given]
    for modules in (experts, plain):
        seen.append([])
        with mode():
            for x in given:
                seen[-1] += [module(x) for module in modules]
                seen[-1] += parallel_apply(list(modules), [(x,)] * 3)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)
    assert_same_weights(experts, plain)


def save_it(module: Renewing, x: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + x.detach().mean(0)
    module.kept = [module.mean]
    return module.linear(x) * module.mean


def save_the_input(module: Renewing, x: Tensor) -> Tensor:
    y = module.linear(x) + module.last
    module.kept, module.last = [x], x.detach()
    return y


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("call", [save_it, save_the_input])
def test_what_a_graph_has_of_a_buffer_made_anew_keeps_its_values(call: Call, room: int) -> None:
    """Gradients were those of the buffer of the last call."""
    experts, plain = both(lambda: Renewing(call), num=3, optimizer=OPTIMIZERS["sgd"], max_resident_bytes=room)
    for modules in (experts, plain):
        losses = [module(x).square().sum() for x in inputs(2) for module in modules]
        torch.stack(losses).sum().backward()
    for i, module in enumerate(plain):
        wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
        torch.testing.assert_close(experts.gradients(i), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("room", ROOMS)
def test_a_program_keeps_what_it_has_of_buffers(room: int) -> None:
    """A start that experts share, and what a hook records, also once no module leads to the record."""

    def start_anew(module: Renewing, x: Tensor) -> Tensor:
        module.mean = module.kept[0]
        return module.linear(x) + module.mean

    def count(module: Renewing, x: Tensor) -> Tensor:
        module.mean = module.mean + 1
        return module.linear(x) + module.mean

    experts, plain = both(lambda: Renewing(count), num=3, optimizer=None, max_resident_bytes=room)
    seen = []
    for called, modules in ((experts, [expert.stands_for for expert in experts]), (plain, plain)):
        start, record, results = torch.arange(4.0), list[Tensor](), list[Tensor]()
        handles = [m.register_forward_hook(lambda m, *_, to=record: to.append(m.mean)) for m in modules]
        for number, x in enumerate(inputs(6)):
            for module in modules:
                module.kept, module.call = [start], start_anew if number in (1, 4) else count
            for handle in handles if number == 3 else ():
                handle.remove()
            results += [module(x) for module in called]
        seen.append([start, *record, *results])
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@pytest.mark.parametrize("same", [Tensor.detach, lambda t: t.view(2, 4), lambda t: t[:], lambda t: t.data])
def test_a_buffer_that_only_becomes_another_object_keeps_its_views(same: Callable[[Tensor], Tensor]) -> None:
    """They had gone to a copy of it."""

    def call(module: Renewing, x: Tensor) -> Tensor:
        module.kept = module.kept or [module.last[0], module.last[1]]
        module.last = same(module.last)
        module.last.add_(x.detach())
        return module.linear(x) + module.kept[0] * module.kept[1]

    experts, plain = both(lambda: Renewing(call), num=3, optimizer=None, max_resident_bytes=SIZE)
    for x in inputs(4):
        for expert, module in zip(experts, plain, strict=True):
            assert torch.equal(expert(x), module(x))


def test_a_buffer_whose_history_is_cut_off_has_none() -> None:
    """It was another object, and the own one, with the history, was put back."""

    def call(module: Renewing, x: Tensor) -> Tensor:
        y = module.linear(x) + module.last
        module.last[0] = y[0]
        module.last = module.last.detach()
        return y

    experts, plain = both(lambda: Renewing(call), num=2, optimizer=OPTIMIZERS["sgd"])
    for modules in (experts, plain):
        for x in inputs(3):
            results = [module(x) for module in modules]
        torch.stack(results).sum().backward()
    for i, module in enumerate(plain):
        wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
        torch.testing.assert_close(experts.gradients(i), wanted, rtol=0, atol=0)


class Sharing(nn.Module):
    """Its parts have one buffer, which becomes another object for both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        self.parts[1].running_mean = self.parts[0].running_mean

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            part.running_mean = self.parts[0].running_mean
        mean = self.parts[0].running_mean.detach() if self.training else self.parts[0].running_mean + 1
        for part in self.parts:
            part.running_mean = mean
        return x * self.parts[0].running_mean + self.parts[1].running_mean


def test_parts_that_share_a_buffer_share_the_one_that_it_becomes() -> None:
    experts, plain = both(Sharing, num=2, optimizer=None, max_resident_bytes=2 * SIZE)
    for number, x in enumerate(inputs(4)):
        for expert, module in zip(experts, plain, strict=True):
            for one in (expert.stands_for, module):
                one.train(number % 2 == 0)
            assert torch.equal(expert(x), module(x))


def differentiate(module: Renewing, x: Tensor, other: Tensor) -> Tensor:
    """Return forces, by a gradient of its own."""
    x.requires_grad_()
    with torch.enable_grad():
        energy = (module.linear(x) * other.square()).sum()
        return torch.autograd.grad(energy, x)[0].detach() * module.linear(other)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_input_that_is_given_twice_is_one_tensor_there(optimizer: str | None, is_recorded: bool) -> None:
    class Forces(Renewing):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            assert x is other
            return differentiate(self, x, other)

    make = optimizer and OPTIMIZERS[optimizer]
    experts, plain = both(lambda: Forces(return_what_it_keeps), num=2, optimizer=make)
    seen = []
    for modules in (experts, plain):
        (x,) = inputs(1)
        x = x.requires_grad_(is_recorded) * 2
        with torch.set_grad_enabled(is_recorded):
            seen.append([module(x, x) for module in modules])
    torch.testing.assert_close(seen[0], seen[1])


def test_gradients_of_an_input_that_is_given_twice_are_added_up() -> None:
    class Multiplies(Renewing):
        def forward(self, x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
            return self.linear(x) * other.square() * factor

    experts, plain = both(
        lambda: Multiplies(return_what_it_keeps), num=2, optimizer=OPTIMIZERS["sgd"], num_microbatches=2
    )
    seen = []
    for modules in (experts, plain):
        x, factor = (one.requires_grad_() for one in inputs(2))
        torch.stack([module(x, x, factor) for module in modules]).sum().backward()
        seen.append([x.grad, factor.grad])
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_with_a_history_may_become_a_buffer_where_no_gradients_are_recorded(
    mode: Callable[[], Any],
) -> None:
    experts, plain = both(lambda: Renewing(keep_the_input), num=2, optimizer=OPTIMIZERS["sgd"])
    for x in inputs(2):
        x = x.requires_grad_() * 2
        with mode():
            for expert, module in zip(experts, plain, strict=True):
                assert torch.equal(expert(x), module(x))
    assert_same_weights(experts, plain)


def test_notes_on_a_buffer_made_anew_stay() -> None:
    def call(module: Renewing, x: Tensor) -> Tensor:
        if not hasattr(module.mean, "scale"):
            module.mean = module.mean + 1
            module.mean.scale = 3.0
        return module.linear(x) * module.mean * module.mean.scale

    experts, plain = both(lambda: Renewing(call), num=2, optimizer=None, max_resident_bytes=SIZE)
    for x in inputs(2):
        for expert, module in zip(experts, plain, strict=True):
            assert torch.equal(expert(x), module(x))


def keep_its_history(module: Renewing, x: Tensor) -> Tensor:
    y = module.linear(x) + module.mean
    module.mean = y.mean(0)
    return y


def make_it_sparse(module: Renewing, x: Tensor) -> Tensor:
    module.mean, module.last = module.mean + 1, module.last.to_sparse()
    return module.linear(x)


def make_two_one(module: Renewing, x: Tensor) -> Tensor:
    module.mean = module.mean + 1
    module.scale = module.mean
    return module.linear(x)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (keep_its_history, "expected a call to leave mean without a history, got .* Detach it, or return it"),
        (make_it_sparse, r"expected a call to leave last of shape \(2, 4\) .*, got .* torch.sparse_coo\."),
        (
            make_two_one,
            "expected a call to leave scale and mean two tensors, got one. Give scale a clone of it.",
        ),
    ],
)
def test_buffers_that_cannot_come_and_go_are_refused_and_those_before_put_back(
    call: Call, error: str
) -> None:
    experts, plain = both(lambda: Renewing(call), num=2, optimizer=OPTIMIZERS["sgd"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=error):
            experts[0](inputs(1)[0])
    assert_same_weights(experts, plain)


def test_buffers_that_are_made_anew_outside_of_calls_are_in_checkpoints(tmp_path: Path) -> None:
    """By a hook of an update, and by a program between calls; `restore()` goes back behind these."""

    def call(module: Renewing, x: Tensor) -> Tensor:
        return module.linear(x) * module.mean

    torch.manual_seed(0)
    modules = [Renewing(call) for _ in range(3)]
    experts = OffloadedExperts(
        modules, lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=2 * SIZE, store=tmp_path
    )

    def average(module: Any) -> None:
        module.mean = 0.5 * module.mean + module.linear.bias.detach()

    for expert, optimizer in zip(experts, experts.optimizers, strict=True):
        optimizer.register_step_post_hook(lambda *_, m=expert.stands_for: average(m))
        expert(inputs(1)[0]).sum().backward()
    experts.step()
    experts[2].stands_for.mean = torch.full((4,), 7.0)
    wanted = [experts.state_dict(i)["mean"].clone() for i in range(3)]
    assert [torch.equal(mean, torch.ones(4)) for mean in wanted] == [False] * 3
    experts.checkpoint()
    for expert in experts:
        expert.stands_for.mean = torch.zeros(4)
    experts.restore()
    for expert in experts:
        expert(inputs(1)[0])
    assert [torch.equal(experts.state_dict(i)["mean"], mean) for i, mean in enumerate(wanted)] == [True] * 3


@pytest.mark.parametrize("other", [None, torch.zeros(3), nn.Parameter(torch.ones(4), requires_grad=False)])
def test_what_is_put_in_the_place_of_a_buffer_between_calls_is_called_with(other: Tensor | None) -> None:
    """Also what the part has no room for, which leaves with the program."""

    def call(module: Renewing, x: Tensor) -> Tensor:
        return module.linear(x) * (2 if module.mean is None else 3 + module.mean.sum())

    experts, plain = both(lambda: Renewing(call), num=2, optimizer=None, max_resident_bytes=SIZE)
    for x in inputs(2):
        for expert, module in zip(experts, plain, strict=True):
            for one in (expert.stands_for, module):
                del one.mean
                one.mean = other
            assert torch.equal(expert(x), module(x))


def test_restore_needs_nothing_of_what_is_there(tmp_path: Path) -> None:
    """A file of the store that was cut, and others in the places of buffers."""
    torch.manual_seed(0)
    modules = [Renewing(save_it) for _ in range(2)]
    experts = OffloadedExperts(modules, None, max_resident_bytes=SIZE, store=tmp_path)
    wanted = [experts.state_dict(i)["mean"].clone() for i in range(2)]
    experts.checkpoint()
    (inputs_of_calls,) = inputs(1)
    for expert in experts:
        expert(inputs_of_calls)
    files = [*(tmp_path / "resident-store").glob("*.weights*")]
    assert files
    for file in files:
        file.unlink()
        file.touch()
    experts[0].stands_for.mean, experts[1].stands_for.mean = torch.zeros(4), None
    experts.restore()
    assert [torch.equal(experts.state_dict(i)["mean"], mean) for i, mean in enumerate(wanted)] == [True] * 2
