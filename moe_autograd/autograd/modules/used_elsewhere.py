"""Results that one node computed from each other, as that of an expert which is offloaded or elsewhere does.

        x ──▶ [ one node ] ──▶ h, y          features, and classes that were computed from them

What flows from `y` to `h` flows within the node. So a hook on `h`, its `retain_grad` and `torch.autograd.grad(loss, h)`
would miss it, where in plain PyTorch they get all. Nobody would see that: a backward raises instead, if somebody looks
at `h` and a gradient comes to `y`.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_autograd.autograd.joining.batched import all_of
from moe_autograd.autograd.modules.computed_from import at_any_distance, note_uses, places_in
from moe_autograd.autograd.result_hooks import Within
from moe_autograd.autograd.this_backward import asked_for_by_name, kept_by_this_backward
from moe_autograd.autograd.uncompiled import is_backward_compiled, left_alone
from moe_autograd.autograd.wrapped_hooks import own_function

_MISSED = (
    "expected nobody to look (by a hook, retain_grad or torch.autograd.grad) at a result that the expert has computed "
    "others from, since what flows from these to it is not to be seen, got one that is looked at where others get a "
    "gradient. Let the expert return that one alone, and compute the others outside."
)


# FSDP, `FlopCounterMode`, and `before_backward`, by which prefetching begins.
_COME_SO_FAR = ("torch.distributed.", "torch.utils.module_tracker", "moe_autograd.autograd.hooks")


def tie_uses(name: str, results: Sequence[Tensor], uses: Mapping[int, Collection[int]]) -> None:
    """Have backwards raise that would miss something at a result.

    Args:
        name: of the expert, for the error.
        results: of one node.
        uses: which of them were computed from which others, as `uses_of` has it.
    """
    if not uses:
        return
    note_uses(results, uses)
    below, looks = at_any_distance(uses), _Looks(name)
    for place, bits in below.items():
        results[place].register_hook(_Refusal(looks, bits, results[place]))
    all_used = functools.reduce(operator.or_, below.values())
    looks.used = {place: _Used(results[place]) for place in places_in(all_used)}


class _Looks:
    """Who looks at results of one call that others were computed from.

    Args:
        name: of the expert.

    Attributes:
        used: these results, by their places.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.used: Mapping[int, _Used] = {}

    def of_this_backward(self) -> int:
        """Return a bit for each of them at which somebody looks."""
        return kept_by_this_backward(self, self._found)

    def _found(self) -> int:
        by_name = asked_for_by_name()
        return sum(1 << place for place, one in self.used.items() if one.is_looked_at(by_name))


class _Used:
    """A result that others were computed from, and who looks at it."""

    def __init__(self, result: Tensor) -> None:
        node: Any = result.grad_fn
        self._edge = id(node), result.output_nr  # for as long as the node is there
        self._result = weakref.ref(result)
        self._hooks = _hooks_of(result)
        handle = node.register_prehook(_nothing)
        handle.remove()
        self._hooks_of_node = handle.hooks_dict_ref

    def is_looked_at(self, by_name: Collection[tuple[int, int]]) -> bool:
        """Whether somebody does in this backward, which is asked for these."""
        result = self._result()
        return (
            self._edge in by_name
            or _has_users(self._hooks)
            or any(self._sees(hook) for hook in (self._hooks_of_node() or {}).values())
            or (result is not None and result.retains_grad and id(result.grad_fn) == self._edge[0])
        )

    def _sees(self, hook: object) -> bool:
        return isinstance(hook, Within) and hook.output_nr == self._edge[1]


class _Refusal:
    """A hook of a result that was computed from others.

    Args:
        looks: at results of the call.
        below: a bit for each of those that it was computed from.
        result: the one whose hook it is, called before those of users.
    """

    __torch_unserializable__ = True  # say nothing of it where the result is saved

    def __init__(self, looks: _Looks, below: int, result: Tensor) -> None:
        self._looks, self._below, self._hooks = looks, below, _hooks_of(result)

    @left_alone
    def __call__(self, grad: Tensor | None) -> None:
        """Raise if something flows here, and somebody looks at one of them."""
        if grad is None or is_backward_compiled() or not self._looks.of_this_backward() & self._below:
            return
        numbers = all_of(grad)
        # Zeros miss nothing, `torch.stack(states)[0]` has them for all other states: unless a later hook changes them.
        if numbers.layout is not torch.strided or numbers.any() or _has_users(self._hooks):
            raise RuntimeError(f"{self._looks.name}: {_MISSED}")


def _has_users(hooks: weakref.ref[Any]) -> bool:
    """Whether one of a result's hooks is a user's."""
    return any(map(_looks, (hooks() or {}).values()))


def _looks(hook: object) -> bool:
    """Whether a hook is one of a user's, and not of those who only want to know that a backward has come so far."""
    own = own_function(hook)
    return not (isinstance(own, _Refusal) or str(getattr(own, "__module__", "")).startswith(_COME_SO_FAR))


def _hooks_of(result: Tensor) -> weakref.ref[Any]:
    result.register_hook(_nothing).remove()  # so that there is a dictionary
    hooks: Any = result._backward_hooks
    return weakref.ref(hooks)  # the node has it; in it is what may lead to here


def _nothing(*_: object) -> None:
    """Do nothing."""
