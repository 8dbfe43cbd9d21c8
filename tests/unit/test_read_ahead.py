"""Layers of offloaded experts that read ahead for their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from moe_autograd.autograd.parallel import parallel_apply
from tests.support.offloading import OPTIMIZERS
from tests.support.stores import WatchedStore, put_all_out

sgd = OPTIMIZERS["sgd"]


def call_by_map(experts: OffloadedExperts, x: Tensor, **options: Any) -> Tensor:
    return parallel_apply(list(experts), [(x,)], **options)[0]  # type: ignore[no-any-return]


def call_in_layer(experts: OffloadedExperts, x: Tensor, **options: Any) -> Tensor:
    return MixtureOfExperts(TopKRouter(8, 1, top_k=1), experts, **options)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("call", [call_by_map, call_in_layer])
def test_read_ahead_starts_with_the_backward_of_the_layer_above(
    call: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    """Layer 2's backward waits inside until layer 1's expert has been read, which it never would without."""
    store = WatchedStore()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda _: store.wait_for("read expert-00000.weights"))
            return y

    below = OffloadedExperts([nn.Linear(8, 8, bias=False)], sgd, max_resident_bytes=900, store=store)
    above = OffloadedExperts([Waiting()], sgd, beside=below)
    read_ahead(below, above)
    below.residency.flush()
    y = call(above, call(below, torch.ones(1, 8), **options), **options)
    put_all_out(below.residency)  # as more layers above would have done
    store.events.clear()
    y.sum().backward()
    assert store.events.count("read expert-00000.weights") == 1


@pytest.mark.parametrize("closed", [0, 1])
def test_a_layer_whose_neighbour_is_closed_goes_on(closed: int) -> None:
    layers = [OffloadedExperts([nn.Linear(8, 8)], sgd, max_resident_bytes=1000) for _ in range(2)]
    read_ahead(*layers)
    y = torch.ones(1, 8)
    for layer in layers:
        y = layer[0](y)
    y.sum().backward()
    layers[closed].close()
    other = layers[1 - closed]
    other[0](torch.ones(1, 8)).sum().backward()
    other.step()
    with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
        layers[closed][0](torch.ones(1, 8))


def test_a_layer_computes_though_the_one_above_is_closed() -> None:
    below, above = (
        OffloadedExperts([nn.Linear(8, 8)], sgd, max_resident_bytes=900, store=WatchedStore())
        for _ in range(2)
    )
    read_ahead(below, above)
    x = torch.ones(2, 8)
    above[0](below[0](x)).sum().backward()
    above.close()
    below[0](x).sum().backward()
    below.step()
    below.close()


def test_read_ahead_takes_no_list_and_no_layer_that_is_made_of_them() -> None:
    with OffloadedExperts([nn.Linear(2, 2)], sgd, max_resident_bytes=1000) as experts:
        layer = MixtureOfExperts(TopKRouter(2, 1, 1), list(experts))
        for others, got in (([experts, experts], "list"), (layer, "MixtureOfExperts")):
            with pytest.raises(
                TypeError, match=rf"read_ahead: expected OffloadedExperts, got {got} \(index=1\)"
            ):
                read_ahead(experts, others)  # type: ignore[arg-type]
        assert repr(layer)  # has not become a part of itself
