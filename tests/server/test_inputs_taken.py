"""What a server is certain that an expert takes: only what no code of somebody's own has a say in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.spec import InputSpec, infer_spec
from moe_autograd import FeedForwardExpert, SwiGLUExpert
from moe_autograd.errors import InvalidCallError
from moe_autograd.remote import connect

D = 4


class OneHot(nn.Sequential):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(nn.functional.one_hot(ids, D).float())


class Flat(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1))


class Batched(FeedForwardExpert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().flatten(0, -2)).unflatten(0, x.shape[:-1])


class Gated(SwiGLUExpert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def hooked() -> nn.Module:
    layer = nn.Linear(D, D)
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(D, D)
    forward = layer.forward
    layer.forward = lambda x: forward(x.float())  # type: ignore[method-assign]
    return layer


def expert_with_a_hooked_layer() -> nn.Module:
    expert = FeedForwardExpert(D)
    expert.up = hooked()
    expert.down = nn.Linear(D, D)
    return expert


ROWS = torch.randn(3, D, generator=torch.Generator().manual_seed(0))
TAKEN: dict[str, tuple[nn.Module, Tensor]] = {
    "sequential": (OneHot(nn.Linear(D, D)), torch.tensor([1, 3])),
    "flat": (Flat(nn.Linear(D, D), nn.ReLU()), ROWS.reshape(3, 2, 2)),
    "ffn": (Batched(D), ROWS[None].double()),
    "swiglu": (Gated(D, D), ROWS.double()),
    "hook": (hooked(), ROWS.double()),
    "hook-within": (nn.Sequential(nn.Sequential(hooked())), ROWS.double()),
    "hook-in-ffn": (expert_with_a_hooked_layer(), ROWS.double()),
    "instance": (patched(), ROWS.double()),
    "vector": (nn.Linear(D, D), ROWS[0]),
    "vector-in-sequence": (nn.Sequential(nn.Linear(D, D), nn.ReLU()), ROWS[0]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_module_takes_here_it_takes_on_a_server(name: str) -> None:
    module, x = TAKEN[name]
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["e"](x), module(x))


def _cast(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return nn.functional.pad(inputs[0].float(), (0, D - inputs[0].shape[-1]))


def _hook_on(module: nn.Module) -> None:
    module.register_forward_pre_hook(_cast)


def _hook_within(module: nn.Module) -> None:
    next(part for part in module.modules() if type(part) is nn.Linear).register_forward_pre_hook(_cast)


def _forward_put_into(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: forward(_cast(module, (x,)))  # type: ignore[method-assign]


LATE = [_hook_on, _hook_within, _forward_put_into]
MADE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "sequential": lambda: nn.Sequential(nn.Sequential(nn.Linear(D, D))),
    "ffn": lambda: FeedForwardExpert(D),
}


@pytest.mark.parametrize("put_on", LATE)
@pytest.mark.parametrize("name", MADE)
def test_what_a_module_takes_since_it_is_hosted_it_takes_on_a_server(
    name: str, put_on: Callable[[nn.Module], None]
) -> None:
    module = MADE[name]()
    with ExpertsServer({"e": module}) as server, connect(server.address) as before:
        before["e"](ROWS)
        with pytest.raises(InvalidCallError, match=r"expected shape \(.*, 4\), got \(3, 3\)"):
            before["e"](ROWS[:, 1:])
        put_on(module)
        with connect(server.address) as after:
            for experts in (before, after):
                for x in (ROWS[:, 1:], ROWS.double(), torch.tensor([[1, 3]])):
                    torch.testing.assert_close(experts["e"](x), module(x))


def test_declared_inputs_stay_what_is_taken() -> None:
    module = nn.Linear(D, D)
    module.input_spec = InputSpec(torch.float32, D, is_certain=True)  # type: ignore[assignment]
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        _hook_on(module)
        with pytest.raises(InvalidCallError, match=r"expected shape \(.*, 4\), got \(3, 3\)"):
            experts["e"](ROWS[:, 1:])


def test_a_vector_has_gradients_as_here() -> None:
    layer = nn.Linear(D, D)
    own = copy.deepcopy(layer)
    here, there = (ROWS[0].clone().requires_grad_() for _ in range(2))
    with (
        ExpertsServer(
            {"e": layer}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), update="on_backward"
        ) as server,
        connect(server.address) as experts,
    ):
        experts["e"](there).pow(2).sum().backward()
    own(here).pow(2).sum().backward()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    torch.testing.assert_close(there.grad, here.grad)
    torch.testing.assert_close(dict(layer.state_dict()), dict(own.state_dict()))


class Centered(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return super().forward((x.float() - 1000).bfloat16())


def centering() -> nn.Module:
    layer = nn.Linear(D, D).bfloat16()
    layer.register_forward_pre_hook(lambda _, inputs: ((inputs[0].float() - 1000).bfloat16(),))
    return layer


@pytest.mark.parametrize(
    "module", [Centered(nn.Linear(D, D).bfloat16()), centering()], ids=["forward", "hook"]
)
def test_autocast_rounds_no_input_that_code_of_ones_own_takes(module: nn.Module) -> None:
    x = 1000 + ROWS
    with (
        ExpertsServer({"e": module}) as server,
        connect(server.address) as experts,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        torch.testing.assert_close(experts["e"](x), module(x))


def test_autocast_rounds_no_input_that_a_hook_takes_which_came_before_the_client() -> None:
    module, x = nn.Linear(D, D).bfloat16(), 1000 + ROWS
    with ExpertsServer({"e": module}) as server:
        module.register_forward_pre_hook(lambda _, inputs: ((inputs[0].float() - 1000).bfloat16(),))
        with connect(server.address) as experts, torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(experts["e"](x), module(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(D, D),
        nn.Sequential(nn.Sequential(nn.Linear(D, D))),
        FeedForwardExpert(D),
        SwiGLUExpert(D, D),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_all_torchs_and_ours_is_certain(module: nn.Module) -> None:
    spec = infer_spec(module)
    assert (spec.is_certain, spec.width, spec.dtype) == (True, D, torch.float32)
