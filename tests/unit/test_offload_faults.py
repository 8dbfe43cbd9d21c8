"""Offloaded experts when something goes wrong: what is refused, what is left behind, and that numbers stay right."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.stores import FolderStore
from moe_autograd.errors import CheckpointError
from tests.support.scarce import full_disk
from tests.support.stores import WatchedStore, put_all_out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build(folder: Path, optimizer: Any = sgd, num: int = 2, **options: Any) -> OffloadedExperts:
    torch.manual_seed(0)
    experts = (nn.Linear(4, 4) for _ in range(num))
    return OffloadedExperts(experts, optimizer, store=folder, **{"max_resident_bytes": 1000, **options})


def train(experts: OffloadedExperts) -> None:
    sum(expert(torch.ones(2, 4)) for expert in experts).sum().backward()  # type: ignore[union-attr]
    experts.step()
    experts.zero_grad()


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        OffloadedExperts.step,
        OffloadedExperts.zero_grad,
        OffloadedExperts.prefetch,
        lambda experts: experts.gradients(0),
        lambda experts: experts.state_dict(0),
    ],
    ids=["step", "zero_grad", "prefetch", "gradients", "state_dict"],
)
def test_closed_experts_say_so_also_where_nothing_would_be_to_do(
    use: Callable[[OffloadedExperts], Any], has_gradients: bool
) -> None:
    with OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000) as experts:
        if has_gradients:
            experts[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
        use(experts)
    experts.close()  # and once more


# ---- taken over


@pytest.mark.parametrize("what", ["module", "parameter", "buffer", "memory", "transposed"])
@pytest.mark.parametrize("is_beside", [False, True])
def test_experts_that_share_a_tensor_are_refused_by_name(what: str, is_beside: bool) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(4))

    one, other = Expert(), Expert()
    if what == "module":
        other = one
    elif what == "parameter":
        other.linear.bias = one.linear.bias
    elif what == "memory":
        other.linear.bias.data = one.linear.bias.data
    elif what == "transposed":  # not contiguous
        one.linear.weight = nn.Parameter(one.linear.weight.detach().t())
        other.linear.weight.data = one.linear.weight.data
    else:
        other.table = one.table
    modules: list[nn.Module] = [one, other]
    options: dict[str, Any] = {"max_resident_bytes": 1000}
    if is_beside:
        options = {"beside": OffloadedExperts([modules.pop(0)], sgd, max_resident_bytes=1000)}
    with pytest.raises(
        ValueError, match=r"expert-00001: expected tensors of its own, got .* of expert-00000"
    ):
        OffloadedExperts(modules, sgd, **options)


def test_experts_whose_weights_are_parts_of_one_tensor_are_taken_over() -> None:
    stacked = torch.ones(3, 4, 4)
    modules = [nn.Linear(4, 4, bias=False) for _ in stacked]
    for module, weight in zip(modules, stacked, strict=True):
        module.weight.data = weight
    with OffloadedExperts(modules, sgd, max_resident_bytes=1000) as experts:
        assert torch.equal(experts[2](torch.ones(1, 4)), torch.full((1, 4), 4.0))


def test_experts_may_lie_where_those_of_others_lay() -> None:
    state = nn.Linear(4, 4).state_dict()
    for _ in range(2):
        expert = nn.Linear(4, 4)
        expert.load_state_dict(state, assign=True)
        with OffloadedExperts([expert], sgd, max_resident_bytes=1000) as experts:
            assert torch.equal(experts.state_dict(0)["weight"], state["weight"])


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_tensors_of_one_expert_in_the_same_memory_are_refused(what: str) -> None:
    """Taken over, each got its own memory, and trained apart from the other without an error."""
    expert = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if what == "weight":
        expert[1].weight = nn.Parameter(expert[0].weight)
    else:
        expert.register_buffer("first_row", expert[0].weight.data[0])
    with pytest.raises(
        ValueError, match=r"expert-00000: expected each tensor in memory of its own, got .* same"
    ):
        OffloadedExperts([expert], sgd, max_resident_bytes=1000)
    expert[1].weight, expert.first_row = expert[0].weight, expert[0].weight.detach()[0].clone()
    train(OffloadedExperts([expert], sgd, max_resident_bytes=1000))


def test_experts_that_are_refused_leave_those_beside_them_as_they_were(tmp_path: Path) -> None:
    first = build(tmp_path)
    known = first.residency.known_bytes
    with pytest.raises(ValueError, match="at least"):
        OffloadedExperts([nn.Linear(4, 4), nn.Linear(99, 99)], sgd, beside=first)
    assert first.residency.known_bytes == known
    first.checkpoint()
    first.close()
    again = build(tmp_path)
    again.restore()
    again.close()


@pytest.mark.usefixtures("no_gc")
def test_a_folder_is_free_when_experts_for_it_were_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least"):
        build(tmp_path, max_resident_bytes=10)
    (tmp_path / "resident-store" / "somebody's").mkdir()
    with pytest.raises(OSError):
        build(tmp_path)
    (tmp_path / "resident-store" / "somebody's").rmdir()
    build(tmp_path).close()


def test_evaluating_in_inference_mode_first_and_training_then() -> None:
    torch.manual_seed(0)
    plain = [nn.Linear(4, 4) for _ in range(6)]
    experts = OffloadedExperts(copy.deepcopy(plain), sgd, max_resident_bytes=500)
    experts.residency.flush()
    put_all_out(experts.residency)
    optimizers = [sgd(module.parameters()) for module in plain]
    for _ in range(3):
        with torch.inference_mode():
            for expert in experts:
                expert(torch.ones(2, 4))
        train(experts)
        sum(module(torch.ones(2, 4)) for module in plain).sum().backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for i, module in enumerate(plain):
        torch.testing.assert_close(experts.state_dict(i)["weight"], module.weight.detach())


# ---- folders and files


def test_a_checkpoint_removes_no_folder_of_yours(tmp_path: Path) -> None:
    experts = build(tmp_path)
    for name in ("checkpoint-best", "checkpoint-7", "checkpoint-00000000-copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    for _ in range(2):
        path = experts.checkpoint()
    experts.close()
    assert path.name == "checkpoint-00000001"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-00000000-copy",
        "checkpoint-00000001",
        "checkpoint-7",
        "checkpoint-best",
    ]


def test_a_checkpoint_that_fails_leaves_nothing_and_holds_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = build(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        experts.checkpoint(object())
    own = os.link

    def link(source: Path, target: Path) -> None:
        if "00001.weights" in str(source):
            raise OSError(28, "No space left on device")
        own(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match="No space left"):
        experts.checkpoint()
    assert list(tmp_path.glob("checkpoint-*")) == []
    files = [path for path in (tmp_path / "resident-store").iterdir() if path.suffix == ".weights"]
    assert [path.stat().st_nlink for path in files] == [1, 1]
    experts.close()


def test_a_checkpoint_on_a_full_disk_names_the_file_that_found_no_room(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.residency.flush()
        with full_disk(), pytest.raises(OSError, match=r"checkpoint-00000000.new/manifest.json"):
            experts.checkpoint()
        assert list(tmp_path.glob("checkpoint-*")) == []
        experts.checkpoint()


def test_a_write_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    store, flat = FolderStore(tmp_path), torch.zeros(4, dtype=torch.uint8)

    class Unwritable(Layout):
        def header(self, metadata: Mapping[str, str] | None = None) -> bytes:
            return "no bytes"  # type: ignore[return-value]

    with pytest.raises(TypeError):
        store.write("a", Unwritable({}, 4), flat)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saved_by", ["nothing", "groups"])
def test_a_checkpoint_of_other_optimizers_is_refused_and_changes_nothing(
    tmp_path: Path, saved_by: str
) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one]} for one in parameters], lr=0.1)

    with build(tmp_path, None if saved_by == "nothing" else grouped) as experts:
        experts.checkpoint()
    with build(tmp_path) as experts:
        train(experts)
        before = [experts.state_dict(i) for i in range(2)]
        with pytest.raises(CheckpointError, match="expert-00000: expected an optimizer with 1 group"):
            experts.restore()
        torch.testing.assert_close([experts.state_dict(i) for i in range(2)], before)
        train(experts)


def test_a_checkpoint_of_which_one_expert_fits_changes_none(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        experts.checkpoint()
    modules = [nn.Linear(4, 4), nn.Linear(5, 5)]
    wanted = modules[0].weight.detach().clone()
    with OffloadedExperts(modules, sgd, max_resident_bytes=1000, store=tmp_path) as experts:
        with pytest.raises(CheckpointError, match="expected expert-00001 with"):
            experts.restore()
        torch.testing.assert_close(experts.state_dict(0)["weight"], wanted)


# ---- optimizers


def test_state_that_is_loaded_after_an_expert_was_taken_over_is_refused(tmp_path: Path) -> None:
    """It was lost without an error as soon as the expert left memory."""
    with build(tmp_path) as experts:
        train(experts)
        before = experts.state_dict(1)
        with pytest.raises(
            RuntimeError, match=r"expert-00001: expected its optimizer's state .* restore\(\)"
        ):
            experts.optimizers[1].load_state_dict(experts.optimizers[1].state_dict())
        train(experts)
        plain = nn.Linear(4, 4)
        plain.load_state_dict(before)
        buffer = 1.9 * 2 * torch.ones(4)  # momentum: the gradient and 0.9 of the one before
        torch.testing.assert_close(experts.state_dict(1)["bias"], plain.bias.detach() - 0.1 * buffer)


def test_state_that_is_there_and_does_not_fit_is_told_at_once() -> None:
    first = OffloadedExperts([nn.Linear(4, 4)], sgd, max_resident_bytes=300)
    known = first.residency.known_bytes
    with pytest.raises(ValueError, match=r"expected max_resident_bytes of at least 440, .* got 300"):
        OffloadedExperts([nn.Linear(2, 2), nn.Linear(8, 4)], torch.optim.Adagrad, beside=first)
    assert first.residency.known_bytes == known


def test_state_that_found_no_room_on_the_disk_is_not_lost() -> None:
    class Counting(nn.Linear):
        """Its part is changed by every call, so it has to be written before it leaves."""

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    torch.manual_seed(0)
    plain: list[nn.Module] = [nn.Linear(8, 8), Counting()]
    store = WatchedStore()
    experts = OffloadedExperts(copy.deepcopy(plain), sgd, max_resident_bytes=900, store=store)
    optimizers = [sgd(module.parameters()) for module in plain]
    for step in range(4):
        for modules in (experts, plain):
            modules[0](torch.ones(2, 8)).sum().backward()
        if step == 0:
            experts.residency.flush()
            store.failing = "write"
            experts[1](torch.ones(2, 8))
            with pytest.raises(OSError, match="No space left"):
                experts.step()
            store.failing = ""
            is_written = False
            while not is_written:  # each write that has failed is told once
                with contextlib.suppress(OSError):
                    experts.residency.flush()
                    is_written = True
        else:
            experts.step()
        experts.zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
        experts[1](torch.ones(2, 8))
    torch.testing.assert_close(experts.state_dict(0)["weight"], plain[0].weight.detach())


def test_a_backward_after_an_update_that_failed_halfway_raises() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise ValueError("a bug")

    experts = OffloadedExperts([nn.Linear(4, 4)], lambda p: Failing(p, lr=0.1), max_resident_bytes=1000)
    x = torch.ones(2, 4, requires_grad=True)
    experts[0](x).sum().backward()
    y = experts[0](x)
    with pytest.raises(ValueError, match="a bug"):
        experts.step()
    with pytest.raises(RuntimeError, match="expected the weights of the forward"):
        y.sum().backward()
