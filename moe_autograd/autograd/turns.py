"""Calls of a map that share a module take turns, where what one of them does to it would matter to the others.

`BatchNorm` and its like add statistics to their buffers in the forward. In a plain loop each call adds to what the one
before it left; side by side, additions get lost, and which ones is left to chance. So the forward of such a call begins
when those before it that share such a module are over, whether they share it as a whole, as a part of different
modules, or through a closure. So do calls of a lazy module, whose first one makes its parameters, and calls that share
a module which one of them changes while it runs (`named`), as `functional_call` does, or a `torch.Generator`, from
which they draw then what a loop draws. Calls that share none do not wait, and look whether what else they share is as
it was (`watched`). A backward changes statistics only where it runs the forward, or a checkpoint within it, again:
there calls take turns as well, the last one first, as in a loop. So do backwards that end at one tensor that retains
its gradient: PyTorch adds to it without a lock.

Of a module with buffers that is not of torch's kinds nobody can tell before: if the calls that share it have changed
its buffers, the map raises. A module may say it by an attribute `keeps_statistics`: `True`, and its calls take turns;
`False`, and what it changes of itself is its author's business.

Threads: calls of a map begin in the order of their turns (`_workers`), so whoever is waited for has begun. What they
cannot do is wait for each other in the forward; as nobody can tell that from a long computation, it gives a warning.
"""

from __future__ import annotations

import collections
import itertools
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from moe_autograd._streams import continue_after, queued_here
from moe_autograd._waiting import wait
from moe_autograd.autograd.contents.in_modules import NOT_MADE_YET
from moe_autograd.autograd.contents.reaching import Held
from moe_autograd.autograd.grouping import around
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.watched import State, Watched

WARN_AFTER_S = 60.0

# Of calls, by their `id`, in the backward that runs: two at once may walk the same graph, each with turns of its own.
# As `looked_at`, it does not lead to the calls.
taken_turns: ContextVar[Mapping[int, Turn]] = ContextVar("taken_turns", default=MappingProxyType({}))
_Embeddings = nn.Embedding | nn.EmbeddingBag
_T = TypeVar("_T")


class Turn:
    """A context that is entered when others have been left, on an accelerator as well."""

    def __init__(self, name: str, before: Iterable[Turn]) -> None:
        self._name, self._before = name, before
        self._is_over = threading.Event()
        self._queued: Sequence[torch.Event] = ()

    def __enter__(self) -> None:
        try:
            for turn in self._before:
                if not wait(turn._is_over.wait, WARN_AFTER_S):
                    self._warn_of(turn)
                    wait(turn._is_over.wait)
                continue_after(turn._queued)
        except BaseException:  # such as Ctrl-C: the next one must not wait for ever
            self._is_over.set()
            raise
        self._before = ()

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._queued = queued_here()
        finally:
            self._is_over.set()

    def _warn_of(self, other: Turn) -> None:
        warnings.warn(
            f"parallel_apply: expected {other._name} to end, got none of its results in {WARN_AFTER_S:g} s; "
            f"{self._name} waits for it, as both have a module that keeps running statistics, or that one of them "
            "changes while it runs, or a torch.Generator, or, in the backward, hold a tensor that retains its "
            "gradient. They run one after the other, and cannot wait for each other. Give each a module or generator "
            "of its own; a module with statistics may be called in eval mode.",
            stacklevel=2,
        )


class Turns:
    """Which calls of one map have to take turns; a context around those that run side by side.

    Args:
        held: for each call what it reaches.
        names: of the calls.
        side_by_side: whether calls may run at the same time; else none has to look for changes by others.

    Attributes:
        taken: for each call the `id`s of the modules and generators that no other may have at a time.
    """

    def __init__(self, held: Sequence[Held], names: Sequence[str], *, side_by_side: bool) -> None:
        self._names = names
        self._shared = shared = shared_among([own.parts for own in held])
        modules = {id(part): part for own in shared for part in own}
        changed = {id(part): may_be_changed(part) for own in held if own.changes for part in own.parts}
        takers = {key for key, part in modules.items() if changed.get(key) or _keeps_statistics(part)}
        generators = shared_among([own.generators for own in held])
        takers.update(id(one) for own in generators for one in own)
        keys = [[*map(id, [*own, *drawn])] for own, drawn in zip(shared, generators, strict=True)]
        self.taken = [[key for key in own if key in takers] for own in keys]
        in_turn = _in_turn_anyway(keys, takers)
        at_once = {key: part for key, part in modules.items() if side_by_side and key not in in_turn}
        self._buffers = [
            (part, name, buffer, _version_of(buffer))
            for part in at_once.values()
            if part._buffers and not _is_settled(part)
            for name, buffer in [*part._buffers.items()]  # at once, as other threads may add some
            if buffer is not None
        ]
        watched = {key for key, part in at_once.items() if key not in changed and _is_watched(part)}
        self._watched = _watched(shared, names, watched)

    @property
    def has_shared(self) -> bool:
        """Whether calls share any module, to be asked before they run."""
        return any(self._shared)

    @property
    def are_taken(self) -> bool:
        """Whether any calls have to take turns."""
        return any(self.taken)

    def wrap(self, called: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Return the calls, where those that have to take turns do, and others look at what they share."""
        turns = turns_of(dict(enumerate(self.taken)), self._names)
        # Backwards may keep this object for its turns: it is not to keep the modules alive.
        watched, self._watched = self._watched, {}
        wrapped = list(called)
        for i, own in watched.items():
            wrapped[i] = around(Watched.run, own, wrapped[i])
        for i, turn in turns.items():
            wrapped[i] = around(_in_turn, turn, wrapped[i])
        return wrapped

    def __enter__(self) -> None:
        """Enter this around calls that run side by side."""

    def __exit__(self, _: object, error: BaseException | None, *traceback: object) -> None:
        """Look whether they have changed a buffer.

        Raises:
            RuntimeError: they have; it names the buffer, and one of the calls. If a call failed, which a buffer
                changed under it may bring about, that error gets this one's message as a note.
        """
        message = self._find_changed()
        if message is None:
            return
        if error is None:
            raise RuntimeError(message)
        add_note(error, message)

    def _find_changed(self) -> str | None:
        buffers, shared, self._buffers, self._shared = self._buffers, self._shared, [], []
        for module, name, buffer, version in buffers:
            if getattr(module, name, None) is not buffer or _version_of(buffer) != version:
                call = self._names[next(i for i, own in enumerate(shared) if module in own)]
                return (
                    f"parallel_apply: expected calls that share a {type(module).__qualname__} to leave its buffers "
                    f"alone, got {name!r} changed (one of them is {call}). What it is now depends on who came first. "
                    "Set keeps_statistics = True on the class, and its calls take turns; or False, if any order will "
                    "do."
                )
        return None


def turns_of(taken: Mapping[int, Collection[int]], names: Sequence[str]) -> dict[int, Turn]:
    """Return the turns of calls, which begin in this order, for one pass.

    Args:
        taken: for each the `id`s of what no two of them may have at a time; a call without any takes no turn.
        names: of all calls.
    """
    last: dict[int, Turn] = {}
    turns: dict[int, Turn] = {}
    for i, own in taken.items():
        if own:
            before = {id(turn): turn for key in own if (turn := last.get(key)) is not None}
            turns[i] = Turn(names[i], before.values())
            last.update(dict.fromkeys(own, turns[i]))
    return turns


def shared_among(held: Sequence[Sequence[_T]]) -> list[list[_T]]:
    """Return for each call those of what it holds that another one has as well."""
    everyone = list(itertools.chain(*held))
    if len({*map(id, everyone)}) == len(everyone):  # mostly
        return [[] for _ in held]
    unique = [{id(one): one for one in own} for own in held]
    num_calls = collections.Counter(itertools.chain(*unique))
    return [[one for key, one in own.items() if num_calls[key] > 1] for own in unique]


def may_be_changed(module: nn.Module) -> bool:
    """Whether a module computes otherwise with other weights, or in another mode."""
    forward = getattr(type(module), "forward", None)  # not of what is scripted
    code = getattr(forward, "__code__", None)
    return bool(module._parameters or module._buffers) or "training" in getattr(code, "co_names", ())


def _in_turn_anyway(shared: Sequence[Sequence[int]], takers: Collection[int]) -> set[int]:
    """Return what is shared only by calls that share one of the `takers`, and so take turns without being asked."""
    calls = collections.defaultdict[int, set[int]](set)
    for i, own in enumerate(shared) if takers else ():
        for key in own:
            calls[key].add(i)
    rows = {frozenset(calls[key]) for key in takers}
    kinds = {frozenset(own) for own in calls.values()}
    alone = {own for own in kinds if any(own <= row for row in rows)}
    return {key for key, own in calls.items() if frozenset(own) in alone}


def _watched(
    shared: Sequence[Sequence[nn.Module]], names: Sequence[str], watched: Collection[int]
) -> dict[int, Watched]:
    """Return by call what it looks at: those of its modules whose `id`s are among these."""
    states: dict[tuple[int, ...], State] = {}
    parts_of = [[part for part in own if id(part) in watched] for own in shared if watched]
    return {i: Watched(names[i], own, states) for i, own in enumerate(parts_of) if own}


def _version_of(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _in_turn(turn: Turn, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with turn:
        return call(*args, **kwargs)


def _said_by(module: nn.Module) -> bool | None:
    """Return what a module says by `keeps_statistics`; `getattr` takes long where it says nothing."""
    said: bool | None = module.__dict__.get(
        "keeps_statistics", getattr(type(module), "keeps_statistics", None)
    )
    return said


def _is_watched(module: nn.Module) -> bool:
    """Whether calls look at a module that they share: not if any state will do, nor at a script, which has no mode."""
    return _said_by(module) is not False and "training" in module.__dict__


def _is_settled(module: nn.Module) -> bool:
    """Whether it is known what becomes of a module's buffers, by its kind or by what it says."""
    is_known = isinstance(module, _NormBase) or _normalizes_spectrum(module)
    return is_known or _said_by(module) is not None


def _normalizes_spectrum(module: nn.Module) -> bool:
    """Whether a module is a parametrization by the spectral norm, or has one of the older kind, a hook."""
    hooks = [*module._forward_pre_hooks.values()]
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


def _keeps_statistics(module: nn.Module) -> bool:
    if NOT_MADE_YET in module.__dict__:
        return True
    said = _said_by(module)
    if said is not None:
        return bool(said)
    if isinstance(module, _NormBase):
        return module.training and module.running_mean is not None
    if isinstance(module, _Embeddings):  # the forward makes rows shorter, in place
        return module.max_norm is not None
    return _normalizes_spectrum(module) and module.training  # which a frozen script has not
