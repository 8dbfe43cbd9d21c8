"""Remote experts called from a GPU send what their caller's streams make, whoever sends it, and when.

What must not be read too early is made late, where memory is full of NaN before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.remote import HedgePolicy, RemoteExperts, connect
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, HAS_GPU, hold_up
from tests.support.servers import tokens
from tests.support.training_with_servers import ffns, served

pytestmark = pytest.mark.gpu

NUM_EXPERTS, WIDTH = 4, 16


def on_own_stream(
    calls: Callable[[Sequence[Tensor]], Sequence[Tensor]], num: int, *shape: int
) -> list[Tensor]:
    """Return results and gradients of calls whose inputs, and gradients, are made late on a stream of the caller's."""
    stream: Any = torch.cuda.Stream() if HAS_GPU else None
    with torch.cuda.stream(stream):
        used = [torch.full(shape, torch.nan, device=DEVICE) for _ in range(8 * num)]
        del used  # whoever reads too early finds these
        xs = [(tokens(*shape, seed=n).to(DEVICE) * 2).requires_grad_() for n in range(num)]
        hold_up()
        inner = [x * 3 for x in xs]
        outputs = calls(inner)
        losses = [y * y for y in outputs]
        hold_up()
        grads = torch.autograd.grad(losses, xs, [torch.ones_like(y) * 2 for y in outputs])
        found = [*outputs, *grads]
        return [tensor.detach().cpu() for tensor in found]


def expected_of(modules: dict[str, nn.Module], *shape: int) -> list[Tensor]:
    xs = [(tokens(*shape, seed=n) * 2).requires_grad_() for n in range(len(modules))]
    outputs = one_after_another(list(modules.values()), [(x * 3,) for x in xs])
    grads = torch.autograd.grad([y * y for y in outputs], xs, [torch.ones_like(y) * 2 for y in outputs])
    return [tensor.detach() for tensor in (*outputs, *grads)]


def together(experts: RemoteExperts) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    return lambda xs: parallel_apply(list(experts.values()), [(x,) for x in xs])


@pytest.mark.parametrize("compression", ["none", "float16"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_what_the_caller_makes_on_its_own_stream_is_sent_when_it_is_made(
    num_servers: int, compression: str
) -> None:
    modules = ffns()
    expected = expected_of(modules, 5, WIDTH)
    tolerance = 1e-4 if compression == "none" else 0.05
    with served(modules, num_servers, compression=compression) as experts:
        for _ in range(3):
            found = on_own_stream(together(experts), NUM_EXPERTS, 5, WIDTH)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_goes_in_later_messages_is_sent_when_it_is_made_as_well() -> None:
    modules = ffns(12, 64)
    expected = expected_of(modules, 2000, 64)  # half a message each
    with served(modules) as experts:
        found = on_own_stream(together(experts), 12, 2000, 64)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Waits(nn.Module):
    """The identity, which waits at a gate in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate.wait(60)
        return x * 2


def test_a_call_that_is_asked_of_a_second_server_sends_what_the_caller_made() -> None:
    replicas = [Waits(), Waits()]
    with (
        ExpertsServer({"e": replicas[0]}) as one,
        ExpertsServer({"e": replicas[1]}) as other,
        connect([one.address, other.address], timeout_s=20, hedge=HedgePolicy(first_after_s=0.05)) as experts,
    ):
        first, _ = experts.connection._finding.hosts_of("e")
        replicas[0 if first == other.address else 1].gate.set()
        found = on_own_stream(lambda xs: [experts["e"](x) for x in xs], 1, 5, WIDTH)
        for replica in replicas:
            replica.gate.set()
    x = tokens(5, WIDTH) * 2
    torch.testing.assert_close(found, [x * 6, 144 * x])


def test_a_map_of_experts_here_and_there_is_a_loop_over_them() -> None:
    modules = ffns()
    hosted = {name: modules[name] for name in ("ffn.0", "ffn.2")}
    expected = expected_of(modules, 5, WIDTH)
    with served(copy.deepcopy(hosted)) as experts:
        mixed = [experts[name] if name in hosted else module.to(DEVICE) for name, module in modules.items()]
        for _ in range(3):
            found = on_own_stream(lambda xs: parallel_apply(mixed, [(x,) for x in xs]), NUM_EXPERTS, 5, WIDTH)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_clients_on_threads_with_streams_of_their_own_get_their_own_numbers() -> None:
    modules = ffns()
    expected = expected_of(modules, 5, WIDTH)
    found: dict[int, list[Tensor]] = {}
    with served(modules, 2) as experts:

        def call(number: int) -> None:
            found[number] = on_own_stream(together(experts), NUM_EXPERTS, 5, WIDTH)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for number in range(3):
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-4)


def test_weights_that_are_made_late_are_set_when_they_are_made() -> None:
    stream: Any = torch.cuda.Stream() if HAS_GPU else None
    with served(ffns(), 3) as experts:
        before = experts.state_dict()
        with torch.cuda.stream(stream):
            weights = {key: value.to(DEVICE) for key, value in before.items()}
            hold_up()
            experts.load_state_dict({key: value * 2 for key, value in weights.items()})
        after = experts.state_dict()
    torch.testing.assert_close(after, {key: value * 2 for key, value in before.items()}, rtol=0, atol=0)
