"""Experts of many kinds, and the worlds in which a program may train them: plain PyTorch, and each memory system."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.comparison import one_after_another
from tests.support.offloading import Make

WIDTH = 3
Fact = tuple[str, Any]  # what is to be equal, and its name


# ---- experts


class Noise:
    """Random numbers that the first run draws and the second is given, since a loop would draw others than a map.

    Args:
        drawn: in the first run, by their places; `None` in that run itself.
    """

    def __init__(self, drawn: dict[Hashable, Tensor] | None = None) -> None:
        self.drawn = {} if drawn is None else drawn
        self._is_given = drawn is not None

    def like(self, x: Tensor, place: Hashable) -> Tensor:
        if self._is_given:
            return self.drawn[place]
        noise = torch.rand_like(x)
        assert torch.equal(self.drawn.setdefault(place, noise), noise), (
            "made again, a call drew other numbers"
        )
        return noise


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64) / 2)


class Plain(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH) if shared is None else shared
        self.bias = weight(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.weight + self.bias)


class Noisy(Plain):
    """Dropout, whose second run is to see the same masks."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor, *, place: Hashable) -> Any:
        return super().forward(x) * (self.noise.like(x, place) > 0.3)


class Counting(Plain):
    """Changes buffers, one of which its backward needs as it was."""

    keeps_statistics = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(WIDTH, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x) * self.scale
        self.scale = self.scale * 0.9
        self.count += 1
        return y


class Partial(Plain):
    """Trains one of its weights, or the other."""

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight if x.detach().sum() > 0.1 else x * self.bias


class Several(Plain):
    def forward(self, x: Tensor) -> Any:
        return {"results": (super().forward(x), None, [x.sin() * self.bias, x.detach()]), "number": 5}


class InPlace(Plain):
    def forward(self, x: Tensor) -> Any:
        y = x.clone().mul_(2)
        return super().forward(y).mul(1).add_(y.mean())


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Adapting(Plain):
    """Makes a step of its own in the forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(
                (x.detach() @ self.weight).square().mean(), self.weight, create_graph=True
            )
        return x @ (self.weight - 0.1 * grad)


class _Squares(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 2 * x * scale * grad, (x * x * grad).sum(0)


class Squaring(Plain):
    def forward(self, x: Tensor) -> Any:
        return _Squares.apply(x, self.bias)


class Nested(nn.Module):
    """A map in a map, in which one expert is called twice."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Plain(), Squaring()])
        self.call = call

    def forward(self, x: Tensor) -> Any:
        one, other = self.inner
        return sum(self.call([one, other, one], [(x,), (x * 2,), (x + 1,)], [{}] * 3))


EXPERTS: list[type[nn.Module]] = [Plain, Noisy, Partial, Several, InPlace, Checkpointed, Adapting, Squaring]
ROWS_ALONE: list[type[nn.Module]] = [Plain, Several, Checkpointed, Squaring]  # treat each row by itself


# ---- worlds


@dataclass(frozen=True)
class Mode:
    """How a map is to save memory."""

    recompute: bool = False
    defer_weight_grads: bool = False


class World:
    """Plain PyTorch: loops, `checkpoint`, optimizers.

    Args:
        updates_on_backward: whether each backward ends with an update.
        may_share: whether experts may share weights, and the program do with these what it likes.
    """

    def __init__(self, updates_on_backward: bool = False, may_share: bool = True) -> None:
        self._updates_on_backward, self.may_share = updates_on_backward, may_share
        self.most_micro_batches = 1 if updates_on_backward else 3

    def take(self, modules: list[nn.Module], make: Make) -> Sequence[Callable[..., Any]]:
        """Return what is to be called in the modules' places, and train these from now on."""
        self._modules = modules
        self._optimizer = make(list({p: None for module in modules for p in module.parameters()}))
        return modules

    def call(
        self,
        calls: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        mode: Mode = Mode(),  # it is frozen
        max_concurrency: int | None = None,
    ) -> list[Any]:
        if mode.recompute:
            calls = [functools.partial(checkpoint, call, use_reentrant=False) for call in calls]
        return one_after_another(calls, inputs, kwargs)

    def after_backward(self) -> None:
        if self._updates_on_backward:
            self.step()
            self.zero_grad()

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def facts(self) -> Iterator[Fact]:
        """Say what weights, buffers, gradients and the optimizer's state are."""
        for i, module in enumerate(self._modules):
            yield from _named(f"expert {i}", module.state_dict())
            yield from _named(f"gradient {i}", {n: p.grad for n, p in module.named_parameters()})
            yield from _state(i, module, self._optimizer)

    def close(self) -> None:
        pass


class MappedWorld(World):
    """`parallel_apply`, in the mode that the program wants."""

    def call(
        self,
        calls: Sequence[Callable[..., Any]],
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        mode: Mode = Mode(),
        max_concurrency: int | None = None,
    ) -> list[Any]:
        return parallel_apply(calls, inputs, kwargs, max_concurrency=max_concurrency, **vars(mode))


class OffloadedWorld(MappedWorld):
    """`OffloadedExperts`, of which one or two fit into memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options.get("update") == "on_backward", may_share=False)
        self._options = options

    def take(self, modules: list[nn.Module], make: Make) -> Sequence[Callable[..., Any]]:
        self._modules = modules
        largest = max(sum(t.nbytes for t in (*module.parameters(), *module.buffers())) for module in modules)
        limit = 5 * largest + 2000  # weights, gradients and state of one; activations of micro-batches
        self._experts = OffloadedExperts(modules, make, max_resident_bytes=limit, **self._options)
        return list(self._experts)

    def after_backward(self) -> None:
        pass

    def step(self) -> None:
        self._experts.step()

    def zero_grad(self) -> None:
        self._experts.zero_grad()

    def facts(self) -> Iterator[Fact]:
        for i, (module, held) in enumerate(zip(self._modules, self._experts._held, strict=True)):
            yield from _named(f"expert {i}", self._experts.state_dict(i))
            yield from _named(f"gradient {i}", self._experts.gradients(i))
            with held.in_memory(for_update=True):
                yield from _state(i, module, self._experts.optimizers[i])

    def close(self) -> None:
        self._experts.close()


def _named(what: str, values: dict[str, Any]) -> Iterator[Fact]:
    return ((f"{what}, {name}", value) for name, value in values.items())


def _state(i: int, module: nn.Module, optimizer: Optimizer) -> Iterator[Fact]:
    for name, parameter in module.named_parameters():
        yield from _named(f"state {i}, {name}", optimizer.state.get(parameter, {}))
