"""One offloaded expert that several threads call while it replaces its buffer, as `mean = 0.9 * mean + ...` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.functions_waiting import PATIENCE_S
from tests.support.offloading import OPTIMIZERS
from tests.support.stores import put_all_out


class Doubling(nn.Module):
    """Multiplies by a buffer, and puts one of twice its values in its place. Calls do `between` in between."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))
        self.between: Callable[[], object] = list
        self.of_size = 8

    def forward(self, x: Tensor) -> Tensor:
        scale, of_size = self.scale[:], self.of_size
        self.between()
        y = x * scale * self.weight
        self.scale = 2 * scale if of_size == 8 else torch.ones(of_size)
        return y


class Meanwhile:
    """Calls an expert on another thread, and returns to this one as soon as that call has got the buffer.

    Args:
        module: the expert's, called nowhere else then.
        expert: it.
    """

    def __init__(self, module: Doubling, expert: nn.Module) -> None:
        self._module, self._expert = module, expert
        self._may_go_on = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Meanwhile:
        has_begun = threading.Event()

        def between() -> None:
            has_begun.set()
            assert self._may_go_on.wait(PATIENCE_S)

        self._module.between = between
        self._result = self._thread.submit(self._call)
        assert has_begun.wait(PATIENCE_S)
        self._module.between = list
        return self

    def _call(self) -> tuple[Tensor, Tensor]:
        x = torch.ones(8, requires_grad=True)
        y = self._expert(x)
        return y, x

    def finish(self) -> tuple[Tensor, Tensor]:
        """Let the call go on; return its result and its input."""
        self._may_go_on.set()
        return self._result.result(PATIENCE_S)

    def __exit__(self, *exc_info: object) -> None:
        self._may_go_on.set()
        self._thread.shutdown()


@pytest.fixture
def module() -> Doubling:
    return Doubling()


@pytest.fixture
def experts(module: Doubling) -> Iterator[OffloadedExperts]:
    experts = OffloadedExperts([module], OPTIMIZERS["sgd"], max_resident_bytes=1000)
    yield experts
    experts.close()


def gradient(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x)[0]


def test_a_call_computes_with_the_buffer_it_got_though_others_replace_it_twice(
    module: Doubling, experts: OffloadedExperts
) -> None:
    """As plain modules do. It had computed with another one, or differentiated by that."""
    inputs = [torch.ones(8, requires_grad=True) for _ in range(3)]
    with Meanwhile(module, experts[0]) as other:
        ys = [experts[0](x) for x in inputs[:2]]
        assert gradient(ys[0], inputs[0]).eq(1).all(), "while the other runs"
        y, x = other.finish()
    assert y.eq(1).all()
    assert gradient(y, x).eq(1).all()
    assert ys[1].eq(2).all()
    assert gradient(ys[1], inputs[1]).eq(2).all()
    # who came last has set it to 2
    assert experts[0](inputs[2]).eq(2).all()


def test_what_the_last_call_has_put_there_stays_when_the_expert_has_left_memory(
    module: Doubling, experts: OffloadedExperts
) -> None:
    with Meanwhile(module, experts[0]) as other, torch.no_grad():
        for _ in range(3):
            experts[0](torch.ones(8))
        assert experts.state_dict(0)["scale"].eq(8).all(), "while the other runs"
        other.finish()
        experts[0](torch.ones(8))
        put_all_out(experts.residency)
        assert module.weight.isnan().all(), "it has left"
        assert experts.state_dict(0)["scale"].eq(4).all()


def test_a_backward_reads_the_buffer_of_its_call_though_another_call_replaces_it_meanwhile(
    module: Doubling, experts: OffloadedExperts
) -> None:
    class Replacing(torch.autograd.Function):
        """Calls the expert in its backward, on another thread."""

        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: experts[0](torch.ones(8))).result(PATIENCE_S)
            return grad

    module.register_forward_hook(lambda module, args, y: Replacing.apply(y))
    x = torch.ones(8, requires_grad=True)
    assert gradient(experts[0](x), x).eq(1).all()


def test_who_leaves_another_size_is_told_though_others_still_run(
    module: Doubling, experts: OffloadedExperts
) -> None:
    with Meanwhile(module, experts[0]) as other:
        module.of_size = 9
        with pytest.raises(RuntimeError, match=r"expected a call to leave scale of shape \(8,\)"):
            experts[0](torch.ones(8))
        module.of_size = 8
        y, x = other.finish()
    assert gradient(y, x).eq(1).all()
    assert experts[0](x).eq(2).all()


def test_a_checkpoint_is_refused_while_what_calls_have_put_in_the_place_of_a_buffer_waits(
    tmp_path: Path,
) -> None:
    module = Doubling()
    with OffloadedExperts([module], max_resident_bytes=1000, store=tmp_path) as experts:
        with Meanwhile(module, experts[0]):
            saved = experts.checkpoint()  # nothing waits
            experts[0](torch.ones(8))
            with pytest.raises(RuntimeError, match=r"expert-00000: expected checkpoint.* got one that runs"):
                experts.checkpoint()
            assert saved.exists()
        experts.checkpoint()
        before = experts.state_dict(0)
        experts[0](torch.ones(8))
        experts.restore()
        torch.testing.assert_close(experts.state_dict(0), before)
        assert before["scale"].eq(2).all()
