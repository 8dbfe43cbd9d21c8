"""Checkpoints of offloaded experts: what comes back, and what is refused."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import CheckpointError
from tests.support.offload_checkpoints import adam, assert_equal, build, states, train

ROOT = Path(__file__).parents[2]


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    with build(tmp_path / "straight") as straight:
        train(straight, range(6))
        want = states(straight)
    with build(tmp_path / "stopped") as first:
        train(first, range(3))
        for optimizer in first.optimizers:
            optimizer.param_groups[0]["lr"] = 0.01
        first.checkpoint({"step": 3})
        train(first, range(3, 5))  # lost
    with build(tmp_path / "stopped") as second:
        assert second.restore() == {"step": 3}
        train(second, range(3, 6))
        assert_equal(states(second), want)


def test_a_note_that_no_json_can_hold_is_refused(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        with pytest.raises(TypeError, match=r"expected a note of what JSON knows, got another \(.*Tensor"):
            experts.checkpoint({"loss": torch.ones(2)})
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == []


def test_options_of_the_optimizers_come_back(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.optimizers[2].param_groups[0]["lr"] = 0.5
        experts.checkpoint()
    with build(tmp_path) as experts:
        experts.restore()
        assert [one.param_groups[0]["lr"] for one in experts.optimizers] == [0.01, 0.01, 0.5, 0.01]
        assert experts.optimizers[0].param_groups[0]["betas"] == (0.9, 0.999)


def test_a_learning_rate_of_numpy_comes_back_as_a_number(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.optimizers[2].param_groups[0].update(lr=numpy.float32(0.5), rates=[numpy.float32(0.25)])
        experts.checkpoint()
        experts.restore()
        assert repr(experts.optimizers[2].param_groups[0]["rates"]) == "[0.25]"
        assert repr(experts.optimizers[2].param_groups[0]["lr"]) == "0.5"


@pytest.mark.parametrize(
    "value",
    [{2: 0.1}, {"seen": {1}}, lambda step: 0.1, [torch.ones(2)], {"of": (torch.ones(2),)}],
    ids=["a number as a key", "a set", "a function", "tensors in a list", "tensors in a dict"],
)
def test_options_that_json_does_not_give_back_are_refused_before_anything_is_saved(
    tmp_path: Path, value: Any
) -> None:
    """Keys had come back as texts, tensors as lists; of the others the error had not said whose they are."""
    with build(tmp_path) as experts:
        experts.optimizers[2].param_groups[0]["rates"] = value
        text = rf"expert-00002\.optimizer: expected plain values, .*, got {type(value).__name__}.* \(key='rates'\)"
        with pytest.raises(CheckpointError, match=text):
            experts.checkpoint()
        assert not list(tmp_path.glob("checkpoint-*"))


def test_a_learning_rate_that_is_a_tensor_comes_back_as_one(tmp_path: Path) -> None:
    def build() -> OffloadedExperts:
        return OffloadedExperts(
            [nn.Linear(2, 2)],
            lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
            max_resident_bytes=1000,
            store=tmp_path,
        )

    with build() as experts:
        experts.optimizers[0].param_groups[0]["lr"].fill_(0.3)
        experts.checkpoint()
    with build() as experts:
        experts.restore()
        assert torch.equal(experts.optimizers[0].param_groups[0]["lr"], torch.tensor(0.3))


def test_betas_that_are_tensors_are_restored_as_such(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        lr, betas = torch.tensor(0.1), (torch.tensor(0.8), torch.tensor(0.9))
        return torch.optim.Adam(parameters, lr, betas, foreach=False)  # type: ignore[arg-type]

    with OffloadedExperts([nn.Linear(4, 4)], make, max_resident_bytes=1000, store=tmp_path) as experts:
        experts.optimizers[0].param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))
        experts.checkpoint()
        experts.optimizers[0].param_groups[0]["betas"] = (torch.tensor(0.1), torch.tensor(0.2))
        experts.restore()
        restored = experts.optimizers[0].param_groups[0]["betas"]
        assert restored == (torch.tensor(0.5), torch.tensor(0.75))
        assert all(isinstance(beta, torch.Tensor) for beta in restored)


class Slowing(torch.optim.Optimizer):
    """Makes smaller steps each time; what it counts is a number of Python, and no tensor."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.data.add_(parameter.grad, alpha=-0.1 / state["step"])


def test_numbers_that_an_optimizer_counts_come_back(tmp_path: Path) -> None:
    def slowing(folder: str) -> OffloadedExperts:
        torch.manual_seed(0)
        make = lambda parameters: Slowing(parameters, {})  # noqa: E731
        return OffloadedExperts([nn.Linear(8, 8)], make, max_resident_bytes=2000, store=tmp_path / folder)

    with slowing("straight") as straight:
        train(straight, range(4))
        want = states(straight)
    with slowing("resumed") as experts:
        train(experts, range(2))
        experts.checkpoint()
    with slowing("resumed") as experts:
        experts.restore()
        train(experts, range(2, 4))
        assert_equal(states(experts), want)


def test_experts_that_are_not_trained_come_back(tmp_path: Path) -> None:
    saved = []
    for is_first in (True, False):
        with OffloadedExperts([nn.Linear(2, 2)], max_resident_bytes=100, store=tmp_path) as experts:
            _ = experts.checkpoint() if is_first else experts.restore()
            saved.append(states(experts))
    assert_equal(*saved)


def test_going_back_in_the_same_process_forgets_gradients_and_later_state(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.checkpoint("before any step")
        want = states(experts)
        train(experts, range(2))
        experts[0](torch.ones(4, 8)).sum().backward()
        assert experts.restore() == "before any step"
        assert_equal(states(experts), want)
        assert set(experts.gradients(0).values()) == {None}
        assert all(not optimizer.state for optimizer in experts.optimizers)


def test_a_backward_across_a_restore_raises(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.checkpoint()
        y = experts[0](torch.ones(4, 8, requires_grad=True))
        experts.restore()
        with pytest.raises(RuntimeError, match="Call backward before step"):
            y.sum().backward()


def test_layers_that_share_a_folder_are_saved_as_one(tmp_path: Path) -> None:
    def two_layers() -> tuple[OffloadedExperts, OffloadedExperts]:
        first = build(tmp_path)
        return first, OffloadedExperts([nn.Linear(8, 8), nn.Linear(8, 8)], adam, beside=first)

    first, second = two_layers()
    second[1](torch.ones(4, 8)).sum().backward()
    second.step()
    want = states(first) + states(second)
    second.checkpoint()
    first.close()
    torch.manual_seed(1)
    first, second = two_layers()
    first.restore()
    assert_equal(states(first) + states(second), want)
    assert first.resident_bytes <= 2000
    second.close()


def test_closed_experts_leave_the_folder_to_those_who_have_it_now(tmp_path: Path) -> None:
    """A `restore` had put the checkpoint's files in the place of theirs."""
    with build(tmp_path) as closed:
        closed.checkpoint()
    with build(tmp_path) as experts:
        train(experts, range(3))
        want = states(experts)
        for call in (closed.restore, closed.checkpoint):
            with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
                call()
        assert_equal(states(experts), want)


def test_files_are_plain_safetensors_of_the_plain_modules(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        train(experts, range(2))
        path = experts.checkpoint()
        want = states(experts)
    assert sorted(p.name for p in path.iterdir())[:2] == [
        "expert-00000.optimizer.safetensors",
        "expert-00000.weights.safetensors",
    ]
    assert_equal(
        [safetensors.torch.load_file(path / f"expert-{i:05}.weights.safetensors") for i in range(4)], want
    )
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    module.load_state_dict(safetensors.torch.load_file(path / "expert-00001.weights.safetensors"))


def test_files_whose_tensors_lie_in_another_order_are_restored(tmp_path: Path) -> None:
    """As those of versions before are, and of other writers."""
    with build(tmp_path) as experts:
        train(experts, range(2))
        for path in experts.checkpoint().glob("*.safetensors"):
            before = path.read_bytes()
            tensors = safetensors.torch.load_file(path)
            path.unlink()
            safetensors.torch.save_file(tensors, path)
            assert path.read_bytes() != before
        want = states(experts)
        train(experts, range(2, 4))
        after = states(experts)
        experts.restore()
        assert_equal(states(experts), want)
        train(experts, range(2, 4))
        assert_equal(states(experts), after)


def test_training_after_a_checkpoint_leaves_it_alone_and_the_next_replaces_it(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        first = experts.checkpoint()
        before = {p.name: p.read_bytes() for p in first.iterdir()}
        train(experts, range(3))
        experts.residency.flush()
        assert {p.name: p.read_bytes() for p in first.iterdir()} == before
        second = experts.checkpoint()
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            second.name,
            "resident-store",
            "resident-store.lock",
        ]


def test_saving_and_going_back_leave_no_file_open(tmp_path: Path) -> None:
    counts = []
    with build(tmp_path) as experts:
        for step in range(3):
            train(experts, range(step, step + 1))
            experts.checkpoint()
            experts.restore()
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts == counts[:1] * 3


def test_without_a_checkpoint_or_a_folder(tmp_path: Path) -> None:
    with build(tmp_path) as experts, pytest.raises(CheckpointError, match="expected a checkpoint, got none"):
        experts.restore()
    experts = OffloadedExperts([nn.Linear(2, 2)], adam, max_resident_bytes=100)
    for call in (experts.checkpoint, experts.restore):
        with pytest.raises(CheckpointError, match="expected a folder as store, got RamStore"):
            call()


def test_a_checkpoint_of_other_experts_is_refused_with_both_sides_named(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.checkpoint()
    with build(tmp_path, num=3) as experts, pytest.raises(CheckpointError, match="expected 3 experts, got 4"):
        experts.restore()
    with (
        build(tmp_path, width=6) as experts,
        pytest.raises(CheckpointError, match=r"expected expert-00000 with .*\(6, 6\).*, got .*\(8, 8\)"),
    ):
        experts.restore()
    doubles = [nn.Linear(8, 8).double() for _ in range(4)]
    with (
        OffloadedExperts(doubles, adam, max_resident_bytes=20_000, store=tmp_path) as experts,
        pytest.raises(CheckpointError, match=r"with .*\(8, 8\) float64.*, got .*\(8, 8\) float32"),
    ):
        experts.restore()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    def build_with(optimizer: type[torch.optim.Optimizer]) -> OffloadedExperts:
        modules = [nn.Linear(8, 8)]
        return OffloadedExperts(modules, optimizer, max_resident_bytes=4000, store=tmp_path)

    with build_with(torch.optim.AdamW) as experts:
        experts.checkpoint()
    with (
        build_with(torch.optim.SGD) as experts,
        pytest.raises(CheckpointError, match="expected the state of SGD, got that of AdamW"),
    ):
        experts.restore()


@pytest.mark.parametrize("part", ["weights", "optimizer"])
@pytest.mark.parametrize("damage", ["cut", "no header", "missing"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, part: str, damage: str) -> None:
    """Of optimizers it had been seen midway, and a missing one was taken for that of an expert never updated."""
    with build(tmp_path / "whole") as experts:
        train(experts, range(4))
        want = states(experts)
    with build(tmp_path) as experts:
        train(experts, range(2))
        path = experts.checkpoint() / f"expert-00002.{part}.safetensors"
        train(experts, range(2, 3))
        content = path.read_bytes()
        path.unlink()  # a link of the store's
        if damage != "missing":
            path.write_bytes(content[:-16] if damage == "cut" else bytes(len(content)))
        with pytest.raises(CheckpointError, match=rf"expert-00002\.{part}\.safetensors: expected"):
            experts.restore()
        train(experts, range(3, 4))
        assert_equal(states(experts), want)


def test_a_checkpoint_whose_state_exceeds_the_limit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        train(experts, range(1))
        experts.checkpoint()
    with OffloadedExperts(
        [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)],
        adam,
        max_resident_bytes=1000,
        store=tmp_path,
    ) as experts:
        before = states(experts)
        with pytest.raises(ValueError, match="expected max_resident_bytes of at least"):
            experts.restore()
        assert_equal(states(experts), before)


def test_experts_that_were_never_updated_come_back_without_state(tmp_path: Path) -> None:
    def begin(folder: str) -> OffloadedExperts:
        experts = build(tmp_path / folder)
        experts[1](torch.arange(16.0).view(2, 8)).square().sum().backward()
        experts.step()
        experts.zero_grad()
        return experts

    with begin("straight") as straight:
        train(straight, range(2))
        want = states(straight)
    with begin("restored") as experts:
        experts.checkpoint()
        train(experts, range(1))
        experts.restore()
        train(experts, range(2))
        assert_equal(states(experts), want)


def test_state_of_an_earlier_training_is_saved_before_the_first_step(tmp_path: Path) -> None:
    """It had been beside the limit until an expert's first step, and in no checkpoint."""
    torch.manual_seed(0)
    plain = [nn.Linear(8, 8) for _ in range(4)]
    optimizers = [adam(module.parameters()) for module in plain]

    def train_plain(step: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip(plain, optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()

    def go_on(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adam(parameters)
        optimizer.load_state_dict(saved.pop(0))
        return optimizer

    train_plain(0)
    trained = copy.deepcopy(plain)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    with OffloadedExperts(trained, go_on, max_resident_bytes=2000, store=tmp_path) as experts:
        assert experts.residency.known_bytes == 4 * (2 * 288 + 2 * 288 + 8), "weights, gradients and state"
        experts.checkpoint()
    with OffloadedExperts(
        [nn.Linear(8, 8) for _ in range(4)], adam, max_resident_bytes=2000, store=tmp_path
    ) as experts:
        experts.restore()
        train(experts, range(1, 3))
        train_plain(1)
        train_plain(2)
        assert_equal(states(experts), [module.state_dict() for module in plain])
