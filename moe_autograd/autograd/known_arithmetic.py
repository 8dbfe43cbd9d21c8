"""Functions of torch and methods of its tensors that do nothing but arithmetic, or (`DRAWING`) draw numbers for it."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_OF_TORCH = (
    *("abs", "add", "addmm", "baddbmm", "bmm", "cat", "chunk", "clamp", "cos", "cumsum", "div", "einsum"),
    *("erf", "exp", "flatten", "log", "log_softmax", "logsumexp", "matmul", "maximum", "mean", "minimum"),
    *("mm", "mul", "neg", "permute", "pow", "relu", "reshape", "rsqrt", "sigmoid", "sin", "softmax"),
    *("split", "sqrt", "square", "squeeze", "stack", "sub", "sum", "tanh", "transpose", "unsqueeze"),
    *("where",),
)
_OF_FUNCTIONAL = (
    *("celu", "elu", "gelu", "glu", "group_norm", "hardsigmoid", "hardswish", "hardtanh", "layer_norm"),
    *("leaky_relu", "linear", "log_softmax", "logsigmoid", "mish", "normalize", "relu", "relu6"),
    *("rms_norm", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "tanh"),
)

IN_PLACE = frozenset(["inplace", "out"])  # arguments


def is_torchs_own(function: Any) -> bool:
    """Whether nobody has replaced it before our import: torch's are written in C++, or in a file of torch."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "torch.")
    return name.startswith("torch.")


def _most_arguments(function: Any) -> float:
    """Return how many arguments may go by place: one more may be that by which it changes what it is given."""
    names = inspect.signature(function).parameters if isinstance(function, types.FunctionType) else ()
    return next((place for place, name in enumerate(names) if name in IN_PLACE), math.inf)


# To each how many arguments it may be given by place.
FUNCTIONS: Mapping[Any, float] = {
    function: _most_arguments(function)
    for function in [
        *filter(is_torchs_own, [getattr(torch, name) for name in _OF_TORCH]),
        *filter(is_torchs_own, [getattr(F, name) for name in _OF_FUNCTIONAL]),
        *(math.exp, math.log, math.sqrt),
    ]
}
DRAWING: Mapping[Any, float] = {one: _most_arguments(one) for one in [F.dropout] if is_torchs_own(one)}
METHODS = frozenset(
    [
        *_OF_TORCH,
        *("T", "contiguous", "dim", "dtype", "expand", "float", "mT", "ndim", "shape", "size", "t", "to"),
        *("type_as", "unbind", "unflatten", "view", "view_as"),
    ]
)
MODULES = (torch, nn, F, math)
