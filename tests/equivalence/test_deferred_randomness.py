"""Random numbers of gradients that are computed later: others for each backward, the same ones on every run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.test_deferred import InBackward, deferring
from tests.support.comparison import assert_same
from tests.support.functions_waiting import PATIENCE_S


class Drawing(nn.Module):
    """Multiplies by a weight; what the backward of that weight draws is in `drawn`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return x * InBackward.apply(self.weight, self.draw)  # type: ignore[no-any-return, no-untyped-call]

    def draw(self) -> None:
        self.drawn.append(float(torch.rand(())))


def drawn_in_backward(layers: Sequence[Sequence[Drawing]], upstream: Callable[[], object]) -> list[float]:
    """Go backward through layers, the first after what is upstream; return what they drew."""
    x = torch.ones((), requires_grad=True)
    h = InBackward.apply(x, upstream)  # type: ignore[no-untyped-call]
    for layer in layers:
        h = sum(deferring(layer, [(h,)] * len(layer)))
    h.backward()
    return [number for layer in layers for module in layer for number in module.drawn]


def layer_of(num_calls: int = 2) -> list[Drawing]:
    return [Drawing() for _ in range(num_calls)]


def nothing() -> None:
    return None


def test_layers_of_one_backward_draw_different_numbers_the_same_in_every_run() -> None:
    runs = []
    for _ in range(5):
        torch.manual_seed(0)
        runs.append(drawn_in_backward([layer_of() for _ in range(3)], nothing))
    assert len(set(runs[0])) == 6
    assert runs == runs[:1] * 5


def test_a_backward_draws_other_numbers_than_the_one_before() -> None:
    torch.manual_seed(0)
    drawn = [number for _ in range(3) for number in drawn_in_backward([layer_of()], nothing)]
    assert len(set(drawn)) == 6


def test_backwards_of_several_threads_draw_different_numbers() -> None:
    torch.manual_seed(0)
    all_have_deferred = threading.Barrier(4)
    drawn: list[float] = []

    def run() -> None:
        drawn.extend(drawn_in_backward([layer_of()], lambda: all_have_deferred.wait(PATIENCE_S)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == len(drawn) == 8


def test_a_backward_that_fails_leaves_the_numbers_of_the_next_as_they_were() -> None:
    def fail() -> None:
        raise ArithmeticError("no")

    torch.manual_seed(0)
    expected = drawn_in_backward([layer_of()], nothing)
    torch.manual_seed(0)
    with pytest.raises(ArithmeticError, match="no"):
        drawn_in_backward([layer_of()], fail)
    torch.manual_seed(0)
    assert drawn_in_backward([layer_of()], nothing) == expected


def test_the_callers_stream_goes_on_as_if_each_map_had_drawn_once_and_not_at_all_where_none_has() -> None:
    """What is upstream draws before: the gradients that come later are there at the end."""
    drawn: list[Tensor] = []
    torch.manual_seed(4)
    drawn_in_backward([layer_of(3)], lambda: drawn.append(torch.rand(())))
    drawn.append(torch.rand(()))
    torch.manual_seed(4)
    expected = [torch.rand(())]
    torch.empty((), dtype=torch.int64).random_()
    assert_same(drawn, [*expected, torch.rand(())])

    x, linear = torch.ones(2, requires_grad=True), nn.Linear(2, 2)
    torch.manual_seed(4)
    sum(deferring([linear] * 2, [(x,)] * 2)).sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.equal(state, torch.get_rng_state())
