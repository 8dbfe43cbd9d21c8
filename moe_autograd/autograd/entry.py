"""Where tensors enter the graphs of module calls.

An entry, in the words of `module_calls` (Rule 1), is a node between one of the callers' tensors and the calls' own
graphs.

A hook that a call registers on its input is meant for the caller's tensor, which the call does not know from its
alias: it is to see the whole gradient, once. On an alias it would not run at all where the call returns its input, and
see but a part of the gradient where others take the same tensor. So it moves to the caller's tensor when the calls have
ended, and until then runs in the backwards that a call starts itself. A forward that is run again in the backward
registers its hooks again; these move when all backwards of the map have ended, just before the caller's tensor gets
its gradient.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import TreeSpec, tree_flatten

from moe_autograd._contexts import contextmanager
from moe_autograd._random import running
from moe_autograd._streams import accelerator_in_use, as_on_lane
from moe_autograd.autograd.contents.in_objects import makes_itself, notes_on, put_on
from moe_autograd.autograd.contents.leaves import LookedThrough, leaves_of
from moe_autograd.autograd.grad_dtypes import MAY_DECLARE, GradDtypes, declare, differs, to_declare
from moe_autograd.autograd.runs import Map
from moe_autograd.autograd.uncompiled import left_alone
from moe_autograd.autograd.walks import gradient_edge, walk
from moe_autograd.autograd.wrapped_hooks import WrappedHook, waited_for

Hook = Callable[[Tensor], Tensor | None]
# arguments and how they were nested; `None`: positional ones, not nested
Flat = tuple[list[Any], TreeSpec | None]
_NO_LANE = contextlib.nullcontext()

ESCAPED = (
    "parallel_apply: expected tensors with history to leave a call as its result, got one that left by another way "
    "(kept by a module, closure or argument, in a set or function). Return it, also in an object, or keep what the map "
    "returns."
)


class _Entry(Function):
    """Rule 1. The anchor is a leaf that makes the alias part of a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, grad_dtypes: GradDtypes) -> Tensor:
        declare(ctx, grad_dtypes)
        return tensor.detach()  # as it is, it would be a view of itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(ESCAPED)  # Rule 9


_ENTRY_NODE = _Entry._backward_cls


class _Past(Function):
    """Has the history that a tensor had, and its shape; no memory."""

    only_computes = True  # see `upper_cuts`

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        declare(ctx, to_declare([tensor]))
        if tensor.layout is not torch.strided:
            return tensor.detach()
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def past(tensor: Tensor) -> Tensor:
    """Return what gradients reach the present history of `tensor` by, when it has another."""
    with torch.enable_grad():
        return cast(Tensor, _Past.apply(tensor))  # type: ignore[no-untyped-call]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], known: LookedThrough | None = None) -> Flat:
    """Flatten the arguments of a call; most calls take tensors alone, and need no pytree.

    A container in which nothing requires a gradient is not taken apart: what a call puts into it reaches its caller.
    """
    if not kwargs and all(type(value) is Tensor for value in args):
        return list(args), None
    own: LookedThrough = {}
    flat = tree_flatten((args, kwargs), is_leaf=not_taken_apart(own if known is None else known))
    own.clear()
    return flat


def not_taken_apart(known: LookedThrough) -> Callable[[object], bool]:
    """Return what tells of a value of what calls take or return whether it is a leaf of that.

    It stays, as nothing in it requires a gradient, or only its class could make it again. `known` is to be cleared
    afterwards: `tree_flatten` leaves a cycle, which leads to it.
    """

    def is_leaf(value: object) -> bool:
        if isinstance(value, Tensor):
            return not value.requires_grad
        leaves = leaves_of(value, known)
        stays = not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        return stays or makes_itself(value)

    return is_leaf


def is_alias_of(node: Node | None, tensor: Tensor) -> bool:
    """Whether a node is where an alias of a tensor enters; not of an alias, which a call within may hold."""
    return is_entry(node) and node.hooks.tensor_if_alive() is tensor  # type: ignore[union-attr]


def retaining(cuts: Iterable[tuple[GradientEdge, Tensor]]) -> set[int]:
    """Return by `id` what a backward that ends at cuts adds to: tensors that retain gradients, aliases by nodes."""
    found = set[int]()
    for edge, tensor in cuts:
        node: Any = edge.node
        if is_entry(node) and node.hooks.retains_grad:
            found.add(id(node))
        if tensor.retains_grad and not is_alias_of(node, tensor):
            found.add(id(tensor))
    return found


class Entrance:
    """The aliases of the tensors that the calls of one map take.

    Args:
        values_of: what each call takes.
        the_map: of the calls.

    Attributes:
        aliases: of each tensor that requires a gradient, by the tensor's `id` (Rule 1).
    """

    def __init__(self, values_of: Sequence[Sequence[Any]], the_map: Map) -> None:
        self.aliases: dict[int, Tensor] = {}
        self._hooks: list[_AliasHooks] = []
        if torch.is_inference_mode_enabled():
            return
        taken: dict[int, tuple[Tensor, int]] = {}  # each with the first call that takes it
        for call, values in enumerate(values_of):
            for value in values:
                if isinstance(value, Tensor) and value.requires_grad:
                    taken.setdefault(id(value), (value, call))
        if not taken:
            return
        anchor, entrance = torch.empty(0, requires_grad=True, device="cpu"), object()
        has_lanes = accelerator_in_use() is not None and the_map.has_lanes()
        for key, (tensor, call) in taken.items():
            if not MAY_DECLARE and differs(tensor):
                continue  # it is a leaf, where a call's graph may end as well
            hooks = _AliasHooks(tensor, entrance)
            self._hooks.append(hooks)
            with as_on_lane(the_map.number_of(call)) if has_lanes else _NO_LANE:
                self.aliases[key] = _alias(tensor, anchor, hooks)

    def refuse_replaced(self, caller: str) -> None:
        """Raise if a call has detached an input, or given it other memory: the caller's tensor has its own.

        Raises:
            RuntimeError: one has, by `input.detach_()` or `input.data = ...`.
        """
        for hooks, alias in zip(self._hooks, self.aliases.values(), strict=True):
            if not alias.requires_grad:
                raise RuntimeError(
                    f"{caller}: expected calls to leave the history of their inputs as it is, got an input of shape "
                    f"{tuple(alias.shape)} that a call has detached in place. The caller's tensor would keep its own: "
                    "use `detach()`, or make the calls in a plain loop."
                )
            has_memory = type(alias) is Tensor and alias.layout is torch.strided
            if has_memory and alias.data_ptr() != hooks.tensor().data_ptr():
                raise RuntimeError(
                    f"{caller}: expected calls to leave the memory of their inputs where it is, got an input of shape "
                    f"{tuple(alias.shape)} whose `data` a call has set. The caller's tensor would keep its own: change "
                    "it in place, or make the calls in a plain loop."
                )

    def has(self, node: Node) -> bool:
        """Whether a node is where one of these tensors enters."""
        return is_entry(node) and any(node.hooks is hooks for hooks in self._hooks)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of the aliases when all calls have been made, and move the hooks that these registered."""
        for hooks, alias in zip(self._hooks, self.aliases.values(), strict=True):
            hooks.close(retains_grad=alias.retains_grad)
        self.aliases.clear()
        self.move_hooks()

    def move_hooks(self) -> None:
        """Register what calls have registered on aliases on the tensors that these stand for."""
        for hooks in self._hooks:
            hooks.move()


class _AliasHooks(collections.OrderedDict[int, Hook]):
    """The hooks of an alias, as `Tensor.register_hook` and its handles know them.

    A change in place gives an alias another history, and torch another dictionary.
    """

    def __init__(self, tensor: Tensor, entrance: object) -> None:
        super().__init__()
        self._tensor = weakref.ref(tensor)
        self._entrance = entrance  # the same for all aliases of one map; a token, which leads to nothing
        self._moving: list[tuple[int, _MovedHook]] = []
        self._is_closed = False
        self.retains_grad = False  # the alias

    def __setitem__(self, key: int, hook: Hook) -> None:
        self._wait_for_callers_tensors(hook)
        super().__setitem__(key, _do_nothing if self._is_closed else hook)
        self._moving.append((running.index, _MovedHook(hook, self, key)))

    def close(self, *, retains_grad: bool = False) -> None:
        """Let nothing run on the alias from now on."""
        self._is_closed = True
        for key in self:
            super().__setitem__(key, _do_nothing)
        self.retains_grad = retains_grad
        tensor = self._tensor()
        if retains_grad and tensor is not None:
            tensor.retain_grad()

    def tensor(self) -> Tensor:
        """Return the caller's tensor; a call that takes it, and so holds it, is under way."""
        tensor = self.tensor_if_alive()
        if tensor is None:  # the call is made again, and what it takes has escaped a map that was
            raise RuntimeError(ESCAPED)
        return tensor

    def tensor_if_alive(self) -> Tensor | None:
        """Return the caller's tensor; `None` if nobody has it any more."""
        return self._tensor()

    def again(self, unpacked: Tensor) -> _AliasHooks:
        """Return the hooks of another alias of the same tensor, made of what the first one was unpacked to.

        Within a checkpoint nobody may have the caller's tensor any more, if no gradient flows to it: then that will do.
        """
        tensor = self.tensor_if_alive()
        other = _AliasHooks(unpacked if tensor is None else tensor, self._entrance)
        other._moving = self._moving
        return other

    def _wait_for_callers_tensors(self, hook: Hook) -> None:
        """Let a hook of `register_multi_grad_hook(mode="all")` count the gradients of these, and not of aliases."""
        nodes = waited_for(hook)
        for i, node in enumerate(nodes):
            if self._is_sibling(node):
                nodes[i] = gradient_edge(node.hooks.tensor()).node
            elif self._is_computed_from_siblings(node):
                raise RuntimeError(
                    "register_multi_grad_hook: expected inputs of the call that registers it, parameters and tensors "
                    f"from outside, got inputs together with what the call has computed from them ({node.name()}). "
                    "Register one hook on the inputs and another on the rest: their gradients are those of two graphs."
                )

    def _is_sibling(self, node: Any) -> bool:
        return is_entry(node) and node.hooks._entrance is self._entrance

    def _is_computed_from_siblings(self, node: Node) -> bool:
        return any(self._is_sibling(one) for one, _ in walk([(node, 0)]))

    def move(self) -> None:
        """Register the hooks on the caller's tensor, in the order of the calls."""
        if not self._moving:
            return
        moving = sorted(self._moving, key=itemgetter(0))
        self._moving.clear()
        tensor = self._tensor()
        if tensor is not None:  # else nobody asks for its gradient
            _ = tensor.grad_fn  # unseen since a change, that of a view crashes `register_hook`
            for _, hook in moving:
                tensor.register_hook(hook)


class _MovedHook(WrappedHook):
    """A hook that was registered on an alias, on the caller's tensor; its handle still removes it."""

    def __init__(self, hook: Hook, hooks: _AliasHooks, key: int) -> None:
        super().__init__(hook)
        self._hooks, self._key = hooks, key

    @left_alone
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Moved in a backward, it is met in this one without a gradient, too, where the others sleep."""
        is_met_alone = grad is None and not waited_for(self._hook)
        return None if is_met_alone or self._key not in self._hooks else self._hook(grad)


def _do_nothing(grad: Tensor) -> None:
    return None


def refuse_strided_nested(tensor: Tensor) -> None:
    """Raise where PyTorch's autograd functions, of which a join is one, fail with an internal error.

    Raises:
        TypeError: it is a nested tensor of the older kind.
    """
    if tensor.is_nested and tensor.layout is torch.strided:
        raise TypeError(
            "parallel_apply: expected tensors that an autograd function can take, got a nested tensor of layout "
            "torch.strided. Make it with layout=torch.jagged."
        )


def _alias(tensor: Tensor, anchor: Tensor, hooks: _AliasHooks) -> Tensor:
    refuse_strided_nested(tensor)
    # Detached: were the entry to lead on to the callers' graph, an inner backward could run on into it and reach a
    # parameter that serves there, too.
    with torch.enable_grad():
        alias: Tensor = _Entry.apply(anchor, tensor.detach(), to_declare([tensor]))  # type: ignore[no-untyped-call]
    put_on(alias, notes_on(hooks.tensor()))
    entry: Any = alias.grad_fn
    entry.hooks = alias._backward_hooks = hooks
    entry._register_hook_dict(alias)  # as `Tensor.register_hook` does for a dictionary of its own
    return alias


def is_entry(node: Node | None) -> bool:
    """Whether a node is one where a caller's tensor enters the graph of a call."""
    return type(node) is _ENTRY_NODE


@contextmanager
def entered_again(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, a call is made with `values`, for the first time or again.

    Again, its tensors are what saved aliases were unpacked to: other objects, of which the entry knows nothing. In
    their place there are new aliases, so that hooks wait with those of the first ones.
    """
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    entered, all_hooks = list(values), []
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and is_entry(value.grad_fn) and value._backward_hooks is None:
            hooks = value.grad_fn.hooks.again(value)  # type: ignore[union-attr]
            all_hooks.append(hooks)
            # `torch.vmap` around the backward would want a rule of the entry; what was saved is of no transform.
            with temporarily_clear_interpreter_stack():
                entered[place] = _alias(value, anchor, hooks)
    try:
        yield entered
    finally:
        for hooks in all_hooks:
            hooks.close()
