"""Training over a restart: what optimizers and schedules keep comes back, or saving is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server.checkpoints.snapshot import restore, take
from experts_server.configuration.config import OptimizerConfig
from experts_server.hosting.building import build_training
from experts_server.hosting.calls import BackwardCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.training import Training
from moe_autograd.errors import CheckpointError, ExpertFailedError, GradientsLostError
from tests.server.test_training import Client, D, hosted, restarted, sgd
from tests.support.servers import tokens

OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # the last is for matrices only
)


class MasterWeights(torch.optim.Optimizer):
    """Steps copies of the weights that are rounded less, and keeps what is no number beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.001})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                master = parameter.detach().clone(memory_format=torch.preserve_format).float()
                state |= {
                    "master": master,
                    "signs": torch.zeros_like(parameter, dtype=torch.int8),
                    "note": "x",
                }
            state["signs"] += parameter.grad.sign().to(torch.int8)
            state["master"] -= 0.001 * parameter.grad.float() + 0.0001 * state["signs"]
            state["note"] += "x"
            parameter.copy_(state["master"])


def of_dtype(name: str, dtype: torch.dtype) -> Callable[[nn.Module], Training]:
    """Return what trains an expert whose weights have a dtype, and of master weights a layout of their own."""

    def make(module: nn.Module) -> Training:
        module.to(dtype)
        if name == "MasterWeights":
            weight = module.get_parameter("up.weight")
            weight.data = weight.data.t().contiguous().t()
            return Training(MasterWeights(module.parameters()))
        args = {"t0": 2, "lambd": 0.5} if name == "ASGD" else {}
        training = build_training("e", module, OptimizerConfig(name=name, lr=0.01, args=args), "on_step")
        assert training is not None
        return training

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "MasterWeights"])
def test_every_optimizer_goes_on_bit_by_bit_after_a_restart(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """State of another dtype than the weights', such as NAdam's `mu_product`, was rounded to theirs."""

    def trained(restarts: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        client = Client(expert := hosted(of_dtype(name, dtype)))
        for step in range(6):
            if restarts and step == 3:
                client.expert = restarted(expert, of_dtype(name, dtype), tmp_path)
            client.update("zero_grad")
            client.backward(tokens(4, D, seed=step).to(dtype), tokens(4, D, seed=9).to(dtype))
            client.update("step")
        assert client.expert.training is not None
        return client.expert.module.state_dict(), client.expert.training.optimizer.state_dict()

    (weights, optimizer), (expected, as_expected) = trained(restarts=True), trained(restarts=False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    for index, state in as_expected["state"].items():
        assert state.keys() == optimizer["state"][index].keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    optimizer["state"][index][key], value, rtol=0, atol=0, check_stride=True
                )
            else:
                assert optimizer["state"][index][key] == value


@pytest.mark.parametrize(
    ("name", "switched", "keys"),
    [
        ("adam", "amsgrad", ["max_exp_avg_sq"]),
        ("adamw", "amsgrad", ["max_exp_avg_sq"]),
        ("rmsprop", "centered", ["grad_avg"]),
        ("rmsprop", "momentum", ["momentum_buffer"]),
        ("sgd", "momentum", []),
        ("adagrad", "foreach", []),
        ("rprop", "maximize", []),
    ],
)
def test_what_is_switched_on_over_a_restart_begins_anew(
    name: str, switched: str, keys: list[str], tmp_path: Path
) -> None:
    """Settings are those that are configured then: `KeyError: 'max_exp_avg_sq'` was the answer to every step."""
    value = 0.5 if switched == "momentum" else True
    before = OptimizerConfig(name=name, lr=0.01)
    after = OptimizerConfig(name=name, lr=0.01, args={switched: value})
    client, local = Client(expert := hosted(before)), Client(hosted(before))

    def train(one: Client) -> None:
        for step in range(3):
            one.update("zero_grad")
            one.backward(tokens(4, D, seed=step), tokens(4, D, seed=9))
            one.update("step")

    train(client)
    train(local)
    client.expert = restarted(expert, after, tmp_path)
    assert local.expert.training is not None
    optimizer = local.expert.training.optimizer
    optimizer.param_groups[0][switched] = value
    if switched == "foreach":  # a choice: no more fused steps of torch's, which are rounded otherwise
        optimizer.param_groups[0]["fused"] = None
    for parameter, state in optimizer.state.items():
        state.update({key: torch.zeros_like(parameter) for key in keys})
    train(client)
    train(local)
    torch.testing.assert_close(
        client.expert.module.state_dict(), local.expert.module.state_dict(), rtol=0, atol=0
    )


def test_after_a_restart_rates_go_on_from_where_they_were_as_they_are_configured_then(tmp_path: Path) -> None:
    def config(gamma: float, momentum: float) -> OptimizerConfig:
        schedule = {"name": "StepLR", "args": {"step_size": 2, "gamma": gamma}}
        return sgd(args={"momentum": momentum}, schedule=schedule)

    client = Client(hosted(config(0.5, 0.1)))

    def rates(num_steps: int) -> list[float]:
        seen = []
        for _ in range(num_steps):
            client.backward(tokens(4, D), tokens(4, D, seed=9))
            client.update("step")
            seen.append(group()["lr"])
        return seen

    def group() -> dict[str, Any]:
        assert client.expert.training is not None
        return client.expert.training.optimizer.param_groups[0]

    assert rates(3) == pytest.approx([0.1, 0.05, 0.05])
    client.expert = restarted(client.expert, config(0.1, 0.2), tmp_path)
    assert group()["momentum"] == 0.2
    assert rates(2) == pytest.approx([0.005, 0.005])
    client.expert = restarted(client.expert, sgd(args={"momentum": 0.2}), tmp_path)
    assert rates(2) == [0.1, 0.1], "without a schedule, the rate is the one that is configured"


def test_a_schedule_of_another_class_begins_with_what_is_configured(tmp_path: Path) -> None:
    """It went on with the rates and betas that the one before had come to."""

    def config(name: str, **args: Any) -> OptimizerConfig:
        return OptimizerConfig(name="adam", lr=0.1, schedule={"name": name, "args": args})

    client = Client(hosted(config("OneCycleLR", max_lr=1.0, total_steps=9)))
    for _ in range(4):
        client.backward(tokens(4, D), tokens(4, D, seed=9))
        client.update("step")
    client.expert = restarted(client.expert, config("ExponentialLR", gamma=0.5), tmp_path)
    assert client.expert.training is not None
    (group,) = client.expert.training.optimizer.param_groups
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    client.update("step")
    assert group["lr"] == 0.05


def test_a_schedule_that_has_ended_is_over_after_a_restart_too_unless_it_is_longer_then(
    tmp_path: Path,
) -> None:
    """Each restart let one more update through."""

    def config(total_steps: int) -> OptimizerConfig:
        return sgd(schedule={"name": "OneCycleLR", "args": {"max_lr": 0.3, "total_steps": total_steps}})

    client = Client(hosted(config(3)))

    def train() -> float:
        client.update("zero_grad")
        client.backward(tokens(4, D), tokens(4, D, seed=9))
        client.update("step")
        assert client.expert.training is not None
        return float(client.expert.training.optimizer.param_groups[0]["lr"])

    for _ in range(4):
        train()
    ended = {key: weight.clone() for key, weight in client.expert.module.state_dict().items()}
    for _ in range(3):
        client.expert = restarted(client.expert, config(3), tmp_path)
        with pytest.raises(
            ExpertFailedError, match=r"ended with update 4 .ValueError: .* Nothing was changed"
        ):
            train()
    torch.testing.assert_close(client.expert.module.state_dict(), ended, rtol=0, atol=0)
    client.expert = restarted(client.expert, config(20), tmp_path)
    undisturbed = Client(hosted(config(20)))
    assert undisturbed.expert.training is not None
    schedule = undisturbed.expert.training.schedule
    assert schedule is not None
    rates = []
    for _ in range(9):
        undisturbed.expert.training.optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    assert [train() for _ in range(5)] == rates[4:]
    assert client.expert.num_updates == 9


@pytest.mark.parametrize("has_stepped", [True, False])
def test_gradients_gathered_for_steps_are_in_no_update_over_samples(
    has_stepped: bool, tmp_path: Path
) -> None:
    """They stay until `zero_grad`: those of the last step were applied once more after a switch to `on_samples`."""
    client = Client(hosted(sgd()))
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    if has_stepped:
        client.update("step")
    client.expert = restarted(client.expert, sgd(), tmp_path, "on_samples", 4)
    before = {key: weight.clone() for key, weight in client.expert.module.state_dict().items()}
    client.backward(tokens(3, D), tokens(3, D, seed=9))
    torch.testing.assert_close(client.expert.module.state_dict(), before, rtol=0, atol=0)
    assert client.expert.trainer is not None
    assert len(client.expert.trainer.gathered) == 1
    client.expert = restarted(client.expert, sgd(), tmp_path)
    with pytest.raises(GradientsLostError):
        client.update("step")
    client.update("step")
    torch.testing.assert_close(client.expert.module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("after", ["on_step", "on_backward"])
@pytest.mark.parametrize("before", ["on_step", "on_backward"])
def test_a_backward_that_comes_again_says_whether_its_first_copy_wanted_a_step(
    before: str, after: str, tmp_path: Path
) -> None:
    """The client counts it for its step otherwise, which then misses its gradients."""

    def backward(expert: HostedExpert) -> bool:
        grad, inputs = (tokens(3, D, seed=9),), (tokens(3, D),)
        call = BackwardCall(b"client", lambda *_: None, 1, 1, 0, grad, (True,), inputs=inputs)
        expert.backward(call)
        return call.wants_no_step

    expert = hosted(sgd(), before)
    assert [backward(expert) for _ in range(2)] == [before == "on_backward"] * 2
    expert = restarted(expert, sgd(), tmp_path, after)  # without the answer, which is computed anew
    assert [backward(expert) for _ in range(2)] == [before == "on_backward"] * 2


class Counting(torch.optim.SGD):
    """Keeps numbers in its groups and things in its state, as some do."""

    def __init__(self, parameters: Any, note: Any = None) -> None:
        super().__init__(parameters, lr=0.1)
        self.note = note

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["note"] = self.note


def test_what_an_optimizer_keeps_in_its_groups_outlives_a_restart(tmp_path: Path) -> None:
    def counting(module: nn.Module) -> Training:
        return Training(Counting(module.parameters()))

    client = Client(hosted(counting))
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    for num_steps in (1, 2):
        client.update("step")
        assert client.expert.training is not None
        assert client.expert.training.optimizer.param_groups[0]["num_steps"] == num_steps
        client.expert = restarted(client.expert, counting, tmp_path)


def test_optimizer_state_that_a_checkpoint_cannot_hold_is_refused_and_not_left_out() -> None:
    expert = hosted(lambda module: Training(Counting(module.parameters(), note={1: "one"})))
    client = Client(expert)
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    client.update("step")
    with pytest.raises(CheckpointError, match="state 'note': expected a tensor, or a value that JSON"):
        take(expert)


@pytest.mark.parametrize(
    ("down_s", "is_let_go"),
    [(0.0, False), (3500.0, False), (3595.0, True), (-1e9, False)],
    ids=["not down", "briefly", "for long", "the clock was set back"],
)
def test_gathered_gradients_grow_old_over_restarts(down_s: float, is_let_go: bool) -> None:
    """Those of clients that had left were in every checkpoint for ever: each restart made them new."""
    client = Client(before := hosted(sgd()))
    client.backward(tokens(4, D), tokens(4, D, seed=9))
    assert before.trainer is not None
    given_s = time.monotonic()
    before.trainer.gathered._clock = lambda: given_s + 10.0
    snapshot = take(before)
    snapshot.plain["taken_at_s"] -= down_s
    restore(after := hosted(sgd()), snapshot)
    assert after.trainer is not None
    assert after.trainer.gathered.max_age_s == 3600.0
    assert len(after.trainer.gathered.stale(is_crowded=False)) == is_let_go


def test_a_restart_knows_of_gathered_gradients_whether_they_were_applied(tmp_path: Path) -> None:
    """Those of trainings that have ended kept the next one out for a minute more."""
    one, other = (Client(expert := hosted(sgd()), b"one"), Client(expert, b"other"))
    for client in (one, other):
        client.backward(tokens(4, D), tokens(4, D, seed=9))
    one.update("step")
    for num_restarts in range(3):
        assert expert.trainer is not None
        assert expert.trainer.gathered.stale(is_crowded=True) == [b"one"], num_restarts
        expert = restarted(expert, sgd(), tmp_path)
