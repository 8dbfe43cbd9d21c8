"""Dropout by torch's own operator for it, which nested tensors meet: as much goes as in plain PyTorch, of each call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.75])
def test_nested_tensors_are_dropped_out(layout: torch.layout, p: float) -> None:
    x = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(5, 64)], layout=layout)
    first, second = parallel_apply([nn.Dropout(p)] * 2, [(x,)] * 2)
    values = [first.values(), second.values()]
    for own in values:
        assert own.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
        assert (own == 0).double().mean().item() == pytest.approx(p, abs=0.08)
    assert not values[0].equal(values[1])


@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_dropout_that_returns_its_mask_drops_as_many_as_it_is_told_to(p: float, train: bool | None) -> None:
    def drop(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]

    x = torch.randn(4096)
    plain = drop(x)
    for y, mask in parallel_apply([drop] * 2, [(x,)] * 2):
        assert (y.dtype, mask.dtype) == (plain[0].dtype, plain[1].dtype)
        share, share_of_plain = mask.double().mean().item(), plain[1].double().mean().item()
        assert share == pytest.approx(share_of_plain, abs=0.05)
        torch.testing.assert_close(y, x * mask / (1 - p) if train is not False and p < 1 else x * mask)


def test_gradients_of_a_nested_tensor_are_those_that_dropout_leaves() -> None:
    parts = [torch.ones(3, 64), torch.ones(5, 64)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (y,) = parallel_apply([nn.Dropout(0.5)], [(x,)])
    y.values().sum().backward()
    assert x.grad is not None
    assert x.grad.values().equal(y.values())
