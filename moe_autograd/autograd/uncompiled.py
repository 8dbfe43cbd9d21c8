"""Keep functions out of what `torch.compile` and compiled autograd trace: threads, files and servers they cannot.

And what a node of ours owes to compiled autograd, which adds up the gradients that it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moe_autograd._imported import imported
from moe_autograd.autograd.tracebacks import empty_our_frames
from moe_autograd.autograd.walks import Edge

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Break the graph at a function, a door of ours. Where nothing is compiled, the compiler is not even imported.

    After the break the compiler looks at `choose` by itself, and would compile it anew for each number of arguments,
    their shapes and autocast, until it warns of `recompile_limit`. So it is told to leave that alone.

    What the function raises leaves behind what our frames hold (`tracebacks`).
    """
    break_graph: Callable[P, T] = torch._disable_dynamo(function)

    @functools.wraps(function)
    def choose(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return (break_graph if torch.compiler.is_compiling() else function)(*args, **kwargs)
        except BaseException as error:
            empty_our_frames(error)
            raise

    return left_alone(choose)


def left_alone(function: Callable[P, T]) -> Callable[P, T]:
    """Let the compiler run a function, and what that calls, as they are, where it does not trace through it.

    So it is with all that torch calls in a backward: nodes, hooks and callbacks. Where compiled code begins a backward,
    the compiler meets each of them as a function by itself, and would compile it anew for each number of gradients.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        code: Any = function.__code__
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def is_backward_compiled() -> bool:
    """Whether compiled autograd runs, whose graph adds up what nodes return: no gradient may be missing there."""
    return bool(imported("torch._dynamo.compiled_autograd", "in_compiled_autograd_region"))


def filled(edges: Sequence[Edge], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return what a node hands on, with zeros beside a gradient of the same tensor: compiled autograd adds them up.

    Args:
        edges: of the node, one for each tensor.
        grads: those of the tensors, after one for each argument that is none.
    """
    num_others = len(grads) - len(edges)
    own = [*zip(edges, grads[num_others:], strict=True)]
    known = {edge: grad for edge, grad in own if grad is not None}
    with_zeros = [
        torch.zeros_like(known[edge]) if grad is None and edge in known else grad for edge, grad in own
    ]
    return (*grads[:num_others], *with_zeros)
