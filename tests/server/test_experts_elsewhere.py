"""Experts whose tensors are on a device, as far as that can be held without one; `tests/device` has the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from experts_server import ExpertsServer
from experts_server.hosting.gradients import are_surely_finite
from experts_server.hosting.randomness import RandomStream
from moe_autograd import _streams
from moe_autograd.remote import connect
from tests.support.hosting import Changes, sgd
from tests.support.servers import tokens
from tests.support.streams import RecordingAccelerator, Stream

D = 8
ELSEWHERE = torch.device("cpu", 0)  # another device than "cpu", to all that asks


# ---- inputs


@pytest.mark.parametrize("memory", [{}, {"recompute": True}, {"split_backward": True}], ids=str)
def test_inputs_that_were_there_already_are_not_changed_in_place(memory: dict[str, Any]) -> None:
    module = Changes(D)
    twin = copy.deepcopy(module)
    server = ExpertsServer({"e": module}, optimizer=sgd, config={"memory": memory})
    with server, connect(server.address, timeout_s=20) as experts:
        assert server._server is not None
        server._server.registry[
            "e"
        ].hosted.caller.is_on_cpu = False  # so that inputs are brought where they are
        for seed in range(3):
            x = tokens(4, D, seed=seed).requires_grad_()
            y = experts["e"](x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            own = x.detach().clone().requires_grad_()
            expected = twin(own * 1)
            (expected_grad,) = torch.autograd.grad(expected.square().sum(), own)
            torch.testing.assert_close([y, grad], [expected, expected_grad], rtol=1e-4, atol=1e-5)


# ---- turns


class LeavesStreams(Function):
    """Leaves another stream current in each pass, and notes where its passes are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Leaves) -> Tensor:
        ctx.module = module
        module.leave()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.module.leave()
        return grad * 2, None


class Leaves(nn.Module):
    def __init__(self, accelerator: RecordingAccelerator) -> None:
        super().__init__()
        self.found: list[tuple[bool, list[Stream], int]] = []
        self._accelerator = accelerator

    def leave(self) -> None:
        accelerator = self._accelerator
        current = [accelerator.current_stream(device) for device in accelerator.devices()]
        self.found.append((torch._C._is_multithreading_enabled(), current, accelerator.current_device()))
        accelerator.set_stream(accelerator.lane(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = LeavesStreams.apply(x, self)  # type: ignore[no-untyped-call]
        return result


def test_backwards_stay_on_the_thread_of_their_turn_and_streams_that_are_left_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = RecordingAccelerator(2)
    monkeypatch.setattr(_streams, "_built_for", accelerator)
    module = Leaves(accelerator)
    server = ExpertsServer({"e": module})
    with server, connect(server.address, timeout_s=20) as experts:
        for _ in range(2):
            x = tokens(4, D).requires_grad_()
            experts["e"](x).sum().backward()
    assert module.found == [(False, accelerator.defaults, 0)] * 4


def test_without_a_device_turns_are_as_they_are() -> None:
    found: list[bool] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(torch._C._is_multithreading_enabled())
            return x * 2

    server = ExpertsServer({"e": Asks()})
    with server, connect(server.address, timeout_s=20) as experts:
        experts["e"](tokens(4, D))
    assert found == [not torch.cuda.is_initialized()]


# ---- random numbers


def stream_elsewhere(name: str = "elsewhere") -> RandomStream:
    module = nn.Dropout()
    module.register_buffer("scale", torch.ones(1))
    stream = RandomStream(name, module)
    stream._devices.append(ELSEWHERE)
    return stream


def draw(stream: RandomStream, device: torch.device) -> Tensor:
    with stream.drawing():
        return torch.rand(8, device=device)


def test_what_is_drawn_on_a_device_of_the_module_is_seen_and_put_back() -> None:
    stream = stream_elsewhere()
    state = stream.state()
    assert not stream.has_moved_from(state)
    drawn = draw(stream, ELSEWHERE)
    assert stream.has_moved_from(state)
    stream.set_state(state)
    assert not stream.has_moved_from(state)
    torch.testing.assert_close(draw(stream, ELSEWHERE), drawn, rtol=0, atol=0)


def test_a_saved_stream_goes_on_on_every_device_that_was_saved() -> None:
    stream, other, on_cpu = stream_elsewhere(), stream_elsewhere("other"), RandomStream("e", nn.Dropout())
    draw(stream, ELSEWHERE)
    state = stream.state()
    other.set_state(state)
    on_cpu.set_state(state)
    for device in (ELSEWHERE, torch.device("cpu")):
        torch.testing.assert_close(draw(stream, device), draw(other, device), rtol=0, atol=0)
    other.set_state(state)
    torch.testing.assert_close(draw(on_cpu, torch.device("cpu")), draw(other, torch.device("cpu")))


def test_what_was_saved_on_the_cpu_alone_is_gone_on_with_there() -> None:
    on_cpu, stream = RandomStream("e", nn.Dropout()), stream_elsewhere()
    stream.set_state(on_cpu.state())
    torch.testing.assert_close(draw(stream, torch.device("cpu")), draw(on_cpu, torch.device("cpu")))
    assert draw(stream, ELSEWHERE).shape == (8,)


# ---- gradients


def test_sums_prove_that_gradients_of_several_dtypes_are_finite() -> None:
    good = [
        torch.ones(3),
        None,
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).half(),
        torch.arange(3),
        torch.empty(0),
    ]
    assert are_surely_finite(good)
    for bad in (float("nan"), -float("inf"), complex(0, float("nan"))):
        assert not are_surely_finite([*good, torch.tensor([1, bad])])
    assert not are_surely_finite([torch.full((4,), 6e4).half()]), "its sum is not: nothing is proved"
