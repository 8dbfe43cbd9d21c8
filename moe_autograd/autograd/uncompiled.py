"""Keep functions out of what `torch.compile` and compiled autograd trace: threads, files and servers they cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Break the graph at a function. Where nothing is compiled, the compiler is not even imported."""
    break_graph: Callable[P, T] = torch._disable_dynamo(function)

    @functools.wraps(function)
    def choose(*args: P.args, **kwargs: P.kwargs) -> T:
        return (break_graph if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return choose
