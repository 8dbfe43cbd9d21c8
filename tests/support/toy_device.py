"""A device besides the CPU, for machines that have none: importing this makes one, `toy`, for the whole process.

Its tensors hold one of the CPU's, and every operator runs on that. Operators that mix devices raise, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Toy(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Toy:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device="toy:0"
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


def _run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if operator not in _COPIES and len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
        raise RuntimeError(f"{operator}: expected all tensors on one device")
    to = torch.device(kwargs.get("device") or "toy")
    inner_args, inner_kwargs = pytree.tree_map(_inner, (args, {**kwargs, "device": None}))
    if kwargs.get("device") is None:
        del inner_kwargs["device"]
    else:
        inner_kwargs["device"] = torch.device("cpu")
    result = operator(*inner_args, **inner_kwargs)
    if operator is torch.ops.aten.copy_.default:
        return args[0]
    if to.type == "cpu":
        return result
    return pytree.tree_map(lambda leaf: Toy(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, Toy) else leaf


_setup_privateuseone_for_python_backend("toy")
_library = torch.library.Library("aten", "IMPL")
for _operator in (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
):
    _library.impl(_operator, lambda *args, _own=_operator, **kwargs: _run(_own, args, kwargs), "PrivateUse1")
