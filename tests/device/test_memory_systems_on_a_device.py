"""What saves memory, on a device: recompute, and backwards in two parts. Experts that come and go: see `test_offload_`.

Each is compared with the same training without it. Kernels are held up, so that what does not wait for them shows in
the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_autograd import parallel_apply
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.split_backward import split_backward
from tests.support.devices import DEVICE, HAS_GPU, hold_up
from tests.support.late_training import Expert, a_batch, adam, late, modules_of, side_stream, train_plain

pytestmark = pytest.mark.gpu


class Noisy(Expert):
    """Draws on the device and on the CPU, within a checkpoint and a map of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * torch.rand_like(x)
        y = y * torch.rand(len(x), 1, dtype=torch.float64).to(x.device)
        inner: Tensor = checkpoint(super().forward, y, use_reentrant=False)
        halves = parallel_apply([super().forward] * 2, [(half,) for half in inner.chunk(2)])
        return torch.cat(halves) + y


def keep_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = Recompute(context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products))
MODES: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "recomputed to the end": {"recompute": Recompute(early_stop=False)},
    "deferred": {"defer_weight_grads": True},
    "both": {"recompute": True, "defer_weight_grads": True},
}


# It comes once, on a thread new to CUDA.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no")
@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training_draws_and_computes_what_it_does_when_all_is_kept(mode: str, on_side_stream: bool) -> None:
    layers = [modules_of(Noisy), modules_of(functools.partial(Expert, 0.3))]
    kept = train_plain(layers, adam, parallel_apply)
    with side_stream(on_side_stream):
        got = train_plain(layers, adam, functools.partial(parallel_apply, **MODES[mode]))
    torch.testing.assert_close(got, kept)


def test_a_selective_recomputation_meets_the_same_dropout() -> None:
    layers = [modules_of(functools.partial(Expert, 0.3))]
    kept = train_plain(layers, adam, parallel_apply)
    got = train_plain(layers, adam, functools.partial(parallel_apply, recompute=SELECTIVE))
    torch.testing.assert_close(got, kept)


class Attention(nn.Module):
    """Linear in the values."""

    def forward(self, v: Tensor) -> Tensor:
        q = torch.linspace(-1, 1, v.numel(), device=v.device).view(v.shape)
        return F.scaled_dot_product_attention(q, q.flip(-1), late(v), dropout_p=0.5)


class Layers(nn.Module):
    """Without biases, twice the input gives twice the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.RNN(16, 16, 3, nonlinearity="relu", bias=False, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(late(x).flatten(0, 1))[0]
        return y


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("make", [Attention, Layers])
def test_a_backward_meets_the_dropout_of_its_forward_in_fused_kernels(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """By Euler: of a result in proportion to the input, input times gradient is the result."""
    modules, generator = modules_of(make, 8), torch.Generator().manual_seed(4)
    xs = [torch.randn(2, 4, 8, 16, generator=generator).to(DEVICE).requires_grad_() for _ in modules]
    ys = parallel_apply(modules, [(x,) for x in xs], **options)
    weights = [torch.randn(y.shape, generator=generator).to(DEVICE) for y in ys]
    grads = torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), xs)
    found = [(x.detach() * grad).sum() for x, grad in zip(xs, grads, strict=True)]
    expected = [(y.detach() * w).sum() for y, w in zip(ys, weights, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.1)  # cuDNN may use TF32


# It comes once, on a thread new to CUDA.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no")
@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_weight_gradients_of_a_second_part_are_those_of_one_backward(
    elsewhere: bool, on_side_stream: bool
) -> None:
    """Also where the second part is run by another thread, and behind kernels that are late."""
    net = nn.Sequential(*modules_of(Expert, 2))
    x, weights = a_batch().requires_grad_(), list(net.parameters())
    y = net(x)
    expected = torch.autograd.grad(y, [x, *weights], y.detach().cos())

    def run_on(stream: Any, pending: Any) -> Any:
        with torch.cuda.stream(stream):
            return pending.run()

    with side_stream(on_side_stream):
        y = net(x)
        grads, pending = split_backward(y, y.detach().cos(), x, weights)
        del y
        others = [torch.full_like(x, float("nan")) for _ in range(8)]
        hold_up()
        if elsewhere:
            stream = torch.cuda.current_stream() if HAS_GPU else None
            with ThreadPoolExecutor(1) as pool:
                later = pool.submit(run_on, stream, pending).result()
        else:
            later = pending.run()
        del others
    torch.testing.assert_close((*grads, *later), expected)
