"""How much work a call is: one that is not small, nor large, gets a thread, also if it does nothing but compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, einsum, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.made_in_turn import is_made_in_turn

pytestmark = pytest.mark.usefixtures("some_are_small")


def test_a_call_with_more_work_gets_a_thread() -> None:
    module = nn.Linear(64, 64, bias=False)
    most_rows = in_turn.most_small() // 64**2
    row = torch.randn(1, 64)
    assert is_made_in_turn(module, row.expand(most_rows, 64))
    assert not is_made_in_turn(module, row.expand(most_rows + 1, 64))
    assert not is_made_in_turn(nn.GELU(), torch.empty(1).expand(in_turn.most_small() + 1))


class WithABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1024, 1024))
        self.register_buffer("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class RowsWithRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def test_what_a_forward_that_is_read_may_multiply_with_is_work_too() -> None:
    most_rows, row = in_turn.most_small() // 1024**2, torch.zeros(1, 1024)
    assert is_made_in_turn(WithABuffer(), row.expand(most_rows, 1024))
    assert not is_made_in_turn(WithABuffer(), row.expand(most_rows + 1, 1024))  # nor is it known to be large
    row = torch.randn(1, 64)
    assert is_made_in_turn(RowsWithRows(), row.expand(64, 64))
    assert not is_made_in_turn(RowsWithRows(), row.expand(math.isqrt(in_turn.most_small() // 64) + 1, 64))


class ColumnsWithColumns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,nj->ij", x, x)


class ColumnsWithColumnsByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return einsum("ni,nj->ij", x, x)


class InALoop(nn.Module):
    def __init__(self, num_rounds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Tanh() for _ in range(num_rounds)])
        self.shared = nn.Linear(64, 64, bias=False)
        self.count = 3


class SharesALayer(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.again(x))
        return x

    def again(self, x: Tensor) -> Tensor:
        return self.shared(x)  # type: ignore[no-any-return]


class LoopsAlone(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for layer in self.layers:
            x = layer(x) + self.count
        return x


class RepeatsALayer(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(self.layers)):
            x = self.shared(x)
        return x


class RepeatsALayerSoOften(InALoop):
    def __init__(self, num_rounds: int) -> None:
        super().__init__(0)
        self.num_rounds = num_rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1, self.num_rounds):
            x = self.shared(x)
        return x


class TakesEachPart(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return x


class TakesAPartAgain(InALoop):
    def __init__(self, num_rounds: int) -> None:
        super().__init__(num_rounds)
        self.layers.append(self.shared)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = self.layers[-1](x)
        return x


class RowsWithRowsInALoop(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x @ x.mT @ x)
        return x


@pytest.mark.parametrize("kind", [ColumnsWithColumns, ColumnsWithColumnsByName])
def test_columns_with_columns_are_work_too(kind: Callable[[], nn.Module]) -> None:
    width = math.isqrt(in_turn.most_small())
    assert is_made_in_turn(kind(), torch.empty(1, 1).expand(1, width))
    for module in (kind(), nn.Sequential(kind(), LoopsAlone(0)), nn.Sequential(LoopsAlone(0), kind())):
        assert not is_made_in_turn(module, torch.empty(1, 1).expand(2, width))


def test_what_is_used_again_in_each_round_of_a_loop_is_so_much_work() -> None:
    most_rows, row, num_rounds = in_turn.most_small() // 64**2, torch.randn(1, 64), 8
    assert is_made_in_turn(LoopsAlone(num_rounds), row.expand(8, 64))
    for kind in (SharesALayer, RepeatsALayer, RepeatsALayerSoOften, TakesAPartAgain):
        assert is_made_in_turn(kind(num_rounds), row.expand(8, 64))
        assert not is_made_in_turn(kind(num_rounds), row.expand(most_rows // num_rounds + 1, 64))
    some_rows = row.expand(math.isqrt(in_turn.most_small() // (64 * (num_rounds + 1))), 64)
    assert is_made_in_turn(TakesEachPart(num_rounds), some_rows)  # as each part is another
    assert not is_made_in_turn(RepeatsALayer(num_rounds), some_rows)
    most_rows = math.isqrt(in_turn.most_small() // 64)
    assert is_made_in_turn(RowsWithRows(), row.expand(most_rows, 64))
    assert not is_made_in_turn(RowsWithRowsInALoop(num_rounds), row.expand(most_rows // 2, 64))


class WithMethods(InALoop):
    def repeat(self, x: Tensor) -> Tensor:
        for _ in range(len(self.layers)):
            x = self.shared(x)
        return x

    def columns(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,nj->ij", x, x)


def test_what_functions_and_methods_do_is_as_much_work() -> None:
    num_rounds, most_rows, row = 8, in_turn.most_small() // 1024**2, torch.zeros(1, 1024)
    block, no_rounds = WithMethods(num_rounds), WithMethods(0)
    block.shared = no_rounds.shared = nn.Linear(1024, 1024, bias=False)
    layers, shared = no_rounds.layers, no_rounds.shared

    def has_no_rounds(x: Tensor) -> Tensor:
        for layer in layers:
            x = shared(layer(x))
        return shared(x)  # type: ignore[no-any-return]

    for call in (block.repeat, lambda x: block.repeat(x)):
        assert is_made_in_turn(call, row[:0])
        assert not is_made_in_turn(call, row.expand(most_rows // num_rounds + 1, 1024))
    assert is_made_in_turn(has_no_rounds, row.expand(most_rows, 1024))
    assert not is_made_in_turn(has_no_rounds, row.expand(most_rows + 1, 1024))
    wide = torch.empty(1, 1).expand(2, math.isqrt(in_turn.most_small()))
    for call in (block.columns, lambda x: block.columns(x), functools.partial(torch.einsum, "ni->in")):
        assert is_made_in_turn(call, wide[:, :64])
        assert not is_made_in_turn(call, wide)


class AddsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y  # type: ignore[no-any-return]


class EachRowWithEach(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.mT


def test_rows_of_one_tensor_with_rows_of_another_are_work_too() -> None:
    def made_in_turn(*args: Tensor) -> bool:
        return is_made_in_turn(EachRowWithEach(), *args)

    row = torch.randn(1, 64)
    most_rows = math.isqrt(in_turn.most_small() // 64)
    assert made_in_turn(row.expand(most_rows // 2, 64), row.expand(most_rows // 2, 64))
    assert not made_in_turn(row.expand(most_rows, 64), row.expand(most_rows, 64))
    assert not made_in_turn(row, row.expand(in_turn.most_small() // 64 + 1, 64))


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x]


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_where_a_loop_keeps_no_other_core_busy_less_work_is_worth_a_thread(
    num_threads: Callable[[int], None],
) -> None:
    num_threads(1)
    alone = in_turn.most_small()
    num_threads(2)
    assert in_turn.most_small() > alone


def test_a_large_call_gets_no_thread_where_its_operators_keep_all_cores_busy(
    num_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", 64)
    monkeypatch.setattr(in_turn, "LEAST_LARGE", 1 << 14)
    monkeypatch.setattr(in_turn, "num_cores", lambda: 2)
    module, large = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    num_threads(2)
    assert is_made_in_turn(module, large)
    assert not is_made_in_turn(module, large[1:])
    assert is_made_in_turn(AddsRows(), large, large)
    # by how many rows the weights are multiplied is not known then
    assert not is_made_in_turn(AddsRows(), large, large[:1])
    assert not is_made_in_turn(LooksUp(), large.abs().long() % 64)  # nor how much of a table a forward takes
    num_threads(1)
    assert not is_made_in_turn(module, large)


def test_where_no_two_calls_can_compute_at_once_none_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", 64)
    modules, x = [nn.Linear(64, 64) for _ in range(2)], torch.randn(8, 64)

    def is_joined(modules: list[nn.Linear] = modules, **options: Any) -> bool:
        y, *_ = parallel_apply(modules, [x] * len(modules), **options)
        return "Join" in type(y.grad_fn).__name__

    assert is_joined()
    for options in ({"max_concurrency": 1}, {"modules": modules[:1]}):
        assert not is_joined(**options)
        # a worker computes while the backward waits upstream
        assert is_joined(**options, defer_weight_grads=True)
    monkeypatch.setattr(in_turn, "num_cores", lambda: 1)
    assert not is_joined()
