"""Training as configured (accumulation, clipping, schedules, evaluation) gives what plain torch gives."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.checkpoints.snapshot import restore, take
from experts_server.configuration.config import OptimizerConfig, UpdateMode
from experts_server.configuration.settings import load_config
from experts_server.hosting.building import build_training
from experts_server.hosting.calls import BackwardCall, UpdateCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.training import Training
from experts_server.serving.configured import from_config
from moe_autograd.errors import ConfigError, ExpertFailedError, InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.servers import WireClient, tokens

D = 6


Trained = OptimizerConfig | Callable[[nn.Module], Training]


def hosted(
    config: Trained, update: UpdateMode = "on_step", samples_per_update: int | None = None
) -> HostedExpert:
    torch.manual_seed(0)
    module = FeedForwardExpert(D)
    training: Training | None
    if isinstance(config, OptimizerConfig):
        training = build_training("e", module, config, update, samples_per_update)
    else:
        training = config(module)
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, "gathered"), Budget(1 << 20, "replies"))
    return HostedExpert("e", module, training, memory)


class Client:
    """Sends backwards and steps to an expert, numbered."""

    def __init__(self, expert: HostedExpert, name: bytes = b"client") -> None:
        self.expert, self.name, self.sequence = expert, name, 0

    def backward(self, x: Tensor, grad: Tensor) -> Tensor | None:
        self.sequence += 1
        call = BackwardCall(
            self.name, _ignore, self.sequence, self.sequence, 0, (grad,), (True,), inputs=(x.clone(),)
        )
        return self.expert.backward(call)[0]

    def update(self, kind: Any) -> int:
        self.sequence += 1
        return self.expert.update(UpdateCall(self.name, _ignore, kind, self.sequence, 0))


def _ignore(*_: Any) -> None: ...


def sgd(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(name="sgd", lr=0.1, **settings)


def assert_same_weights(expert: HostedExpert, module: nn.Module) -> None:
    torch.testing.assert_close(expert.module.state_dict(), module.state_dict(), rtol=1e-5, atol=1e-6)


# ---- clipping and schedules


@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({"clip_grad_norm": 0.5}, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
        ({"clip_grad_norm": 1e6}, lambda p: nn.utils.clip_grad_norm_(p, 1e6)),
        ({"clip_grad_value": 0.01}, lambda p: nn.utils.clip_grad_value_(p, 0.01)),
        (
            {"clip_grad_value": 0.01, "clip_grad_norm": 0.05},
            lambda p: (nn.utils.clip_grad_value_(p, 0.01), nn.utils.clip_grad_norm_(p, 0.05)),
        ),
    ],
    ids=["norm", "norm that is not reached", "value", "value and then norm"],
)
def test_gradients_are_clipped_as_torch_clips_them(
    settings: dict[str, float], clip: Callable[[Sequence[nn.Parameter]], Any]
) -> None:
    expert = hosted(sgd(**settings))
    local = copy.deepcopy(expert.module)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    client = Client(expert)
    for seed in range(3):
        x, grad = tokens(4, D, seed=seed), tokens(4, D, seed=9)
        optimizer.zero_grad()
        local(x).backward(grad)
        before = copy.deepcopy(local.state_dict())
        clip(list(local.parameters()))
        optimizer.step()
        client.update("zero_grad")
        client.backward(x, grad)
        client.update("step")
        assert_same_weights(expert, local)
        assert not torch.equal(before["up.weight"], local.state_dict()["up.weight"])


def test_clipping_leaves_what_is_gathered_alone() -> None:
    """A second step without zero_grad clips the gradients that came, not those that were clipped before."""
    expert = hosted(sgd(clip_grad_value=0.01))
    local = copy.deepcopy(expert.module)
    client, x, grad = Client(expert), tokens(4, D), tokens(4, D, seed=9)
    gathered = torch.autograd.grad(local(x), list(local.parameters()), grad)
    client.backward(x, grad)
    for _ in range(2):
        client.update("step")
        for parameter, gradient in zip(local.parameters(), gathered, strict=True):
            parameter.data -= 0.1 * gradient.clamp(-0.01, 0.01)
    assert_same_weights(expert, local)


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 6], "gamma": 0.5},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3},
    "PolynomialLR": {"total_iters": 7},
    "ConstantLR": {"total_iters": 6},
    "CosineAnnealingLR": {"T_max": 5},
    "ExponentialLR": {"gamma": 0.9},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 20},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "LinearLR": {"total_iters": 4},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_once_an_update_also_over_a_restart(name: str, tmp_path: Path) -> None:
    config = OptimizerConfig(
        name="adamw",
        lr=0.01,
        args={"weight_decay": 0.1},
        schedule={"name": name.upper(), "args": SCHEDULES[name]},
    )
    expert = hosted(config)
    local = copy.deepcopy(expert.module)
    optimizer = torch.optim.AdamW(local.parameters(), lr=0.01, weight_decay=0.1)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
    client = Client(expert)
    for step in range(8):
        if step == 5:
            expert = restarted(expert, config, tmp_path)
            client.expert = expert
        client.update("zero_grad")
        client.update("step")  # nothing was given: no update, and the schedule stays
        optimizer.zero_grad()
        x, grad = tokens(4, D, seed=step), tokens(4, D, seed=9)
        local(x).backward(grad)
        client.backward(x, grad)
        optimizer.step()
        schedule.step()
        assert client.update("step") == step + 1
        assert expert.training is not None
        theirs, ours = expert.training.optimizer.param_groups[0], optimizer.param_groups[0]
        assert [theirs["lr"], *theirs["betas"]] == pytest.approx([ours["lr"], *ours["betas"]])
    assert_same_weights(expert, local)


def test_a_schedule_that_ends_changes_nothing_more_and_no_update_counts_twice() -> None:
    schedule = {"name": "OneCycleLR", "args": {"max_lr": 0.3, "total_steps": 3}}
    client = Client(hosted(sgd(schedule=schedule, args={"momentum": 0.5})))

    def weights() -> dict[str, Tensor]:
        return copy.deepcopy(client.expert.module.state_dict())

    for update in range(1, 5):
        client.update("zero_grad")
        client.backward(tokens(4, D), tokens(4, D, seed=9))
        assert client.update("step") == update
    after_the_last = weights()
    client.sequence -= 1
    assert client.update("step") == 4, "the step that was the last one, repeated"
    for _ in range(2):
        with pytest.raises(
            ExpertFailedError, match=r"ended with update 4 .ValueError: .* Nothing was changed"
        ):
            client.update("step")
    torch.testing.assert_close(weights(), after_the_last, rtol=0, atol=0)


def test_an_optimizer_that_cannot_step_is_told_as_the_experts_failure_and_is_no_update() -> None:
    def for_graphs_of_a_gpu(module: nn.Module) -> Training:
        return Training(torch.optim.Adam(module.parameters(), capturable=True))

    client = Client(hosted(for_graphs_of_a_gpu))
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    with pytest.raises(
        ExpertFailedError, match=r"expert 'e': expected its optimizer to step, got AssertionError"
    ):
        client.update("step")
    assert client.expert.num_updates == 0


@pytest.mark.parametrize("can_step", [True, False])
def test_an_update_leaves_no_gradients_in_the_module_also_one_that_fails(can_step: bool) -> None:
    client = Client(
        hosted(lambda module: Training(torch.optim.Adam(module.parameters(), capturable=not can_step)))
    )
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    with contextlib.nullcontext() if can_step else pytest.raises(ExpertFailedError):
        client.update("step")
    assert {parameter.grad for parameter in client.expert.module.parameters()} == {None}


@pytest.mark.parametrize("update", ["on_step", "on_samples", "on_backward"])
def test_a_backward_that_reaches_no_weight_is_no_update(update: UpdateMode) -> None:
    expert = hosted(sgd(), update, 1 if update == "on_samples" else None)
    expert.module.forward = lambda x: x * 2  # type: ignore[method-assign]
    client = Client(expert)
    torch.testing.assert_close(client.backward(tokens(2, D), torch.ones(2, D)), torch.full((2, D), 2.0))
    assert client.update("step") == 0


def restarted(expert: HostedExpert, config: Trained, folder: Path, *training: Any) -> HostedExpert:
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.write([take(expert)])
        newest = checkpoints.read_newest()
    assert newest is not None
    again = hosted(config, *training)
    restore(again, newest[1]["e"])
    return again


# ---- accumulation over samples


def test_over_n_samples_a_clients_backwards_gather_and_the_one_that_completes_them_updates() -> None:
    expert = hosted(sgd(), "on_samples", 10)
    local = copy.deepcopy(expert.module)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    client, seen = Client(expert), []
    for seed, rows in enumerate([4, 4, 4, 10, 3, 25, 9, 1]):
        x, grad = tokens(rows, D, seed=seed), tokens(rows, D, seed=9)
        leaf = x.clone().requires_grad_()
        local(leaf).backward(grad)
        torch.testing.assert_close(client.backward(x, grad), leaf.grad)
        seen.append(expert.num_updates)
        if [0, *seen][-2] < seen[-1]:
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0, 0, 1, 2, 2, 3, 3, 4], "at 12, 10, 28 and 10 rows"
    assert_same_weights(expert, local)


def test_over_samples_step_and_zero_grad_change_nothing_and_a_repeated_backward_counts_once() -> None:
    expert = hosted(sgd(), "on_samples", 4)
    before = copy.deepcopy(expert.module.state_dict())
    client = Client(expert)
    client.backward(tokens(2, D), tokens(2, D))
    client.sequence -= 1
    client.backward(tokens(2, D), tokens(2, D))
    assert (client.update("step"), client.update("zero_grad"), expert.num_updates) == (0, 0, 0)
    torch.testing.assert_close(expert.module.state_dict(), before, rtol=0, atol=0)
    client.backward(tokens(2, D), tokens(2, D))
    assert expert.num_updates == 1


def test_the_number_of_updates_is_the_same_in_whatever_order_clients_come() -> None:
    """Nine and one make ten for each client: with one sum for all, 9 9 1 1 would be one update and 9 1 9 1 two."""
    for order in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]):
        expert = hosted(sgd(), "on_samples", 10)
        clients = [Client(expert, bytes([n])) for n in range(2)]
        left = [[9, 1], [9, 1]]
        for which in order:
            rows = left[which].pop(0)
            clients[which].backward(tokens(rows, D), tokens(rows, D))
        assert expert.num_updates == 2, order


def test_samples_that_were_gathered_outlive_a_restart(tmp_path: Path) -> None:
    expert = hosted(sgd(), "on_samples", 10)
    local = copy.deepcopy(expert.module)
    client = Client(expert)
    client.backward(tokens(7, D), tokens(7, D, seed=1))
    client.expert = expert = restarted(expert, sgd(), tmp_path, "on_samples", 10)
    assert expert.num_updates == 0
    client.backward(tokens(3, D), tokens(3, D, seed=1))
    assert expert.num_updates == 1
    for rows in (7, 3):
        local(tokens(rows, D)).backward(tokens(rows, D, seed=1))
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    assert_same_weights(expert, local)


def test_a_gradient_that_is_not_finite_does_not_count_among_the_samples() -> None:
    expert = hosted(sgd(), "on_samples", 4)
    client = Client(expert)
    client.backward(tokens(2, D), tokens(2, D))
    for _ in range(2):
        with pytest.raises(InvalidCallError, match="expected finite values"):
            client.backward(tokens(2, D), torch.full((2, D), float("inf")))
    assert expert.num_updates == 0
    client.backward(tokens(2, D), tokens(2, D))
    assert expert.num_updates == 1


@pytest.mark.parametrize("update", ["on_step", "on_samples"])
def test_a_sum_of_gradients_that_overflows_is_refused_and_the_sum_before_it_stays(update: UpdateMode) -> None:
    expert = hosted(sgd(), update, 4 if update == "on_samples" else None)
    client = Client(expert)
    x, grad = torch.zeros(2, D), torch.full((2, D), 1e38)  # that of the last bias is 2e38
    client.backward(x, grad)
    with pytest.raises(InvalidCallError, match="gathered weight gradient"):
        client.backward(x, grad)
    client.backward(x, -grad)
    assert client.update("step") == 1


def test_an_expert_may_be_updated_otherwise_than_the_others() -> None:
    ffn = {"class": "ffn", "args": {"d_model": D}}
    settings = {
        "update": "on_samples",
        "samples_per_update": 64,
        "experts": {
            "a": ffn,
            "b": {**ffn, "samples_per_update": 8},
            "c": {**ffn, "update": "on_step"},
            "d": {**ffn, "eval_only": True},
        },
    }
    server = from_config(load_config(flags=settings, environment={}))
    trainings = {name: queue.hosted.training for name, queue in server.registry.items()}
    server.pool.close(10)
    assert {name: t and (t.update, t.samples_per_update) for name, t in trainings.items()} == {
        "a": ("on_samples", 64),
        "b": ("on_samples", 8),
        "c": ("on_step", 1),
        "d": None,
    }


def test_a_client_sees_that_its_steps_have_nothing_to_do() -> None:
    make = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    with (
        ExpertsServer(
            {"e": FeedForwardExpert(D)}, update="on_samples", samples_per_update=6, **make
        ) as server,
        WireClient(server.address) as client,
    ):
        assert client.info().experts[0].update == 2
        for call_id in range(4):
            client.forward("e", tokens(3, D), call_id=call_id)
            client.backward("e", tokens(3, D), call_id=call_id)
            client.step()
            client.zero_grad()
        assert client.num_updates() == {"e": 2}


@pytest.mark.parametrize(
    ("update", "samples"), [("on_samples", None), ("on_samples", 0), ("on_step", 3), ("never", None)]
)
def test_an_update_rule_that_cannot_be_is_refused(update: Any, samples: int | None) -> None:
    with pytest.raises(ConfigError, match="server: expected"):
        ExpertsServer({"e": FeedForwardExpert(D)}, update=update, samples_per_update=samples)


# ---- experts that are not trained


class Normalizing(nn.Module):
    """In training its result depends on all rows, and its buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


def test_an_eval_only_expert_evaluates_whatever_is_asked_and_nothing_of_it_changes() -> None:
    settings = {
        "experts": {"e": {"class": "tests.server.test_training:Normalizing", "eval_only": True}},
    }
    server = from_config(load_config(flags=settings, environment={}))
    expert = server.registry["e"].hosted
    before, client, x = copy.deepcopy(expert.module.state_dict()), Client(expert), tokens(5, D)
    expected = torch.autograd.grad(expert.module(leaf := x.clone().requires_grad_()), leaf, x)[0]
    torch.testing.assert_close(client.backward(x, x), expected)
    assert client.update("step") == 0
    assert not expert.module.training
    torch.testing.assert_close(expert.module.state_dict(), before, rtol=0, atol=0)
    server.pool.close(10)
