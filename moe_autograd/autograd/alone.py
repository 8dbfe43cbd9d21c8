"""The only call of a map: there is nothing to run it beside, and PyTorch's own node will do.

But what its backward raises is to name the call, as elsewhere. So the node gets a class of its own, a subclass of the
one that PyTorch made, whose `apply` adds the note. (What PyTorch complains of afterwards, a gradient of a wrong shape,
names the function and the argument by itself; to look for that here costs the only call a tenth of its time.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.profiler import record_function

from moe_autograd._random import CallSeeds, own_streams, running
from moe_autograd.autograd.notes import add_note


def run_alone(call: Callable[..., Any], args: Sequence[Any], name: str, title: str) -> Any:
    """Make the only call of a map.

    Args:
        call: what is called.
        args: what it takes.
        name: of the call.
        title: how the map is called in errors and profiles.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        call = record_function(f"{title}, forward: {name}")(call)
    streams = own_streams(CallSeeds())
    try:
        with streams:
            running.index = 0
            return call(*args)
    except BaseException as error:
        streams.__exit__()
        add_note(error, f"{title}, forward: raised by {name} of 1.")
        raise


def apply_alone(func: type[Function], args: Sequence[Any], title: str) -> Any:
    """Apply the function of a map with one call; see `run_alone`."""
    number = torch._C._autograd._get_sequence_nr()
    try:
        returned = run_alone(func.apply, args, f"call 0 ({func.__name__})", title)
    except TypeError as error:
        if args and all(isinstance(one, tuple | list) for one in args):
            add_note(error, "If these are several calls: map_with_parallel_backward(func, *calls).")
        raise
    for result in returned if isinstance(returned, tuple) else (returned,):
        node: Any = result.grad_fn if isinstance(result, Tensor) else None
        kind: Any = type(node)
        if kind is func._backward_cls and node._sequence_nr() >= number:
            node.__class__ = kind.__dict__.get("_naming") or _naming(func, kind, title)
            break
    return returned


def _naming(func: type[Function], kind: Any, title: str) -> type[Any]:
    """Return the class of the function's nodes that name the call. It lives as long as the function."""
    note = f"{title}, backward: raised by call 0 ({func.__name__}) of 1."

    def noting(apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: Any, *grad_outputs: Any) -> Any:
            try:
                return apply(node, *grad_outputs)
            except BaseException as error:
                add_note(error, note)
                raise

        return run

    ways = ("apply", "apply_boxed")
    kind._naming = type(kind.__name__, (kind,), {name: noting(getattr(kind, name)) for name in ways})
    return cast(type[Any], kind._naming)
