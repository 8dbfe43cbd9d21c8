"""Maps of calls that compute on a GPU and on the CPU, and that take and return tensors of any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import natively, one_after_another
from tests.support.devices import DEVICE, hold_up, needs_gpu
from tests.support.functions_held_up import (
    NUM_CALLS,
    WIDTH,
    assert_same_bits,
    grads_of,
    inputs,
    on_own_stream,
)

pytestmark = pytest.mark.gpu


class Moves(Function):
    """Computes where its input is, and returns it elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: str) -> Tensor:
        hold_up()
        ctx.save_for_backward(x * 1)
        return (x * x).to(to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        hold_up()
        return 2 * x * grad.to(x.device), None


@pytest.mark.parametrize("loss_on", ["cpu", DEVICE])
@pytest.mark.parametrize(
    "ways",
    [
        ["cpu cpu", f"{DEVICE} {DEVICE}", f"cpu {DEVICE}", f"{DEVICE} cpu"],
        [f"{DEVICE} cpu"] * 3,
        [f"cpu {DEVICE}"] * 3,
    ],
    ids=["mixed", "to_cpu", "to_device"],
)
def test_calls_on_the_cpu_and_on_the_device_give_the_bits_of_a_loop(loss_on: str, ways: list[str]) -> None:
    def program(apply: Any) -> list[Tensor]:
        pairs = [way.split() for way in ways]
        xs = [x.detach().to(at).requires_grad_() for x, (at, _) in zip(inputs(len(ways)), pairs, strict=True)]
        results = apply(Moves, *[(x * 3, to) for x, (_, to) in zip(xs, pairs, strict=True)])
        torch.stack([y.to(loss_on).sum() for y in results]).sum().backward()
        return [*[y.detach() for y in results], *grads_of(xs)]

    assert_same_bits(program(map_with_parallel_backward), program(natively))


@needs_gpu
def test_copies_to_pinned_memory_are_there_once_the_callers_stream_is() -> None:
    class Fetches(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, host: Tensor) -> None:
            hold_up()
            host.copy_(x * 2, non_blocking=True)

    xs = [x.detach() for x in inputs()]
    hosts = [torch.empty(WIDTH, WIDTH, pin_memory=True) for _ in xs]
    with on_own_stream():
        map_with_parallel_backward(Fetches, *zip(xs, hosts, strict=True))
        torch.cuda.current_stream().synchronize()
        for host, x in zip([host.clone() for host in hosts], xs, strict=True):
            torch.testing.assert_close(host, x.cpu() * 2, rtol=0, atol=0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:3]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged),
    "imaginary": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).imag,
    "negative": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "sum": lambda x: x.sum(),
}


def dense(x: Tensor) -> Tensor:
    if x.is_nested:
        return torch.cat([part.flatten() for part in x.unbind()])
    return x.to_dense() if x.layout is not torch.strided else x.clone()


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_inputs_of_any_layout_are_those_of_a_loop(layout: str) -> None:
    def again(x: Tensor) -> Tensor:
        hold_up()
        return x.clone()

    def convert(x: Tensor) -> Tensor:
        hold_up()
        return LAYOUTS[layout](x * 2)

    xs = [x.detach() for x in inputs()]

    def program(apply: Any) -> list[Tensor]:
        converted = apply([convert] * NUM_CALLS, [(x,) for x in xs])
        return [dense(y) for y in apply([again] * NUM_CALLS, [(y,) for y in converted])]

    assert_same_bits(program(parallel_apply), program(one_after_another))
