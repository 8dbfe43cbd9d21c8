"""Apply a function, or modules, to many sets of inputs with concurrent forwards and concurrent backwards.

Both maps have the same three steps, drawn here for three calls; the numbers are used in the comments below:

      1. forwards          2. join               3. backwards
      on threads           on the caller         when the engine reaches the join

      call 0 ──▶ y0 ─┐                           ┌─▶ grads of call 0
      call 1 ──▶ y1 ─┼─▶  one graph node  ───────┼─▶ grads of call 1
      call 2 ──▶ y2 ─┘                           └─▶ grads of call 2

`map_with_parallel_backward` calls an autograd function (`function_calls`), `parallel_apply` calls modules or any
callables (`module_calls`), and in turn where threads would gain nothing (`in_turn`). Threads are `_workers`' business,
random numbers `_random`'s, the node is `join`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import ModuleDict
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import noop_context_fn

from moe_autograd._ambient import refuse_transforms
from moe_autograd._streams import accelerator_in_use, are_elsewhere, use_here
from moe_autograd.autograd.alone import apply_alone, run_alone
from moe_autograd.autograd.contents.in_objects import with_tensors_in_objects
from moe_autograd.autograd.emulated import check_is_function
from moe_autograd.autograd.function_calls import FunctionCall, JoinedFunctions, applies_as_usual
from moe_autograd.autograd.grouping import group_calls, recomputed_in_group, ungroup
from moe_autograd.autograd.in_turn import call_in_turn
from moe_autograd.autograd.joining.join import join
from moe_autograd.autograd.modules.changes import refuse_shared_changes
from moe_autograd.autograd.ordered_hooks import ordered_hooks
from moe_autograd.autograd.recompute import Recompute, as_recompute
from moe_autograd.autograd.runs import Map, run_calls
from moe_autograd.autograd.uncompiled import uncompiled
from moe_autograd.autograd.units import must_be_in_turn, run_units
from moe_autograd.autograd.unrecorded import unrecorded
from moe_autograd.timeline import is_recording

_NOT_RUN = cast(FunctionCall, None)
_NO_HOOKS = contextlib.nullcontext()


@uncompiled
def map_with_parallel_backward(
    func: type[Function], *args_per_call: Sequence[Any], max_concurrency: int | None = None
) -> tuple[Any, ...]:
    """Apply an autograd function to many sets of arguments; all forwards run concurrently, and all backwards.

    Means `tuple(func.apply(*args) for args in args_per_call)`: the same values, structure, `requires_grad` and
    gradients, to any order. Two things differ: calls may wait for each other, and whatever depends on one result
    waits for all calls.

    Why: the engine runs the backward of one device one operation after the other. Sixty-four calls that each wait
    (for a machine, a disk, a lock) wait one by one; here they wait together.

    Args:
        func: a `torch.autograd.Function`: with or without `setup_context`, static or class methods, defaults.
        *args_per_call: one sequence of arguments for each call; tensors of any shape and dtype, other objects,
            different numbers of them. Gradients flow to the tensors, as with `func.apply`.
        max_concurrency: at most so many calls at once, at least 1, which is the order of a loop, backward as well.
            `None`: as many as keep the cores busy, and calls that wait make room for more, up to all of them; all from
            the beginning where those of the last map of `func` did nothing but wait.

    Returns:
        One result for each call, as `func.apply` returns it; `()` without calls.

    Raises:
        TypeError: `func` is not an autograd function, or an element of `args_per_call` not a list or tuple.
        ValueError: `max_concurrency` is less than 1.
        UnsupportedTransformError: inside a `torch.func` transform, or with forward-mode tangents.
        RuntimeError: a call has changed in place what another takes.
        BaseException: of the lowest failing call, with its own type and traceback and a note that names the call,
            after all other calls have come to rest; from a backward likewise.

    Autograd: what a call saves is saved by one outer node: saved-tensor hooks see it, an in-place change before the
        backward raises, it is freed when the call's backward is done. Second order works if `func` supports it.
        A backward through some of the results runs their calls alone, and no autograd function that led only to inputs
        of the other calls. A later one, through other results, is as in a loop (`docs/limits.md`).

    Threads: any thread may call it, also from inside other maps and autograd functions. Ctrl-C returns at once. Calls
        of a function that sets something for the whole process (`sdpa_kernel`), changes a module that calls share
        while it runs (`functional_call`) or talks with other ranks (`all_reduce`), are made one after the other where
        the map sees it.

    Source: the idea is hivemind's (`map_with_parallel_backward`, 2020); this is written anew.

    Example:
        >>> import torch
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> a, b = map_with_parallel_backward(Square, (x,), (x + 1,))
        >>> (a + b).backward()
        >>> x.grad
        tensor([14.])
    """
    check_is_function("map_with_parallel_backward", func)
    check_max_concurrency("map_with_parallel_backward", max_concurrency)
    _check_arguments(args_per_call)
    if not args_per_call:
        return ()
    title = f"map_with_parallel_backward({func.__name__})"
    if len(args_per_call) == 1 and not is_observed():
        return (apply_alone(func, args_per_call[0], title),)
    if must_be_in_turn(func, args_per_call):
        max_concurrency = 1
    if not applies_as_usual(func):
        applied = [func.apply] * len(args_per_call)
        return tuple(parallel_apply(applied, args_per_call, max_concurrency=max_concurrency))
    names = _Names(f"call {{}} ({func.__name__})", len(args_per_call))
    the_map = Map(title, names, max_concurrency, kind=func)
    calls = _run_forwards(func, args_per_call, the_map)  # step 1
    return _tie(calls, the_map)  # step 2; step 3 waits in the graph


def _check_arguments(args_per_call: Sequence[Sequence[Any]]) -> None:
    for index, args in enumerate(args_per_call):
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"map_with_parallel_backward: expected a tuple of arguments for call {index}, got "
                f"{type(args).__name__}. Write map_with_parallel_backward(func, (x0,), (x1,)) for single arguments; "
                "of tuples in a list, map_with_parallel_backward(func, *calls)."
            )
    refuse_transforms(a for args in args_per_call for a in args if isinstance(a, Tensor))


def _run_forwards(
    func: type[Function], args_per_call: Sequence[Sequence[Any]], the_map: Map
) -> list[FunctionCall]:
    calls: list[FunctionCall] = [_NOT_RUN] * len(args_per_call)
    is_recorded = torch.is_grad_enabled()
    hooks = ordered_hooks(len(args_per_call))
    has_streams = accelerator_in_use() is not None
    if has_streams:
        the_map = the_map._replace(shares_weights=_share_a_leaf(args_per_call))

    def forward(index: int) -> None:
        if has_streams:
            use_here(args_per_call[index])
        # for graphs within the call; what the call itself saves meets them at the join
        with _NO_HOOKS if hooks is None else hooks.of(index):
            calls[index] = FunctionCall(func, tuple(args_per_call[index]), is_recorded=is_recorded)

    computes_elsewhere = has_streams and any(map(are_elsewhere, args_per_call))
    try:
        unrecorded(partial(run_calls, forward, the_map, "forward", computes_elsewhere=computes_elsewhere))
    except BaseException:
        calls.clear()  # `forward` holds them, and the traceback that
        raise
    changed = [call.changed for call in calls]
    if any(changed):
        taken = [call.inputs for call in calls]
        refuse_shared_changes("map_with_parallel_backward", the_map.names, changed, taken, sees_own=True)
    return calls


def _share_a_leaf(args_per_call: Sequence[Sequence[Any]]) -> bool:
    leaves = [{id(a) for a in args if isinstance(a, Tensor) and a.is_leaf} for args in args_per_call]
    return len(set().union(*leaves)) < sum(map(len, leaves))


def _tie(calls: Sequence[FunctionCall], the_map: Map) -> tuple[Any, ...]:
    try:
        tied = join(JoinedFunctions(calls, the_map))
    except BaseException:
        for call in calls:
            call.forget_returned()
        raise
    returned = tuple([call.take_returned(results) for call, results in zip(calls, tied, strict=True)])
    if accelerator_in_use() is not None:
        use_here(with_tensors_in_objects([result for result in returned if not isinstance(result, Tensor)]))
    return returned


class _Names(Sequence[str]):
    """The names of calls, made when somebody asks for one."""

    def __init__(self, template: str, count: int) -> None:
        self._template, self._count = template, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)  # which ends a loop over them
        return self._template.format(index)


@uncompiled
def parallel_apply(
    modules: Iterable[Callable[..., Any]],
    inputs: Iterable[Any],
    kwargs_tup: Iterable[Mapping[str, Any]] | None = None,
    *,
    max_concurrency: int | None = None,
    recompute: bool | Recompute = False,
    defer_weight_grads: bool = False,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Call each module with its inputs; all forwards run concurrently, and all backwards.

    Means `[m(*x, **k) for m, x, k in zip(modules, inputs, kwargs_tup)]`, as `torch.nn.parallel.parallel_apply`
    does on several devices; here on one, and the backwards are concurrent as well.

    Args:
        modules: any callables. The same one may stand in several places.
        inputs: for each module its positional arguments, a tuple or list (a single tensor counts as a tuple of
            one, as in torch): any pytrees of tensors and other objects.
        kwargs_tup: for each module its keyword arguments, any pytrees.
        max_concurrency: at most so many calls at once, at least 1; `None` leaves the number to the library.
        recompute: keep only inputs, and run each forward again when its backward comes, with the same random
            numbers and autocast (`torch.utils.checkpoint`, without its `use_reentrant`). A `Recompute` says how.
        defer_weight_grads: let the backward go on upstream as soon as the gradients of the inputs are there; idle
            workers compute those of the weights meanwhile, and all are there when the backward returns. Where calls
            are too small for a thread, or a backward cannot be in two parts (`deferred`, Rule 4), with `recompute` and
            on an accelerator, whose kernels nobody waits for, nothing is deferred.
        names: for each call what errors and profiles are to call it; `None`: its place, and `expert_name` or class
            of its module.

    Returns:
        What each module returned: tensors, any pytrees, and objects that hold tensors (dataclasses, distributions).
        Such an object is itself returned, with the results in the places of its tensors. Gradients flow to inputs, to
        the parameters that a call reached (also through a closure) and to tensors with history that a callable's
        closure or an object among its arguments holds.

    Raises:
        ValueError: lists of different lengths; `max_concurrency` less than 1.
        TypeError: one module instead of several; keyword arguments that are no dict. A call takes or returns a nested
            tensor of layout `torch.strided` that requires a gradient; `torch.jagged` will do. A call holds a module
            that `fully_shard` has wrapped, or another wrapper that would reduce gradients too early. Another
            `recompute`.
        UnsupportedTransformError: inside a `torch.func` transform, or with forward-mode tangents.
        RuntimeError: calls that share a module have changed it side by side; a call has changed in place what another
            takes, or it takes by another way.
        BaseException: of the lowest failing call, with its own type and traceback and a note that names the call.

    Autograd: hooks on parameters run once, `.grad` is accumulated once, parameters that no call reached get none.
        `torch.autograd.grad` on inputs alone computes no weight gradients. Gradients of any order. A backward through
        some results is as with `map_with_parallel_backward`; with `defer_weight_grads` it also walks what the other
        calls' inputs were computed with. An input that requires a gradient is in its call another tensor, of the same
        memory and attributes: not a leaf, without a `.grad`, and no longer a `Parameter`. A list or dict that holds one
        is a copy: to put a result into it raises, unless the call returns it too; any other is the caller's own.

    Threads: any thread may call it, also from inside other maps. The forward of a module that stands in several
        places may run on several threads at once. Calls that share a module with running statistics (`BatchNorm`), as
        a part or in a closure, take turns, since these have to be those of a loop: they cannot wait for each other in
        the forward. So do calls that share a module which one of them changes while it runs, as `functional_call` does;
        where nothing tells that, a call that meets the change raises. Modules that would rather be called together have
        a `call_group`: all of one group are one call. Calls that talk with other ranks, as those with `DTensor`s do, or
        set something for the whole process (`sdpa_kernel`, forward-mode differentiation), are made one after the other;
        where the map cannot find out, pass `max_concurrency=1`.

    Example:
        >>> import torch
        >>> experts = [torch.nn.Linear(4, 4) for _ in range(3)]
        >>> tokens = [torch.randn(5, 4) for _ in range(3)]
        >>> outputs = parallel_apply(experts, [(t,) for t in tokens])
        >>> sum(y.sum() for y in outputs).backward()
    """
    modules = _as_list(modules)
    how = as_recompute(recompute)
    args, kwargs = _checked_arguments(modules, inputs, kwargs_tup, names)
    check_max_concurrency("parallel_apply", max_concurrency)
    taken = (value for own in (args, kwargs) for value in tree_leaves(own))
    refuse_transforms(value for value in taken if isinstance(value, Tensor))
    if not modules:
        return []
    if _is_plain(how) and not is_observed():
        is_noticed = torch.is_grad_enabled() or how != Recompute()
        returned = call_in_turn(
            modules,
            args,
            kwargs,
            names,
            max_concurrency=None if defer_weight_grads else max_concurrency,
            only_small=defer_weight_grads,
            how=how if is_noticed else None,
        )
        if returned is not None:
            return returned
    if how is not None:
        modules = [recomputed_in_group(module, how) for module in modules]
    units = group_calls(modules, args, kwargs, names)
    if len(units) == 1 and units[0].is_group:  # it sees to its own concurrency
        returned = [run_alone(units[0].run, (), units[0].name, "parallel_apply")]
    else:
        returned = run_units(units, modules, max_concurrency, how, defer_weight_grads)
    return ungroup(units, returned, len(modules))


def _as_list(modules: Any) -> list[Callable[..., Any]]:
    if not isinstance(modules, list):  # mostly they are; the other looks take longer
        if not isinstance(modules, Iterable):
            raise TypeError(
                f"parallel_apply: expected several modules, got one {type(modules).__name__}. "
                "Write [module] * len(inputs)."
            )
        if isinstance(modules, Mapping | ModuleDict):
            raise TypeError(
                f"parallel_apply: expected modules in a sequence, got a {type(modules).__name__}. Pass its values()."
            )
    return list(modules)


def _checked_arguments(
    modules: Sequence[Any],
    inputs: Iterable[Any],
    kwargs_tup: Iterable[Mapping[str, Any]] | None,
    names: Sequence[str] | None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    args = [x if type(x) is tuple else _as_tuple(x) for x in inputs]
    kwargs = [{} for _ in modules] if kwargs_tup is None else [_as_dict(own) for own in kwargs_tup]
    if not len(modules) == len(args) == len(kwargs):
        raise ValueError(
            f"parallel_apply: expected as many inputs and kwargs as modules, got {len(modules)} modules, "
            f"{len(args)} inputs and {len(kwargs)} kwargs. Pass one of each for every call."
        )
    if names is not None and len(names) != len(modules):
        raise ValueError(
            f"parallel_apply: expected as many names as modules, {len(modules)}, got {len(names)}. "
            "Pass one for each call, or None."
        )
    return args, kwargs


def _as_tuple(own: Any) -> tuple[Any, ...]:
    return tuple(own) if isinstance(own, tuple | list) else (own,)


def _as_dict(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            f"parallel_apply: expected a dict of keywords for each call, got {type(kwargs).__name__}. Pass {{}}."
        )
    return dict(kwargs)


def _is_plain(how: Recompute | None) -> bool:
    """Whether calls run as they are, perhaps twice: what a `context_fn` of one's own does is its own business."""
    return how is None or how.context_fn is noop_context_fn


def is_observed() -> bool:
    """Whether somebody wants to see each call by its name."""
    return torch.autograd.profiler._is_profiler_enabled or is_recording()


def check_max_concurrency(caller: str, max_concurrency: int | None) -> None:
    """Raise `ValueError` unless `max_concurrency` is `None` or a positive whole number."""
    if max_concurrency is not None and (not isinstance(max_concurrency, int) or max_concurrency < 1):
        raise ValueError(
            f"{caller}: expected max_concurrency to be None or a whole number of at least 1, got {max_concurrency!r}. "
            "Pass None to leave the number to the library."
        )
