"""What is left of updates of offloaded experts that fail, or of a backward that did: nothing is made twice."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_weights, both, ffn
from tests.support.scarce import full_disk, no_thread_to_give
from tests.support.stores import WatchedStore

PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")


class _Failing(torch.autograd.Function):
    """Its backwards take from a list whether they raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, failures: list[bool]) -> Tensor:
        ctx.failures = failures
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _raise_next(ctx.failures)
        return grad, None


def _raise_next(failures: list[bool]) -> None:
    if failures and failures.pop(0):
        raise ValueError("no such luck")


@pytest.mark.parametrize("where", ["between two calls", "second micro-batch", "update", "update at the end"])
def test_what_a_backward_that_failed_has_gathered_updates_nothing(where: str) -> None:
    """As in PyTorch, where weights get no gradient of it; the next backward had updated by both."""

    class Expert(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_Failing.apply(x, failures if where == "second micro-batch" else []))

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            _raise_next(failures if where.startswith("update") else [])
            return super().step(closure)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Optimizer(parameters, lr=0.1, momentum=0.9)

    num_microbatches = 2 if where == "second micro-batch" else None
    experts, plain = both(
        lambda: Expert(4, 4), 1, make, update="on_backward", num_microbatches=num_microbatches
    )
    x = torch.randn(6, 4, requires_grad=True)
    failures = [False, True] if where == "second micro-batch" else [True]
    y = experts[0](x)
    if where == "between two calls":
        y = experts[0](_Failing.apply(y, failures))
    another = experts[0](x) if where == "update at the end" else None  # so the update waits for this one
    with pytest.raises(ValueError, match="no such luck"):
        y.sum().backward()
    del y, another
    assert set(experts.gradients(0).values()) == {None}
    experts.step()  # has nothing to do
    assert_same_weights(experts, plain)

    optimizer = make(plain[0].parameters())
    for modules in (experts, plain):
        modules[0](x).sum().backward()
    optimizer.step()
    assert_same_weights(experts, plain)


def test_an_update_at_the_end_of_a_backward_that_raises_leaves_the_other_experts_theirs() -> None:
    """Theirs had been made by the next backward, together with its own."""

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            _raise_next(failures)
            return super().step(closure)

    failures: list[bool] = []
    experts, plain = both(
        lambda: nn.Linear(4, 4), 3, lambda p: Optimizer(p, lr=0.1, momentum=0.9), update="on_backward"
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in plain]
    x = torch.randn(6, 4)

    def train_plain(which: list[int]) -> None:
        for i in which:
            plain[i](x).sum().backward()
            optimizers[i].step()
            optimizers[i].zero_grad()

    others = [expert(x) for expert in experts]  # so that updates wait for the end
    failures += [False, True]
    with pytest.raises(ValueError, match="no such luck") as raised:
        sum(expert(x) for expert in experts).sum().backward()  # type: ignore[union-attr]
    train_plain([i for i in range(3) if not _is_named(i, raised.value)])
    assert_same_weights(experts, plain)

    del others
    sum(expert(x) for expert in experts).sum().backward()  # type: ignore[union-attr]
    train_plain([0, 1, 2])
    assert_same_weights(experts, plain)


def test_updates_in_backwards_are_made_once_each_also_while_the_system_has_no_thread_to_give() -> None:
    """The first one raised, and the second backward made its update, too."""
    experts, plain = both(lambda: nn.Linear(4, 4), 2, OPTIMIZERS["momentum"], update="on_backward")
    optimizers = [OPTIMIZERS["momentum"](module.parameters()) for module in plain]
    x = torch.randn(6, 4)
    with no_thread_to_give():
        experts[0](x).sum().backward()
    experts[0](x).sum().backward()
    for _ in range(2):
        optimizers[0].zero_grad()
        plain[0](x).sum().backward()
        optimizers[0].step()
    assert_same_weights(experts, plain)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_a_hook_of_a_step_that_wants_more_than_there_is_room_for_is_told(update: Any) -> None:
    """In a backward it was waited for without end, and Ctrl-C was not heard."""
    experts, _ = both(lambda: nn.Linear(8, 8), 3, update=update, max_resident_bytes=1300)
    told: list[str] = []

    def call_another(*_: object) -> None:
        with pytest.raises(RuntimeError, match="held by calls that all wait for more") as raised:
            experts[2](torch.ones(1, 8))
        told.append(str(raised.value))

    def update_the_first() -> None:
        experts[0](torch.ones(1, 8)).sum().backward()
        experts.step()

    update_the_first()  # without state yet, there is room
    experts.optimizers[0].register_step_pre_hook(call_another)
    update_the_first()
    assert len(told) == 1


class Refusing(torch.optim.Adam):
    """Updates, and raises after its second step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if all(state["step"] == 2 for state in self.state.values()):
            raise ValueError("refused")


@pytest.mark.parametrize("replaces_state", [False, True])
def test_an_update_that_raises_is_kept_as_far_as_it_came(replaces_state: bool) -> None:
    """In PyTorch both weights and state stay as they are; here the state was lost when it left memory."""

    class Optimizer(Refusing):
        def step(self, closure: Any = None) -> Any:
            if replaces_state:
                for state in self.state.values():
                    state["exp_avg"], state["seen"] = state["exp_avg"].clone(), state["step"].clone()
            return super().step(closure)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Optimizer(parameters, lr=0.1)

    experts, plain = both(lambda: nn.Linear(4, 4), optimizer=make, max_resident_bytes=600)
    optimizers = [make(module.parameters()) for module in plain]
    for step in range(4):
        for i, module in enumerate(plain):
            x = torch.randn(3, 4)
            for one in (module, experts[i]):
                one(x).square().sum().backward()
        for update in (*(held.step for held in experts._held), *(one.step for one in optimizers)):
            with pytest.raises(ValueError, match="refused") if step == 1 else contextlib.nullcontext():
                update()
        experts.zero_grad()
        for one in optimizers:
            one.zero_grad()
    assert_same_weights(experts, plain)


@pytest.mark.parametrize("then", ["it is repeated", "it is given up", "more gradients come"])
@pytest.mark.parametrize("what", ["optimizer at first", "optimizer at last", "disk"])
def test_a_step_that_failed_midway_updates_no_expert_twice_by_the_same_gradients(
    what: str, then: str
) -> None:
    class Failing(torch.optim.Adam):
        num_to_go = 99

        def step(self, closure: Any = None) -> Any:
            Failing.num_to_go -= 1
            if what == "optimizer at first" and not Failing.num_to_go:
                raise ValueError("no such luck")
            super().step(closure)
            if what == "optimizer at last" and not Failing.num_to_go:
                raise ValueError("no such luck")

    store = WatchedStore()
    experts, plain = both(ffn, optimizer=lambda p: Failing(p, lr=0.01), store=store, max_resident_bytes=9000)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in plain]

    def backward() -> None:
        x = torch.randn(4, 8)
        for modules in (experts, plain):
            sum(module(x) for module in modules).square().sum().backward()

    backward()
    if what == "disk":
        store.failing = "write"
    else:
        Failing.num_to_go = 3
    with pytest.raises((ValueError, OSError), match=r"no such luck|No space left") as raised:
        experts.step()
    store.failing = ""
    ended = [i for i, held in enumerate(experts._held) if held.is_updated]
    assert 0 < len(ended) < 5, "the failure was to come midway"
    not_begun = [i for i in range(5) if what == "optimizer at first" and _is_named(i, raised.value)]
    assert len(not_begun) == (what == "optimizer at first")
    updated = [i for i in ended if i not in not_begun]
    if then == "more gradients come":
        for i in updated:
            optimizers[i].step()
        backward()
    if then == "it is repeated":
        updated = [i for i in range(5) if i not in not_begun]
    for i in range(5) if then == "more gradients come" else updated:
        optimizers[i].step()
    if then != "it is given up":
        experts.step()
    assert_same_weights(experts, plain)
    experts.zero_grad()
    for one in optimizers:
        one.zero_grad()

    for _ in range(2):  # and the next steps are whole ones
        backward()
        experts.step()
        for one in optimizers:
            one.step()
    assert_same_weights(experts, plain)


def _is_named(index: int, error: BaseException) -> bool:
    return any(f"optimizer of expert-{index:05}" in note for note in getattr(error, "__notes__", ()))


def test_an_update_that_raises_halfway_is_not_made_again() -> None:
    """Its first parameter had been updated a second time by the next `step`."""

    class Halfway(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            first, second = self.param_groups[0]["params"]
            first.data.add_(first.grad, alpha=-1.0)
            if not Halfway.has_failed:
                Halfway.has_failed = True
                raise ValueError("no such luck")
            second.data.add_(second.grad, alpha=-1.0)

        has_failed = False

    experts, plain = both(lambda: nn.Linear(4, 4), num=1, optimizer=lambda p: Halfway(p, lr=1.0))
    for modules in (experts, plain):
        modules[0](torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="no such luck"):
        experts.step()
    experts.step()
    wanted = {"weight": plain[0].weight - plain[0].weight.grad, "bias": plain[0].bias}
    torch.testing.assert_close(experts.state_dict(0), wanted)


def wait_for_writes(experts: OffloadedExperts) -> None:
    residency = experts.residency
    with residency._lock:
        while residency._transfers.is_any_busy:
            residency._lock.wait(60)


class _Growing(torch.optim.SGD):
    """Has three times the state from its second step on."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1
            if state["count"] == 2:
                state["second"], state["third"] = (state["momentum_buffer"].clone() for _ in range(2))


_STATE_OF_LINEAR = {
    "first state": (OPTIMIZERS["adam"], 2 * 288 + 8),
    "state that grows": (lambda p: _Growing(p, lr=0.1, momentum=0.9), 3 * 288),
}


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("which", _STATE_OF_LINEAR)
@pytest.mark.parametrize("is_repeated", [True, False], ids=["step is repeated", "step is given up"])
def test_state_that_found_no_room_on_the_disk_is_in_the_next_checkpoint(
    tmp_path: Path, which: str, update: str, is_repeated: bool
) -> None:
    """It lacked it without an error, and `restore` took it away."""
    make, state_bytes = _STATE_OF_LINEAR[which]
    limit = 2 * 288 + state_bytes + 48  # for weights, gradients and state of one
    experts, plain = both(
        lambda: nn.Linear(8, 8), 3, make, update=update, store=tmp_path, max_resident_bytes=limit
    )
    optimizers = [make(module.parameters()) for module in plain]
    x = torch.randn(4, 8)

    def train_plain(i: int) -> None:
        plain[i](x).square().sum().backward()
        optimizers[i].step()
        optimizers[i].zero_grad()

    def train() -> None:
        for i in range(3):
            experts[i](x).square().sum().backward()
            train_plain(i)
        experts.step()
        experts.zero_grad()

    if which == "state that grows":
        train()
    loss = experts[1](x).square().sum()
    if update == "on_step":
        loss.backward()
    experts.residency.flush()
    with full_disk():
        for expert in experts:
            expert.apply(lambda _: None)  # their weights cannot leave any more
        with pytest.raises(OSError, match="File too large"):
            experts.step() if update == "on_step" else loss.backward()
        with pytest.raises(OSError, match="File too large"):
            experts.checkpoint()
        wait_for_writes(experts)  # one that has begun fails when there is room again
    if is_repeated:
        experts.step()
    experts.zero_grad()
    train_plain(1)

    experts.checkpoint()
    experts.restore()
    for _ in range(2):
        train()
    assert_same_weights(experts, plain)
    experts.close()


def test_state_that_exceeds_the_limit_is_told_as_often_as_it_is_met(tmp_path: Path) -> None:
    """Only the first `step` said so, and a checkpoint lacked it."""
    experts, _ = both(lambda: nn.Linear(8, 8), 2, store=tmp_path, max_resident_bytes=1000)
    experts[1](torch.ones(4, 8)).sum().backward()
    for told in (experts.step, experts.step, experts.checkpoint):
        with pytest.raises(ValueError, match=r"max_resident_bytes of at least .* got 1000"):
            told()
    assert list(tmp_path.glob("checkpoint-*")) == []
    experts.close()
