"""Functions of torch and methods of its tensors that do nothing but arithmetic, or (`DRAWING`) draw numbers for it.

None makes a tensor as large as some number says (`zeros`, `repeat`, `one_hot`), but for `expand`, which takes no memory
for it: how much work there is then, nobody could tell from the sizes of what a call takes. Nor can they where
tensors grow with each round of a loop (`cat`), or three meet (`einsum`): such a call may be larger than it seems.
"""

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
    *("abs", "add", "addcmul", "addmm", "amax", "amin", "argmax", "argmin", "baddbmm", "bmm", "cat", "ceil"),
    *("chunk", "clamp", "clamp_max", "clamp_min", "clip", "cos", "cumprod", "cumsum", "diagonal", "div"),
    *("dot", "einsum", "eq", "erf"),
    *("exp", "exp2", "expm1", "flatten", "flip", "floor", "gather", "ge", "gt", "index_select", "le"),
    *("lerp", "log", "log1p", "log2", "log_softmax", "logical_and", "logical_not", "logical_or"),
    *("logsumexp", "lt", "masked_fill", "matmul", "max", "maximum", "mean", "min", "minimum", "mm"),
    *("movedim", "mul", "mv", "narrow", "ne", "neg", "numel", "outer", "permute", "pow", "prod", "relu"),
    *("reshape", "roll", "round", "rsqrt", "sigmoid", "sign", "sin", "softmax", "sort", "split", "sqrt"),
    *("square", "squeeze", "stack", "std", "sub", "sum", "swapaxes", "tanh", "topk", "transpose", "tril"),
    *("triu", "trunc", "unsqueeze", "var", "where"),
    *("acos", "acosh", "addcdiv", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "cummax", "cummin"),
    *("erfc", "erfinv", "fmod", "frac", "hypot", "logaddexp", "logaddexp2", "logcumsumexp", "logit"),
    *("nan_to_num", "norm", "prelu", "reciprocal", "remainder", "sinc", "sinh", "tan", "xlogy"),
)
_OF_SPECIAL = ("erf", "erfc", "exp2", "expit", "expm1", "log1p", "log_softmax", "logit", "softmax", "xlogy")
_MADE_BY_TORCH = ("full_like", "ones_like", "zeros_like")
_OF_FUNCTIONAL = (
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("celu", "cosine_similarity", "elu", "gelu", "glu", "group_norm", "hardshrink", "hardsigmoid"),
    *("hardswish", "hardtanh", "layer_norm", "leaky_relu", "linear", "log_softmax", "logsigmoid", "mish"),
    *("normalize", "relu", "relu6", "rms_norm", "selu", "sigmoid", "silu", "softmax"),
    *("softmin", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold"),
)
_DRAWING = (  # of `torch.nn.functional`
    *("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
    "scaled_dot_product_attention",
)

IN_PLACE = frozenset(["inplace", "out"])  # arguments
_WRITTEN_IN_C = (
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def is_torchs_own(function: Any) -> bool:
    """Whether nobody has replaced it before our import: torch's are written in C++, or in a file of torch."""
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__")).startswith("torch.")
    return isinstance(function, _WRITTEN_IN_C)


def _most_arguments(function: Any) -> float:
    """Return how many arguments it may be given: one more may be that by which it changes what it is given."""
    names = inspect.signature(function).parameters if isinstance(function, types.FunctionType) else ()
    return next((place for place, name in enumerate(names) if name in IN_PLACE), math.inf)


# To each how many arguments it may be given, by place or by name.
FUNCTIONS: Mapping[Any, float] = {
    function: _most_arguments(function)
    for function in [
        *filter(is_torchs_own, [getattr(torch, name) for name in (*_OF_TORCH, *_MADE_BY_TORCH)]),
        *filter(is_torchs_own, [getattr(F, name) for name in _OF_FUNCTIONAL]),
        *filter(is_torchs_own, [getattr(torch.special, name) for name in _OF_SPECIAL]),
        *filter(is_torchs_own, [torch.linalg.vector_norm]),
        *filter(is_torchs_own, (math.exp, math.log, math.sqrt)),
    ]
}
DRAWING: Mapping[Any, float] = {
    function: _most_arguments(function)
    for function in filter(is_torchs_own, [getattr(F, name) for name in _DRAWING])
}
METHODS = frozenset(
    [
        *_OF_TORCH,
        *("T", "bfloat16", "bool", "clone", "contiguous", "detach", "device", "dim", "double", "dtype"),
        *("expand", "expand_as", "float", "half", "int", "long", "mT", "ndim", "reshape_as", "shape"),
        *("size", "t", "to", "type_as", "unbind", "unflatten", "view", "view_as"),
    ]
)
# Of these names a module's part is meant, where it may be either: `lambda x: block.norm(x)`.
OF_PARTS = frozenset(["norm"])
_BINARY = [
    *(("+", "add"), ("-", "sub"), ("*", "mul"), ("/", "truediv"), ("//", "floordiv"), ("%", "mod")),
    *(("@", "matmul"), ("**", "pow"), ("&", "and"), ("|", "or"), ("^", "xor")),
    *(("<<", "lshift"), (">>", "rshift")),
]
# The methods that stand for what is written without a name, by symbol or instruction.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    **{symbol: (f"__{name}__", f"__r{name}__") for symbol, name in _BINARY},
    **dict.fromkeys(["<", ">"], ("__lt__", "__gt__")),
    **dict.fromkeys(["<=", ">="], ("__le__", "__ge__")),
    **dict.fromkeys(["==", "!="], ("__eq__", "__ne__")),
    **dict.fromkeys(["[]", "BINARY_SLICE", "BINARY_SUBSCR"], ("__getitem__", "__index__")),
    "CALL_FUNCTION_EX": ("__iter__", "__len__"),
    "CONTAINS_OP": ("__bool__", "__contains__", "__eq__"),
    **dict.fromkeys(["FORWARD", "TO_BOOL", "UNARY_NOT"], ("__bool__",)),
    **dict.fromkeys(
        ["CONVERT_VALUE", "FORMAT_SIMPLE", "FORMAT_VALUE"], ("__format__", "__repr__", "__str__")
    ),
    "FORMAT_WITH_SPEC": ("__format__",),
    "LIST_EXTEND": ("__iter__",),
    "UNARY_INVERT": ("__invert__",),
    "UNARY_NEGATIVE": ("__neg__",),
    "UNPACK_SEQUENCE": ("__iter__",),
}
_OF_PYTHON: Mapping[Any, tuple[str, ...]] = {
    **dict.fromkeys(
        [AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError], ()
    ),
    abs: ("__abs__",),
    bool: ("__bool__",),
    float: ("__float__",),
    int: ("__int__", "__index__"),
    isinstance: (),
    len: ("__len__",),
    str: ("__repr__", "__str__"),
    **dict.fromkeys([list, tuple], ("__iter__", "__len__")),
    **dict.fromkeys([max, min], ("__iter__", "__gt__", "__lt__", "__bool__")),
}
# What Python itself has for numbers, and to raise, with the methods of tensors that it calls; unless it was replaced.
PYTHONS = {one: names for one, names in _OF_PYTHON.items() if one.__module__ == "builtins"}
# By which columns may come into the place of rows, and be multiplied with each other.
RESHAPING = frozenset(
    [
        *("T", "__getitem__", "einsum", "expand", "expand_as", "flatten", "mT", "movedim", "outer"),
        *("permute", "reshape", "reshape_as", "stack", "swapaxes", "t", "transpose", "unflatten"),
        *("unsqueeze", "view", "view_as"),
    ]
)
MODULES = (torch, nn, F, math, torch.linalg, torch.special)
