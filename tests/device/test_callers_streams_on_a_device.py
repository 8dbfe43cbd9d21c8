"""Maps on a GPU whose callers have streams and threads of their own, capture graphs, or map in a hook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_autograd import map_with_parallel_backward
from moe_autograd.errors import UnsupportedTransformError
from tests.support.comparison import natively
from tests.support.devices import DEVICE, hold_up, needs_gpu
from tests.support.functions_held_up import (
    PATIENCE_S,
    Slow,
    assert_same_bits,
    grads_of,
    inputs,
    on_own_stream,
    step,
)

pytestmark = pytest.mark.gpu


def in_threads(programs: list[Callable[[], Any]]) -> list[Any]:
    """Run them side by side; return what they returned."""
    returned: dict[int, Any] = {}

    def run(i: int) -> None:
        try:
            returned[i] = programs[i]()
        except BaseException as error:
            returned[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for error in returned.values():
        if isinstance(error, BaseException):
            raise error
    return [returned.get(i, "has not ended") for i in range(len(programs))]


def test_maps_of_several_threads_do_not_disturb_each_other() -> None:
    expected = step(natively, Slow)
    for got in in_threads([lambda: [step(map_with_parallel_backward, Slow) for _ in range(3)]] * 4):
        assert_same_bits(got, [expected] * 3)


def test_several_backwards_at_once_of_graphs_made_elsewhere() -> None:
    def made(apply: Any) -> tuple[list[Tensor], Tensor]:
        xs = inputs()
        return xs, torch.stack([y.sum() for y in apply(Slow, *[(x * 3,) for x in xs])]).sum()

    expected, loss = made(natively)
    loss.backward()
    with on_own_stream():
        graphs = [made(map_with_parallel_backward) for _ in range(4)]

    def backward(xs: list[Tensor], loss: Tensor) -> list[Tensor]:
        with on_own_stream():
            hold_up()
            loss.backward()
            return grads_of(xs)

    for got in in_threads([lambda xs=xs, loss=loss: backward(xs, loss) for xs, loss in graphs]):  # type: ignore[misc]
        assert_same_bits(got, grads_of(expected))


def test_results_used_and_differentiated_under_another_stream() -> None:
    xs, others = inputs(), inputs()
    results = map_with_parallel_backward(Slow, *[(x * 3,) for x in xs])
    with on_own_stream():
        loss = torch.stack([y * 2 for y in results]).sum()
    with on_own_stream():
        loss.backward()
        found = grads_of(xs)
    torch.stack([y * 2 for y in natively(Slow, *[(x * 3,) for x in others])]).sum().backward()
    assert_same_bits(found, grads_of(others))


@pytest.mark.parametrize("is_backward", [False, True])
@needs_gpu
def test_the_callers_stream_is_put_back_also_after_an_error(is_backward: bool) -> None:
    class Fails(Slow):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
            torch.cuda.set_stream(torch.cuda.Stream())
            if not is_backward:
                raise ValueError("on purpose")
            return Slow.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            torch.cuda.set_stream(torch.cuda.Stream())
            raise ValueError("on purpose")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        xs = inputs()
        with pytest.raises(ValueError, match="on purpose"):
            torch.stack(map_with_parallel_backward(Fails, *[(x,) for x in xs])).sum().backward()
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_bits(step(map_with_parallel_backward, Slow), step(natively, Slow))


@needs_gpu
def test_a_capture_is_refused_and_goes_on() -> None:
    graph, xs, total = torch.cuda.CUDAGraph(), inputs(), torch.zeros(8, device=DEVICE)
    with torch.cuda.graph(graph):
        total.add_(1)
        with pytest.raises(UnsupportedTransformError, match="graph capture"):
            map_with_parallel_backward(Slow, *[(x,) for x in xs])
        total.add_(1)
    for _ in range(3):
        graph.replay()
    assert_same_bits(total, torch.full((8,), 6.0, device=DEVICE))
    assert_same_bits(step(map_with_parallel_backward, Slow), step(natively, Slow))


def test_a_map_in_a_hook_of_a_backward_gives_the_bits_of_a_loop() -> None:
    def program(apply: Any) -> list[Tensor]:
        xs, weights = inputs(), inputs()

        def hook(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                torch.stack(apply(Slow, *[(w * 2,) for w in weights])).sum().backward()
            return grad + sum(grads_of(weights))

        middle = xs[0] * 3
        middle.register_hook(hook)
        torch.stack(apply(Slow, *[(x,) for x in (middle, *xs[1:])])).sum().backward()
        return grads_of([*xs, *weights])

    assert_same_bits(program(map_with_parallel_backward), program(natively))
