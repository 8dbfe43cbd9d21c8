"""Hooks that users register on the results of a map, or of an expert that is offloaded or elsewhere.

One node stands for many others, and PyTorch calls the hooks on all results of a node that runs: with `None`, where no
gradient flows. A node of its own would not run then, nor its hooks. (But `register_multi_grad_hook(mode="all")` counts
the calls that it is to get, of all nodes that run.)

The node of a map sees what comes to a result from outside of its call, and what `uses` lead there from within. More
comes from within in second derivatives, through what the result's operator has saved of it, and through other results
that were computed from it where `used_results` leaves these alone. For such parts a hook is registered on the node
within as well. So it sees parts, where natively it sees their sum: whoever scales or records a gradient does the same
to both. (Those of `register_multi_grad_hook` count, and are left alone.) It comes before hooks that the call has put
there itself: what these change would pass for a part from within, and be changed once more.
"""

from __future__ import annotations

import abc
import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import Function

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.uncompiled import left_alone
from moe_autograd.autograd.wrapped_hooks import WrappedHook, innermost, of_several, waited_for

# of each kind of nodes that tie the results of calls how torch registers hooks there
_REGISTERS: dict[type, Callable[[Any, Tensor], None]] = {}


def skip_missing_gradients(func: type[Function]) -> type[Function]:
    """Let no hook on a result of `func` be called without a gradient; costs nothing where there is none."""
    node_class: Any = func._backward_cls
    register = node_class._register_hook_dict

    @left_alone
    def register_skipping(node: Any, result: Tensor) -> None:
        """Do what `Tensor.register_hook` asks for with its first hook."""
        result._backward_hooks = Hooks()
        register(node, result)

    node_class._register_hook_dict = register_skipping
    return func


def see_within(func: type[Function]) -> type[Function]:
    """Let hooks on a result of `func`, which ties calls, see what comes to it within its call, too."""
    node_class: Any = skip_missing_gradients(func)._backward_cls
    _REGISTERS[node_class] = register = node_class._register_hook_dict

    @left_alone
    def register_seeing(node: Any, result: Tensor) -> None:
        """Do what `Tensor.register_hook` asks for with its first hook."""
        register(node, result)
        hooks: Any = result._backward_hooks
        call, place = node.joined.call_of(result.output_nr)
        call.see_within(place, functools.partial(HooksWithin, weakref.ref(hooks)))

    node_class._register_hook_dict = register_seeing
    return func


def joined_by(node: Any) -> Any:
    """Return the calls whose results a node ties, if it is one of ours."""
    return node.joined if type(node) in _REGISTERS else None


class _Skipping(WrappedHook):
    """A hook that is not called without a gradient."""

    @left_alone
    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None else self._hook(grad)


class Hooks(collections.OrderedDict[int, Callable[[Tensor], Any]]):
    """The hooks of a result, as `Tensor.register_hook` and its handles know them."""

    def __setitem__(self, key: int, hook: Callable[[Tensor], Any]) -> None:
        super().__setitem__(key, hook if waited_for(hook) else _Skipping(hook))


_NO_SEED = torch.empty(0, device="cpu")  # not even one that lets it sleep


class Within(abc.ABC):
    """What is called for the gradient of a result, on the node within the call that computed it.

    Args:
        output_nr: which of the node's outputs the result is.

    Threads: any; several may run backwards of one graph.
    """

    def __init__(self, output_nr: int) -> None:
        self.output_nr = output_nr
        # by thread: what came from outside, where the call's own backward runs; `None`: it sleeps
        self.seeds: dict[int, Tensor | None] = {}

    @abc.abstractmethod
    def register(self, node: Any, hooks: Any) -> None:
        """Have it called on the way to a node within the call.

        Args:
            node: that computed the result.
            hooks: that the call has put on the result, if any: these run before the node's.
        """

    def _register_at_node(self, node: Any, place: int) -> None:
        handle = node.register_prehook(self)
        hooks = handle.hooks_dict_ref()
        del hooks[handle.id]
        _put_in(hooks, place, handle.id, self)

    @left_alone
    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Return gradients in place of these, or nothing."""
        new = self.of_tensor(grads[self.output_nr])
        return None if new is None else (*grads[: self.output_nr], new, *grads[self.output_nr + 1 :])

    @left_alone
    def of_tensor(self, total: Tensor | None) -> Tensor | None:
        """Return a gradient in place of this one, or nothing."""
        me = threading.get_ident()
        seed = self.seeds.get(me)
        if total is None or total is seed or (seed is None and me in self.seeds):
            return None
        if seed is None:
            changed = self.see(total)
            return None if changed is total else changed
        return self._in_place_of(total, seed)

    def _in_place_of(self, total: Tensor, seed: Tensor) -> Tensor | None:
        part = total - seed
        changed = self.see(part)
        return None if changed is part else seed + changed

    def see(self, part: Tensor) -> Tensor:
        """Return what is to flow in place of what came from within."""
        return part


def _put_in(hooks: Any, place: int, key: object, hook: Callable[..., Any]) -> None:
    """Put a hook before those that are there, but for what arrives first; at place 1 after ours.

    Dictionaries of ours note what users put there.
    """
    others = list(hooks.items())
    is_before = [_is_first, _is_ours][place]
    others.insert(sum(is_before(each) for _, each in others), (key, hook))
    hooks.clear()
    for each in others:
        collections.OrderedDict.__setitem__(hooks, *each)


def _is_first(hook: Any) -> bool:
    return isinstance(getattr(innermost(hook), "__self__", hook), Arrived)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, Within)


def _is_within(hook: Any) -> bool:
    return isinstance(getattr(innermost(hook), "__self__", None), Within)


See: TypeAlias = Callable[[int], Within]


class HooksWithin(Within):
    """The hooks of a result."""

    def __init__(self, hooks: weakref.ref[Hooks], output_nr: int) -> None:
        super().__init__(output_nr)
        self._hooks = hooks  # they may lead to the result, and so back to here

    def register(self, node: Any, hooks: Any) -> None:
        """Before all other hooks."""
        if hooks:
            _put_in(hooks, 0, self, self.of_tensor)
        else:
            self._register_at_node(node, 0)

    def see(self, part: Tensor) -> Tensor:
        """Call them."""
        for hook in list((self._hooks() or {}).values()):
            if not of_several(hook) and not _is_within(hook):
                changed = hook(part)
                part = part if changed is None else changed
        return part


class RetainWithin(Within):
    """The `.grad` of a result that retains it."""

    def __init__(self, result: weakref.ref[Tensor], output_nr: int) -> None:
        super().__init__(output_nr)
        self._result = result

    def register(self, node: Any, hooks: Any) -> None:
        """After the result's own hooks, and those of its node come after it, as PyTorch has it."""
        self._register_at_node(node, 1)

    def see(self, part: Tensor) -> Tensor:
        """Add to it."""
        if (result := self._result()) is not None:
            own = part.detach()
            result.grad = own.clone() if result.grad is None else result.grad + own
        return part


class Arrived(Within):
    """The whole gradient of a result that others were computed from, in place of what arrives (`used_results`)."""

    def register(self, node: Any, hooks: Any) -> None:
        """Nothing: it has been put there."""

    def put_first(self, node: Any, hooks: Any, result: Tensor | None) -> Any:
        """Have it called before all hooks of a result; return these, if it is one of them.

        Args:
            node: that computed the result.
            hooks: that the call has put on the result, if any.
            result: as the call knows it, if anybody still does: he may put hooks there, too.
        """
        if (joined := joined_by(node)) is not None:
            call, place = joined.call_of(self.output_nr)
            call.note_arrived(place, self)
        if hooks is None and result is not None:
            hooks = result._backward_hooks
        if hooks is not None:
            _put_in(hooks, 0, self, self.of_tensor)
        elif result is None or result.grad_fn is not node:
            self._register_at_node(node, 0)
        elif joined is not None:  # which would take it for a user's
            _REGISTERS[type(node)](node, result)
            hooks = result._backward_hooks
            _put_in(hooks, 0, self, self.of_tensor)
        else:
            result.register_hook(self.of_tensor)
            hooks = result._backward_hooks
        return hooks

    def is_expected(self) -> bool:
        """Whether it comes in the backward that runs on this thread."""
        return self.seeds.get(threading.get_ident()) is not None

    def _in_place_of(self, total: Tensor, seed: Tensor) -> Tensor | None:
        return seed


@contextmanager
def begun_with(
    seeds: Sequence[tuple[Within, Tensor | None]], *, others_sleep: bool = False
) -> Iterator[None]:
    """Run the backward of a call, which begins with these gradients on this thread.

    Args:
        seeds: of what is called on the way; `None` where it begins with none.
        others_sleep: whether those with none are to do nothing.
    """
    me = threading.get_ident()
    # One may be in the midst of another.
    before = [(within, within.seeds.pop(me, _NO_SEED)) for within, _ in seeds]
    for within, seed in seeds:
        if seed is not None or others_sleep:
            within.seeds[me] = seed
    try:
        yield
    finally:
        for within, seed in before:
            within.seeds.pop(me, None)
            if seed is not _NO_SEED:
                within.seeds[me] = seed
