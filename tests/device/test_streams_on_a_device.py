"""Maps of functions on a GPU, whose kernels are held up: what orders them between streams.

Programs run in a plain loop and through the map, and are to give the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from tests.support.comparison import natively
from tests.support.functions_held_up import (
    ChangesInPlace,
    ComputesOnTheCPU,
    GivesAZeroTensor,
    HasItsOwnStream,
    LeavesAnotherStreamCurrent,
    MapsInItsBackward,
    Nested,
    ReturnsAConjugate,
    ReturnsAView,
    ReturnsItsInput,
    Slow,
    Synchronizes,
    assert_same_bits,
    step,
)

pytestmark = pytest.mark.gpu

FUNCTIONS = [
    *(Slow, Synchronizes, HasItsOwnStream, LeavesAnotherStreamCurrent, Nested, MapsInItsBackward),
    *(ReturnsItsInput, ReturnsAView, ChangesInPlace, ComputesOnTheCPU, GivesAZeroTensor, ReturnsAConjugate),
]


@pytest.mark.parametrize("func", FUNCTIONS)
def test_calls_that_are_held_up_give_the_bits_of_a_loop(func: type[Function]) -> None:
    assert_same_bits(step(map_with_parallel_backward, func), step(natively, func))


@pytest.mark.parametrize("bound", [1, 2, None])
def test_more_calls_than_there_are_streams_give_the_bits_of_a_loop(bound: int | None) -> None:
    def bounded(func: type[Function], *args: Any) -> tuple[Any, ...]:
        return map_with_parallel_backward(func, *args, max_concurrency=bound)

    assert_same_bits(step(bounded, Slow, 40), step(natively, Slow, 40))
