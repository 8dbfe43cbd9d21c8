"""Results that one node computed from each other, as that of an expert which is offloaded or elsewhere does.

        x ──▶ [ one node ] ──▶ h, y          features, and classes that were computed from them

What flows from `y` to `h` flows within the node. So a hook on `h`, its `retain_grad` and `torch.autograd.grad(loss, h)`
would miss it, where in plain PyTorch they get all. Nobody would see that: a backward raises instead, if somebody looks
at `h` and a gradient comes to `y`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_autograd.autograd.computed_from import HAVE_USES
from moe_autograd.autograd.result_hooks import Within
from moe_autograd.autograd.this_backward import asked_for_by_name
from moe_autograd.autograd.uncompiled import is_backward_compiled, left_alone
from moe_autograd.autograd.wrapped_hooks import innermost

_MISSED = (
    "expected nobody to look (by a hook, retain_grad or torch.autograd.grad) at a result that the expert has computed "
    "others from, since what flows from these to it is not to be seen, got one that is looked at where others get a "
    "gradient. Let the expert return that one alone, and compute the others outside."
)


def tie_uses(name: str, results: Sequence[Tensor], uses: Mapping[int, Collection[int]]) -> None:
    """Have backwards raise that would miss something at a result.

    Args:
        name: of the expert, for the error.
        results: of one node.
        uses: for the places of results those of others that they were computed from, at any distance.
    """
    if not uses:
        return
    node = results[next(iter(uses))].grad_fn
    HAVE_USES[node] = HAVE_USES.get(node, {}) | {
        results[place].output_nr: [results[used].output_nr for used in below] for place, below in uses.items()
    }
    refusals = {place: _Refusal(name) for place in uses}
    for place, refusal in refusals.items():
        results[place].register_hook(refusal)  # hooks are called in order: this one before those of users
    for used in {used for below in uses.values() for used in below}:
        looked_at = _Used(results[used])
        for place, below in uses.items():
            if used in below:
                refusals[place].used.append(looked_at)


class _Used:
    """A result that others were computed from, and who looks at it."""

    def __init__(self, result: Tensor) -> None:
        node: Any = result.grad_fn
        self._edge = id(node), result.output_nr  # for as long as the node is there
        self._result = weakref.ref(result)
        result.register_hook(_nothing).remove()  # so that there is a dictionary
        self._hooks = result._backward_hooks
        handle = node.register_prehook(_nothing)
        handle.remove()
        self._hooks_of_node = handle.hooks_dict_ref

    def is_looked_at(self) -> bool:
        """Whether somebody does in this backward."""
        result = self._result()
        return (
            self._edge in asked_for_by_name()
            or any(map(_looks, (self._hooks or {}).values()))
            or any(self._sees(hook) for hook in (self._hooks_of_node() or {}).values())
            or (result is not None and result.retains_grad and id(result.grad_fn) == self._edge[0])
        )

    def _sees(self, hook: object) -> bool:
        return isinstance(hook, Within) and hook.output_nr == self._edge[1]


class _Refusal:
    """A hook of a result that was computed from others.

    Args:
        name: of the expert.
    """

    __torch_unserializable__ = True  # say nothing of it where the result is saved

    def __init__(self, name: str) -> None:
        self._name = name
        self.used: list[_Used] = []  # by it

    @left_alone
    def __call__(self, grad: Tensor | None) -> None:
        """Raise if a gradient comes here, and somebody looks at one of them."""
        if grad is not None and not is_backward_compiled() and any(one.is_looked_at() for one in self.used):
            raise RuntimeError(f"{self._name}: {_MISSED}")


def _looks(hook: object) -> bool:
    """Whether a hook is one of a user's; FSDP's only say that a backward has come so far."""
    if isinstance(hook, _Refusal):
        return False
    own: Any = innermost(hook)
    while isinstance(own, functools.partial):
        own = own.func
    return not str(getattr(own, "__module__", "")).startswith("torch.distributed.")


def _nothing(*_: object) -> None:
    """Do nothing."""
