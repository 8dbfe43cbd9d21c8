"""Calls that only compute, where threads would gain nothing: for them the plain loop is the map.

A call that can neither wait nor be waited for may as well be made in turn, in the caller's own graph: nobody can
tell, but by the clock. And the clock is for it where a call is

- *small*: a thread, and a graph of its own, cost a call some tenths of a millisecond, in which it keeps others waiting;
- *large*: each of its operators keeps all cores busy with a team of intra-op threads. Calls side by side are no faster
  then, and each holds intermediate results: a quarter more memory with two;
- *elsewhere*, on a GPU: there it is queued, in less time than a thread and a graph of its own take.

So a map is made as the loop that it means, if each of its calls is small, large or elsewhere, or no two of them may or
can compute at once (one call has none beside it), and

1. each module, with all of its parts, is of a class known to do nothing but arithmetic on its arguments, which are
   tensors, numbers and tuples of them: one of `ONLY_COMPUTE`, one with a method `only_computes()` of its own (not
   inherited) that returns `True`, or one without, whose `forward` can be read to do no more (`arithmetic`). Functions
   and methods of modules can be read, too (`callees`). Calls that draw for a dropout have random numbers of their own,
   as on threads;
2. nothing of a user's runs within it: no hooks, no `forward` or `_call_impl` put into the instance, nothing put in the
   place of what torch's classes compute, no tensors of other classes. Modes see what is computed, as on threads: both
   runs of a checkpoint are alike, also if one is under a mode;
3. it changes nothing in place, but statistics of norms, in the loop's order, and what a part before has made
   (`_changes_its_own`);
4. no group of the module's makes its calls (`grouping`).

With `recompute=True` it is the loop of checkpoints, whose second runs draw what the first ones drew.

What `Module.__call__` does, besides calling `forward`, is to look for hooks. That is done already (rule 2), so parts of
torch's own classes are computed without it: of tiny experts a loop spends an eighth of its forward there. Where
somebody has replaced how modules are called, to see them, each is called.

A call that raises ends them, as in the loop: hooks for saved tensors and modes have seen what was called, as those of
`torch.utils.checkpoint`, which ends a second run by raising.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from moe_autograd._intraop import num_cores
from moe_autograd._random import CallSeeds, own_streams, running
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.reading.arithmetic import Reading
from moe_autograd.autograd.reading.callees import Callees
from moe_autograd.autograd.reading.composed import COMPOSED
from moe_autograd.autograd.reading.known_arithmetic import is_torchs_own
from moe_autograd.autograd.reading.sizes import size_of
from moe_autograd.autograd.reading.work import ONLY_COMPUTE, work_of
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.runs import name_of_call

MOST_SMALL = 1 << 20
# With one intra-op thread, on two cores: calls of 2^22 and their backwards took 1.9 times as long on threads, those of
# 2^23 1.2 times and those of 2^24 0.85 times; forwards alone 2.2, 1.8 and 1.2 times. More cores share more.
ALONE_SHARE = 4
# Where intra-op threads keep the cores busy in a loop as well, a small call may be so much larger: on two idle cores
# calls of 2^25 to 2^27 took a tenth to two thirds longer on threads, those of 2^29 a twentieth.
TEAM_SHARE = 128
LEAST_LARGE = 1 << 30  # for each intra-op thread

_WARN = frozenset([nn.LogSoftmax, nn.Softmax, nn.Softmin])  # of a missing `dim`, and of the line that called


def _called_by(kind: type[nn.Module]) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Return what one of torch's modules calls in `forward`, and in its methods: where it is, its name, and itself."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions: list[Any] = [kind.forward, *_CALLED_BESIDES.get(kind, [])]
    found: list[tuple[Mapping[str, Any], str, Any]] = []
    for function in functions:  # which grows
        for name in function.__code__.co_names:
            of_torch = [(vars(module), name, vars(module).get(name)) for module in (F, torch)]
            found += [one for one in of_torch if callable(one[2]) and not isinstance(one[2], type)]
            base = next((base for base in bases if type(vars(base).get(name)) is FunctionType), None)
            if base is not None and (method := vars(base)[name]) not in functions:
                found.append((vars(base), name, method))
                functions.append(method)
    return found


# What these are, and what they call, to see whether somebody has put something else there.
_CALLED_BESIDES: Mapping[type[nn.Module], Sequence[Any]] = {
    nn.MultiheadAttention: [F.multi_head_attention_forward]
}
_FORWARDS = {kind: kind.forward for kind in ONLY_COMPUTE}
_FUNCTIONAL = {kind: _called_by(kind) for kind in ONLY_COMPUTE}
_WERE_REPLACED = {
    kind
    for kind, forward in _FORWARDS.items()
    if not all(map(is_torchs_own, [forward, *[function for *_, function in _FUNCTIONAL[kind]]]))
}

HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    module_globals._global_forward_hooks,
    module_globals._global_forward_pre_hooks,
    module_globals._global_backward_hooks,
    module_globals._global_backward_pre_hooks,
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_in_turn(
    modules: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    names: Sequence[str] | None = None,
    *,
    max_concurrency: int | None = None,
    only_small: bool = False,
    how: Recompute | None = None,
) -> list[Any] | None:
    """Return what the modules return, called in turn in the caller's graph; `None` where threads may gain something.

    An error of a call gets a note with its name.

    Args:
        modules: the callables.
        args: of each its arguments.
        kwargs: of each its keyword arguments.
        names: of the calls.
        max_concurrency: how many may be made at once.
        only_small: whether large calls gain by something else, be there only one.
        how: forwards run again in the backward; `None`: they do not.
    """
    way = way_in_turn(modules, args, kwargs, max_concurrency=max_concurrency, only_small=only_small, how=how)
    if way is None:
        return None
    streams = own_streams(CallSeeds()) if way.draws else nullcontext()
    returned: list[Any] = []
    try:
        with streams:
            for index, (module, own_args, own_kwargs) in enumerate(zip(modules, args, kwargs, strict=True)):
                if way.draws:
                    running.index = index
                if way.run is not None:
                    returned.append(way.run(module, *own_args, **own_kwargs))
                elif own_kwargs or len(own_args) != 1:
                    returned.append(module(*own_args, **own_kwargs))
                else:
                    returned.append(way.compute(module, own_args[0]))
    except BaseException as error:
        streams.__exit__(None, None, None)
        name_guilty_in_turn(error, len(returned), modules, names)
        raise
    return returned


def name_guilty_in_turn(
    error: BaseException, num_made: int, modules: Sequence[Callable[..., Any]], names: Sequence[str] | None
) -> None:
    """Add a note to what a call has raised, when so many were made, that names it."""
    index = min(num_made, len(modules) - 1)  # Ctrl-C may come behind the last call
    name = name_of_call(index, modules[index], names)
    add_note(error, f"parallel_apply, forward: raised by {name} of {len(modules)}.")


class Way(NamedTuple):
    """How calls are made in turn.

    Args:
        draws: whether some may draw random numbers: then each has its own.
        run: calls a module such that it runs again in the backward; `None`: they do not.
        compute: calls one with a single argument.
    """

    draws: bool
    run: Callable[..., Any] | None
    compute: Callable[[Any, Tensor], Any]


def way_in_turn(
    modules: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    *,
    max_concurrency: int | None = None,
    only_small: bool = False,
    how: Recompute | None = None,
) -> Way | None:
    """Return how `call_in_turn` makes these calls; `None` if threads may gain something, or somebody could tell.

    Args: as there. Of tensors among the arguments only shapes, dtypes and devices count.
    """
    if any(HOOKS_OF_ALL):
        return None
    if len(modules) == 1 and not only_small:
        max_concurrency = 1  # nothing is there to run beside it
    most = most_small(max_concurrency)
    are_seen, are_read = _is_seen_by_others(), True
    draws, callees = are_seen, Callees()
    readings, kinds = dict[type, Reading | None](), set[type[nn.Module]]()
    for module, own_args, own_kwargs in zip(modules, args, kwargs, strict=True):
        taken = (*own_args, *own_kwargs.values()) if own_kwargs else own_args
        callee = None
        if not isinstance(module, nn.Module):
            callee = callees.callee(module, own_args, own_kwargs)
            if callee is None or hasattr(module, "call_group"):
                return None
            taken = (*taken, *callee.taken)
        elif hasattr(type(module), "call_group") or "call_group" in module.__dict__:
            return None
        size = size_of(taken)
        if size is None or (work := work_of(module, size, readings, kinds, callee)) is None:
            return None
        if size.is_here and work.most > most and (only_small or work.least < least_large()):
            return None
        if how is not None and (are_seen or not size.is_here):
            return None
        draws, are_read = draws or work.draws, are_read and work.is_read
    if not _compute_as_usual(kinds):
        return None
    run = None if how is None else how.with_draws if draws else how.without_draws if are_read else how
    return Way(draws, run, _computed if _are_called_as_usual(kinds) else _called)


def _is_seen_by_others() -> bool:
    """Whether modes, or hooks for saved tensors, see what is computed; they may draw random numbers for it."""
    has_modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(has_modes) or hooks is not None


def _compute_as_usual(kinds: Iterable[type[nn.Module]]) -> bool:
    """Whether nobody has replaced what these of torch's modules do, or the functions by which they do it."""
    for kind in kinds:
        if kind.forward is not _FORWARDS[kind] or kind in _WERE_REPLACED:
            return False
        for functions, name, function in _FUNCTIONAL[kind]:
            if functions.get(name) is not function:
                return False
    return True


def _are_called_as_usual(kinds: Iterable[type[nn.Module]]) -> bool:
    """Whether nobody has replaced what calls these, or the parts of a `Sequential`; perhaps before our import."""
    called: list[type[nn.Module]] = [nn.Module, *kinds]
    calls = {(kind.__call__, kind._call_impl, kind._compiled_call_impl) for kind in called}
    if len(calls) > 1 or not _is_of_torchs_modules(nn.Sequential.__iter__):
        return False
    (call, implementation, compiled), *_ = calls
    return _is_of_torchs_modules(call) and _is_of_torchs_modules(implementation) and compiled is None


def _is_of_torchs_modules(function: Any) -> bool:
    """Whether it is in a file of torch's modules: others of torch's replace it, such as `torch.fx` while it traces."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.startswith("torch.nn.modules.")


def _called(module: Any, x: Tensor) -> Any:
    return module(x)


def _computed(module: Any, x: Tensor) -> Any:
    """Return what `module` returns, of which `work_of` knows that nobody watches it."""
    kind = type(module)
    if kind not in ONLY_COMPUTE or "_compiled_call_impl" in module.__dict__ or kind in _WARN:
        return module(x)
    if kind is nn.Sequential:
        for part in module._modules.values():
            x = _computed(part, x)
        return x
    return module.forward(x)


def is_small(module: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call, with one intra-op thread, takes less time than a thread costs, and can neither wait nor draw."""
    size, kinds = None if any(HOOKS_OF_ALL) else size_of(args), set[type[nn.Module]]()
    work = None if size is None else work_of(module, size, {}, kinds)
    if work is None or work.most > MOST_SMALL or work.draws:
        return False
    return kinds.isdisjoint(COMPOSED) and _compute_as_usual(kinds)  # those are slow however small


def is_watched(module: nn.Module) -> bool:
    """Whether something of a user's sees the module's calls: hooks, or a `forward` put into the instance."""
    own = module.__dict__
    return any(HOOKS_OF_ALL) or "forward" in own or any(own[kind] for kind in HOOKS)


def most_small(max_concurrency: int | None = None) -> float:
    """Return how much work a small call is at most; where no two could compute at once, all are small."""
    cores = num_cores()
    if max_concurrency == 1 or cores == 1:
        return MOST_SMALL * math.inf
    if torch.get_num_threads() > 1:
        return MOST_SMALL * TEAM_SHARE
    share = ALONE_SHARE if torch.is_grad_enabled() else 2 * ALONE_SHARE
    return MOST_SMALL * share * cores // (cores - 1)


def least_large() -> float:
    """Return how much work a large call is at least."""
    num_threads = torch.get_num_threads()
    return LEAST_LARGE * num_threads if num_threads >= num_cores() else math.inf
