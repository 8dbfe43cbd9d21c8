"""The register of autograd functions that the equivalence tests run natively and through the map.

Guarantees: a recipe gives the same tensors for the same seed, so that two runs differ only in who called
`apply`; `Leaves` remembers every leaf it made, in order, so that both runs compare the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Recipe = Callable[["Leaves"], tuple[Any, ...]]


class Leaves:
    """Makes the leaf tensors of one run from a seed, and keeps them in the order in which they were made."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.made: list[Tensor] = []

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> Tensor:
        precise = torch.complex128 if dtype.is_complex else torch.float64
        leaf = torch.randn(shape, generator=self._generator, dtype=precise).to(dtype)
        return self._keep(leaf.requires_grad_(requires_grad))

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        return self._keep(torch.nn.Parameter(self(*shape, requires_grad=False)))

    def _keep(self, leaf: AnyTensor) -> AnyTensor:
        self.made.append(leaf)
        return leaf


class GivenLeaves(Leaves):
    """Hands out given tensors in place of leaves that require a gradient: for numerical differentiation."""

    def __init__(self, given: Sequence[Tensor], seed: int = 0) -> None:
        super().__init__(seed)
        self._given = iter(given)

    def _keep(self, leaf: AnyTensor) -> AnyTensor:
        return cast(AnyTensor, next(self._given)) if leaf.requires_grad else leaf


@dataclass(frozen=True)
class Case:
    """A function, how to make one call's arguments, and what may be asked of its gradients.

    Args:
        func: the autograd function.
        args: makes the arguments of one call.
        checked: numerical differentiation agrees with its gradients (float64, outputs smooth).
        checked_twice: the same for the gradients of its gradients.
        twice: its backward can be differentiated, however wrong the result may be.
    """

    func: type[Function]
    args: Recipe
    checked: bool = True
    checked_twice: bool = True
    twice: bool = True
    name: str = field(default="")

    def __str__(self) -> str:
        return self.name or self.func.__name__


CATALOGUE: list[Case] = []


def entry(args: Recipe, *, name: str = "", **asked: bool) -> Callable[[type[Function]], type[Function]]:
    """Register the decorated function; stack several to register it with several recipes."""

    def register(func: type[Function]) -> type[Function]:
        CATALOGUE.append(Case(func, args, name=f"{func.__name__}-{name}" if name else "", **asked))
        return func

    return register
