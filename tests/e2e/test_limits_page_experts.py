"""docs/limits.md on experts on servers and offloaded ones: what it says is what happens."""

from __future__ import annotations

import copy
import io
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import ExpertFailedError, InvalidCallError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import LR, sgd
from tests.support.limits_page import of
from tests.support.several_results import Where, expert_of


@pytest.fixture(scope="module")
def experts() -> Iterator[RemoteExperts]:
    with ExpertsServer({"e": nn.Linear(2, 2)}) as server, connect(server.address) as experts:
        yield experts


class Named(Tensor):
    """A subclass, as of who gives dimensions names."""


@of("where a dropout or batch norm evaluates for all once a client lets one evaluate")
def test_a_dropout_that_hosted_experts_share() -> None:
    shared, x = nn.Dropout(0.5), torch.ones(64, 2)
    hosted = {name: nn.Sequential(nn.Linear(2, 2), shared) for name in "ab"}
    with ExpertsServer(hosted) as server, connect(server.address) as experts:
        assert (experts["b"](x) == 0).any()
        experts["a"].eval()(x)
        assert not (experts["b"](x) == 0).any()


@of("**Inputs** are positional, dense tensors with finite values")
def test_remote_inputs(experts: RemoteExperts) -> None:
    with pytest.raises(InvalidCallError, match="expected finite values"):
        experts["e"](torch.full((1, 2), -torch.inf))
    with pytest.raises(TypeError, match="expected a dense tensor"):
        experts["e"](torch.ones(1, 2).to_sparse())
    with pytest.raises(TypeError, match="Only positional tensors travel"):
        experts["e"](input=torch.ones(1, 2))
    x = torch.ones(1, 2).as_subclass(Named)
    assert [type(nn.Linear(2, 2)(x)), type(experts["e"](x))] == [Named, Tensor]


@of("**An output without history** on its server (`return y, y.detach()`) requires grad here")
def test_remote_outputs_without_history() -> None:
    class Detaches(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach(), y.argmax(-1)

    with ExpertsServer({"e": Detaches(2, 2)}, optimizer=sgd) as server, connect(server.address) as experts:
        x = torch.ones(3, 2, requires_grad=True)
        _, detached, chosen = experts["e"](x)
        assert (detached.requires_grad, chosen.requires_grad) == (True, False)
        detached.sum().backward()
        assert x.grad is None
        RemoteOptimizer(experts).step()
        assert server.num_updates == {"e": 0}


@of("**A second derivative** raises")
def test_remote_second_derivatives(experts: RemoteExperts) -> None:
    x = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(experts["e"](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad.sum().backward()


class MovesOn(nn.Module):
    """Computes with another number in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.factor += 1
        return x * self.factor.clone()


@of("its backward is that of the first run, here that of the second. Buffers move on twice, as here")
@pytest.mark.parametrize(
    ("where", "use_reentrant", "expected"),
    [("here", False, 2.0), ("elsewhere", False, 1.0), ("here", True, 2.0), ("elsewhere", True, 2.0)],
)
def test_checkpoints_around_an_expert_that_moves_on(where: str, use_reentrant: bool, expected: float) -> None:
    module, x = MovesOn(), torch.ones(2, 1, requires_grad=True)
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        expert = module if where == "here" else experts["e"]
        checkpoint(expert, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [expected] * 2
    assert module.factor.item() == 2.0


@of("**`torch.save(model)`**, or any other pickling of remote experts, raises")
def test_remote_pickling(experts: RemoteExperts) -> None:
    model = nn.Sequential(experts["e"])
    with pytest.raises(TypeError, match=re.escape("`experts.state_dict()` has the weights")):
        torch.save(model, io.BytesIO())
    assert copy.deepcopy(model)[0].hosted.name == "e"
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@of("**Weights** are not in `layer.parameters()` or `layer.state_dict()`")
def test_offloaded_weights() -> None:
    modules = (nn.Linear(2, 2) for _ in range(2))
    with OffloadedExperts(modules, torch.optim.SGD, max_resident_bytes=1000) as experts:
        layer = MixtureOfExperts(TopKRouter(2, 2, top_k=1), list(experts))
        assert [name for name, _ in layer.named_parameters()] == list(layer.state_dict()) == ["router.weight"]


@of("**Parts** are not among `model.modules()`: **no error** where you walk these")
@of("`model.apply(function)` gets to them, or `experts[i].stands_for.modules()`")
@of("To set on `experts[i]` what its module has (`experts[i].scale = 2.0`) raises")
@of("**`model.half()`, `to()`** and their like raise where experts would get another dtype or device")
def test_offloaded_parts() -> None:
    def keep_all(part: nn.Module) -> None:
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    with OffloadedExperts((nn.Dropout(0.9) for _ in range(2)), max_resident_bytes=1000) as experts:
        model, x = nn.Sequential(*experts), torch.ones(100)
        for part in model.modules():
            keep_all(part)
        assert not torch.equal(model(x), x)
        with pytest.raises(AttributeError):
            experts[0].p = 0.0
        model.apply(keep_all)
        assert torch.equal(model(x), x)
        assert [part.p for expert in experts for part in expert.stands_for.modules()] == [0.0, 0.0]
    with OffloadedExperts([nn.Linear(2, 2)], max_resident_bytes=1000) as experts, pytest.raises(TypeError):
        nn.Sequential(*experts).half()


@of("**Results of one expert that is offloaded or elsewhere**, of which it computed some from others")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_results_of_one_offloaded_expert() -> None:
    class Features(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            features = super().forward(x)
            return features, features.sin()

    x = torch.ones(1, 2, requires_grad=True)
    with OffloadedExperts([Features(2, 2)], torch.optim.SGD, max_resident_bytes=1000) as experts:
        features, classes = experts[0](x)
        loss = features.sum() + classes.sum()
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            torch.autograd.grad(loss, features, retain_graph=True)
        features.register_hook(lambda grad: None)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            loss.backward(retain_graph=True)
        (from_outside,) = torch.autograd.grad(features.sum(), features, retain_graph=True)
        assert torch.equal(from_outside, torch.ones(1, 2))
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            loss.backward()
        assert x.grad is not None


@of("**`register_multi_grad_hook` on an input, within an expert that is offloaded or elsewhere**")
@of("`x = x.view_as(x)` before it, in the expert")
@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_hooks_on_inputs_of_an_expert_elsewhere(where: Where) -> None:
    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            register_multi_grad_hook([x], seen.extend)
            return super().forward(x)

    class WatchedView(Watched):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view_as(x))

    seen: list[Tensor | None] = []
    x = torch.ones(1, 2, requires_grad=True)
    with (
        expert_of(Watched(2, 2), where) as expert,
        pytest.raises(
            (RuntimeError, ExpertFailedError), match="A leaf node was passed to _will_engine_execute_node"
        ),
    ):
        expert(x).sum().backward()
    with expert_of(WatchedView(2, 2), where) as expert:
        expert(x).sum().backward()
    (grad,) = seen
    torch.testing.assert_close(grad, x.grad)


@of("One for the forward, and one for the backward")
def test_counters_around_offloaded_experts() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    with (
        expert_of(nn.Linear(2, 2), "offloaded") as expert,
        FlopCounterMode(display=False),
        pytest.raises(RuntimeError, match="A leaf node was passed to _will_engine_execute_node"),
    ):
        expert(x).sum().backward()
    with expert_of(nn.Linear(2, 2), "offloaded") as expert:
        with FlopCounterMode(display=False) as forward:
            loss = expert(x).sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert [forward.get_total_flops(), backward.get_total_flops()] == [24, 48]


@of(
    "**A hosted expert that calls another one**, on a server or offloaded, which is trained there, is refused"
)
@of("where a later one goes another way, or the hosted expert has no weights of its own")
def test_experts_within_hosted_ones() -> None:
    class Calls(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(inner[0](x) if x.sum() > 0 else x)

    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return inner[0](x)

    inner = OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=10**6, store="ram")
    before = inner.state_dict(0)["weight"].clone()
    with (
        ExpertsServer({"calls": Calls(2, 2), "bare": Bare()}, optimizer=sgd) as server,
        connect(server.address) as experts,
    ):
        with pytest.raises(ExpertFailedError, match="would get no gradient"):
            experts["calls"](torch.ones(1, 2))
        for sign in (-1, 1):
            experts["calls"](sign * torch.ones(1, 2)).sum().backward()
        experts["bare"](torch.ones(1, 2, requires_grad=True)).sum().backward()
        inner.step()
        assert torch.equal(inner.state_dict(0)["weight"], before)


@of("**A server that is further away than 0.8 s**, there and back: who is silent for 0.9 s counts as gone")
def test_servers_that_are_far_away() -> None:
    """The system says nothing to who connects where as many wait already as may."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as waiting:
        waiting.connect(full.getsockname())
        began_s = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="timed out"):
            connect(f"127.0.0.1:{full.getsockname()[1]}", timeout_s=120.0)
        assert time.monotonic() - began_s < 60.0


@of("a client that was connected before calls under a checkpoint, reentrant or not: both runs draw")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_hooks_that_draw_and_come_late(is_reentrant: bool) -> None:
    layer, x = nn.Linear(16, 16, bias=False), torch.ones(8, 16, requires_grad=True)
    nn.init.eye_(layer.weight)
    with ExpertsServer({"e": layer}) as server, connect(server.address) as before:
        layer.register_forward_hook(lambda _, __, y: torch.dropout(y, 0.5, True))
        with connect(server.address) as after:
            for experts in (before, after):
                y = checkpoint(lambda x, e: e(x).square(), x, experts["e"], use_reentrant=is_reentrant)
                x.grad = None
                y.sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad != 0, y != 0) == (experts is after)


@of(
    "Under autocast, such a client goes on rounding inputs to the dtype that the expert took before: **no error**"
)
def test_hooks_that_take_other_inputs_and_come_late() -> None:
    layer, x = nn.Linear(2, 2).bfloat16(), torch.full((1, 2), 1000.5)
    with ExpertsServer({"e": layer}) as server, connect(server.address) as experts:
        layer.register_forward_pre_hook(lambda _, inputs: ((inputs[0].float() - 1000).bfloat16(),))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(experts["e"](x), layer(torch.full((1, 2), 1000.0)))
            assert not torch.equal(experts["e"](x), layer(x))


def rates_of_a_hooks_schedule(folder: Path, num_steps: int, *, is_said: bool) -> list[float]:
    """Return the rates of so many steps of a server, started anew, whose optimizer's hook steps a schedule."""
    rates: list[float] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))

        def step(*_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()

        optimizer.register_step_post_hook(step)
        if is_said:
            optimizer.register_state_dict_post_hook(
                lambda _, said: {**said, "schedule": schedule.state_dict()}
            )
            optimizer.register_load_state_dict_pre_hook(
                lambda _, said: schedule.load_state_dict(said["schedule"])
            )
        return optimizer

    config = {"checkpoint_dir": folder}
    with (
        ExpertsServer({"e": nn.Linear(2, 2)}, optimizer=make, config=config) as server,
        connect(server.address) as experts,
    ):
        optimizer = RemoteOptimizer(experts)
        for _ in range(num_steps):
            experts["e"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rates


@of("**A schedule of yours that a hook of the optimizer steps**")
@pytest.mark.parametrize(("is_said", "then"), [(False, [4, 2, 3]), (True, [4, 5, 6])])
def test_schedules_that_hooks_step(tmp_path: Path, is_said: bool, then: list[int]) -> None:
    first, second = [rates_of_a_hooks_schedule(tmp_path, 3, is_said=is_said) for _ in range(2)]
    assert first == pytest.approx([LR, LR / 2, LR / 3])
    assert second == pytest.approx([LR / count for count in then])
