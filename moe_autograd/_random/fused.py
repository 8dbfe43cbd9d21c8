"""Operators of accelerators that take no generator and draw within their own kernels: fused attention with dropout.

Such a kernel asks the device's generator. So while it is started, that one has the state of the call's own, in which it
draws on. States of generators are on the host: nobody waits for the device.

Threads: meanwhile `lending` keeps calls, and whoever asks for states, from the device's generator. Threads outside of
maps that draw from it cannot be kept from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from moe_autograd._contexts import contextmanager
from moe_autograd._random.stand_ins import generator_of, lending

# All that draw so where their `dropout_p` is positive (a test compares with torch's own list).
FUSED_OPERATORS = (
    *("_cudnn_attention_forward", "_efficient_attention_forward", "_flash_attention_forward"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_fused_attention_overrideable"),
    "_triton_scaled_dot_attention",
)


class OnOwnState(TorchDispatchMode):
    """Start an operator's kernel, inside, while the device's generator has the state of another.

    A mode, because it comes after autograd: what autograd saves goes to the caller's hooks, which may wait for other
    calls, and so must not be called under the lock. Torch's own way to enter one notes it for all threads together.

    Args:
        operator: is called once, inside.
        own: what it draws from.
    """

    def __init__(self, operator: OpOverload, own: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._own = operator, own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here

    def __enter__(self) -> OnOwnState:
        _push_mode(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_it = operator is self._operator
        with _drawing_from(self._own) if is_it else contextlib.nullcontext():
            return operator(*args, **(kwargs or {}))


@contextmanager
def _drawing_from(own: torch.Generator) -> Iterator[None]:
    """Let the generator of `own`'s device share its state."""
    device = generator_of(own.device)
    with lending:
        before = device.graphsafe_get_state()
        device.graphsafe_set_state(own)  # not `set_state`, which has cuDNN's dropout seeded anew
        try:
            yield
        finally:
            device.graphsafe_set_state(before)


def alone_with(given: torch.Generator | None) -> contextlib.AbstractContextManager[Any]:
    """Let a generator be that was passed, if it is an accelerator's own: cuDNN's dropout is seeded from that."""
    if given is None or given.device.type != "cuda":
        return contextlib.nullcontext()
    own, passed = cast(Any, generator_of(given.device)), cast(Any, given)
    return lending if own._cdata == passed._cdata else contextlib.nullcontext()
