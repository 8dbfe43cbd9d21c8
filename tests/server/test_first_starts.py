"""A first start with a `checkpoint_dir` tries whether what it saves can be loaded, and all objects stay the same."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)

from experts_server import ExpertsServer
from experts_server.hosting.training import Training
from experts_server.serving.server import Hosting
from moe_autograd.errors import CheckpointError
from tests.server.test_assigned_weights import Assigning, Making
from tests.support.checkpointing import D
from tests.support.servers import WireClient, tokens

RESIDENT = {"memory": {"offload": True, "recompute": True}, "offload": {"max_resident_bytes": 1 << 20}}


class Noting(torch.optim.Adam):
    """Has been trained before; keeps lists beside its tensors, and a rate that is one."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=torch.tensor(0.1))
        self.notes: list[float] = []
        self.param_groups[0]["notes"] = [1.0]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        self.step()
        self.zero_grad()
        for state in self.state.values():
            state["notes"] = [[1.0], {"a": 1.0}]


class WritingInPlace(Noting):
    """Loads into what it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.notes.append(1.0)
        loaded = torch.optim.Adam([*self.param_groups[0]["params"]], lr=0.0)
        loaded.load_state_dict(state_dict)
        self.param_groups[0].update(loaded.param_groups[0], loads=1)
        for parameter, state in loaded.state.items():
            self.state[parameter].update(state)


class Closing(Noting):
    """Cannot be loaded, which it notices late."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise NotImplementedError("not yet")


class Around(torch.optim.Optimizer):
    """Has another one do its work."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.inner = Noting(parameters)
        super().__init__(self.inner.param_groups, {})
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


class Wrapped:
    """No optimizer of torch's, and around one."""

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.inner = Noting(parameters)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Halving:
    """A function with a state."""

    def __init__(self) -> None:
        self.seen = [0]

    def __call__(self, step: int) -> float:
        self.seen[0] = step
        return 0.5**step


def _by_function(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, Halving())


def _in_stages(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return MultiStepLR(optimizer, [2, 2, 5])


def _one_after_the_other(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer), ExponentialLR(optimizer, 0.5)], milestones=[2])


def _at_once(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer), ExponentialLR(optimizer, 0.5)], optimizer)


def objects_in(value: Any, path: str = "") -> dict[str, Any]:
    """Return all that somebody may hold, by where it is."""
    found = {path: value}
    if isinstance(value, torch.optim.Optimizer | LRScheduler | Halving | nn.Module):
        inner: Any = vars(value).items()
    elif isinstance(value, dict):
        inner = value.items()
    else:
        inner = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in inner:
        name = f"p{id(key)}" if isinstance(key, Tensor) else key
        if not isinstance(one, float | int | str | None) and name != "optimizer":
            found |= objects_in(one, f"{path}.{name}")
    return found


def serving(module: nn.Module, training: Training, folder: Path, **config: Any) -> ExpertsServer:
    server = ExpertsServer({"e": module}, config={"checkpoint_dir": str(folder), **config})
    server._experts["e"] = Hosting(module, training, server._config.memory)
    return server


def assert_same_objects(got: Any, before: dict[str, Any]) -> None:
    now = objects_in(got)
    assert now.keys() == before.keys()
    assert [path for path, one in before.items() if now[path] is not one] == []


@pytest.mark.parametrize("schedule", [_by_function, _in_stages, _one_after_the_other, _at_once])
@pytest.mark.parametrize("make", [Noting, WritingInPlace, Around])
def test_an_optimizer_and_its_schedule_have_the_same_objects_after_a_first_start(
    make: Callable[[Any], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
    tmp_path: Path,
) -> None:
    """They were copies: what somebody set in a group that he held had no effect."""
    module = nn.Linear(D, D)
    optimizer = make(list(module.parameters()))
    training = Training(optimizer, schedule=schedule(optimizer))
    held = [optimizer, training.schedule]
    before = objects_in(held)
    values = {path: one.clone() for path, one in before.items() if isinstance(one, Tensor)}
    with serving(module, training, tmp_path):
        assert_same_objects(held, before)
        for path, value in values.items():
            torch.testing.assert_close(before[path], value, rtol=0, atol=0)
        assert training.settings()[1].get("milestones") == training.built_with[1].get("milestones")


@pytest.mark.parametrize("make", [Noting, WritingInPlace])
def test_so_has_one_of_an_offloaded_expert_whose_tensors_of_state_come_and_go(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    module = nn.Linear(D, D)
    optimizer = make(list(module.parameters()))
    before = {path: one for path, one in objects_in(optimizer).items() if not isinstance(one, Tensor)}
    with serving(module, Training(optimizer), tmp_path, **RESIDENT):
        now = objects_in(optimizer)
        assert [path for path, one in before.items() if now[path] is not one] == []


@pytest.mark.parametrize("make", [Assigning, Making])
def test_a_module_has_the_same_objects_after_a_first_start(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Buffers and parts that a load puts in the place of others stayed there."""
    module = make()
    module.register_buffer("scale", torch.ones(D))
    before = objects_in(module)
    with ExpertsServer({"e": module}, config={"checkpoint_dir": str(tmp_path)}):
        assert_same_objects(module, before)


class Appending(list[Any]):
    """What is in it stays."""

    def __setitem__(self, *_: object) -> None:
        raise TypeError("only append")


class Settled(torch.optim.SGD):
    """Has what cannot be written to, copied or looked through by recursion."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.settings = immutable_dict(rates=immutable_list([0.1]))
        self.counts = collections.defaultdict(list, one=Appending([1]))
        self.deep: list[Any] = []
        for _ in range(3000):
            self.deep = [self.deep]


def test_an_optimizer_may_have_containers_that_cannot_be_written_to(tmp_path: Path) -> None:
    module = nn.Linear(D, D)
    optimizer = Settled(module.parameters())
    before = dict(vars(optimizer))
    with serving(module, Training(optimizer), tmp_path):
        assert all(vars(optimizer)[key] is value for key, value in before.items())


def test_an_optimizer_that_does_not_load_what_it_has_saved_is_as_before(tmp_path: Path) -> None:
    module = nn.Linear(D, D)
    training = Training(Closing(list(module.parameters())))
    before = objects_in(training.optimizer)
    with pytest.raises(CheckpointError, match="not yet"):
        serving(module, training, tmp_path).start()
    assert_same_objects(training.optimizer, before)


def test_so_has_one_within_a_wrapper_of_another_class(tmp_path: Path) -> None:
    module = nn.Linear(D, D)
    wrapped: Any = Wrapped(list(module.parameters()))
    before = objects_in(wrapped.inner)
    with serving(module, Training(wrapped), tmp_path):
        assert_same_objects(wrapped.inner, before)


class KeepingWhatItLoads(torch.optim.SGD):
    """Can be saved until it has been loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["loaded"] = object()


def test_what_cannot_be_saved_after_a_load_is_known_at_the_start(tmp_path: Path) -> None:
    """Each save was refused, the last one, too."""

    def server() -> ExpertsServer:
        module = nn.Linear(D, D)
        return serving(module, Training(KeepingWhatItLoads(module.parameters(), lr=0.1)), tmp_path)

    with server():
        pass
    with pytest.raises(CheckpointError, match="group 'loaded': expected a value that JSON gives back"):
        server().start()


def test_a_rate_that_is_set_in_a_group_from_before_the_first_start_counts(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = []

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        groups.extend(optimizer.param_groups)
        return optimizer

    module = nn.Linear(D, D)
    before = module.weight.detach().clone()
    config = {"checkpoint_dir": str(tmp_path)}
    with ExpertsServer({"e": module}, optimizer=make, config=config) as server:
        groups[0]["lr"] = 0.0
        with WireClient(server.address) as client:
            client.forward("e", tokens(5, D))
            client.backward("e", tokens(5, D, seed=1))
            client.step()
    torch.testing.assert_close(module.weight.detach(), before, rtol=0, atol=0)


def test_offloaded_experts_have_schedules_also_over_a_restart(tmp_path: Path) -> None:
    """They were refused: such a server did not start."""

    def rates(*configs: dict[str, Any]) -> list[float]:
        seen = []
        for config in configs:
            module = nn.Linear(D, D)
            optimizer = torch.optim.Adam(module.parameters(), lr=1.0)
            training = Training(optimizer, "on_backward", schedule=ExponentialLR(optimizer, 0.5))
            with serving(module, training, tmp_path / str(len(config)), **config) as server:
                with WireClient(server.address) as client:
                    client.sequence = 100 * len(seen)
                    client.forward("e", tokens(5, D))
                    client.backward("e", tokens(5, D, seed=1))
                seen.append(optimizer.param_groups[0]["lr"])
        return seen

    assert rates(RESIDENT, RESIDENT) == rates({}, {}) == [0.5, 0.25]
