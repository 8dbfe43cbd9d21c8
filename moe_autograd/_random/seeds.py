"""Which numbers a call draws: a generator for each call of a map (Rule 2 of `_random`)."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from moe_autograd._contexts import contextmanager

PROCESS_GENERATOR = torch.default_generator
CPU = torch.device("cpu")
VMAP = DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))
# Under `is_grads_batched=True` nobody may draw, under `FakeTensorMode` no number is known, under `torch.func.vmap` not
# one for all, and a mode of the caller's has not asked to see how a base is drawn.
_PASSED_BY = VMAP | DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
_PASSED_BY |= DispatchKeySet(DispatchKey.FuncTorchDynamicLayerFrontMode)
_PASSED_BY |= DispatchKeySet(DispatchKey.FuncTorchDynamicLayerBackMode)
_PASSED_BY |= DispatchKeySet(DispatchKey.FuncTorchVmapMode)

_APART = 1 << 40  # more than any index: calls apart draw other numbers than calls that are not
_PATIENCE_S = 1.0  # how long a fork waits for a step


class _Running(threading.local):
    """Which call the current thread runs; `seeds` is `None` outside every map."""

    seeds: CallSeeds | None = None
    index: int = 0
    places: Sequence[int] | None = None  # of the calls that this one makes together, until it asks


running = _Running()
_promised: dict[int, CallSeeds] = {}  # bases that calls elsewhere may draw, while the callers' streams stay
_apart: dict[int, weakref.ref[CallSeeds]] = {}  # the same of calls apart, which Ctrl-C may leave behind
_steps = itertools.count()


def take_places(num_calls: int) -> Sequence[int]:
    """Return the indices of the calls that the running call of a map makes together.

    Whoever makes them one after the other sets `running.index` to each: so each draws what it would draw as a call of
    its own. Where nobody said which they are, all draw what the running call draws.
    """
    places, running.places = running.places, None
    return [running.index] * num_calls if places is None else places


def current_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator of the call that this thread runs; `None` outside every map."""
    return None if running.seeds is None else running.seeds.generator(running.index, device)


class CallSeeds:
    """The generators of one map's calls, made when a call first draws.

    Construct it on the calling thread, before the calls run.

    Attributes:
        has_drawn: whether a call has drawn, and the caller's stream advanced.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_generators",
        "_is_apart",
        "_lock",
        "_parent",
        "_promises",
        "_put_aside",
        "has_drawn",
    )

    def __init__(self) -> None:
        self._parent = (running.seeds, running.index)
        self._lock = threading.RLock()  # a finalizer or a handler that forks takes it again
        self._generators: dict[tuple[int, torch.device], torch.Generator] = {}
        # own states of the calls that have set another one, by index and device
        self._put_aside: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._base: int | None = None
        self._promises: set[object] = set()  # of calls elsewhere that are under way
        self._is_apart = False
        self.has_drawn = False

    def apart(self) -> CallSeeds:
        """Take the base now, one that no others apart have: for calls that run while the caller goes on.

        The caller's stream stays where it is until the calls `come_back`, or are let go.
        """
        self._is_apart = True
        own = weakref.ref(self, _forget)
        while True:
            next_draw = self._peek()
            bases = (_mix(next_draw, place) >> 1 for place in itertools.count(_APART))
            self._base = next(base for base in bases if _apart.setdefault(base, own) is own)
            if self._peek() == next_draw:
                return self
            self.let_go()  # another thread's calls have come back meanwhile: they may have had this one

    def come_back(self) -> None:
        """Advance the caller's stream, if one of the calls apart has drawn; to be called where the caller waits."""
        if self.has_drawn:
            self._advance_caller()
        self.let_go()

    def let_go(self) -> None:
        """Let others take the base."""
        if self._base is not None and (known := _apart.get(self._base)) is not None and known() is self:
            del _apart[self._base]

    def seed_of(self, index: int) -> int:
        """Return what the generator of call `index` begins with; the caller's stream stays where it is."""
        if self._base is None:
            self._decide(self._settle_base)
            assert self._base is not None
        return _mix(self._base, index)

    @contextmanager
    def promised(self) -> Iterator[None]:
        """Inside, calls elsewhere may draw, and other threads take no base that this one's numbers follow from."""
        outer, _ = self._parent
        if outer is not None:
            with outer.promised():
                yield
            return
        own = object()
        try:  # which Ctrl-C may end anywhere
            self._decide(functools.partial(self._promise, own))
            yield
        finally:
            with self._lock:  # nothing is allocated inside
                self._promises.discard(own)
                if not self._promises and self._base is not None and _promised.get(self._base) is self:
                    del _promised[self._base]

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """Return the generator of call `index`; reading its state does not advance the caller's stream."""
        key = (index, device)
        if (found := self._generators.get(key)) is not None:
            return found
        made = _new_generator(device)
        made.manual_seed(self.seed_of(index))
        return self._generators.setdefault(key, made)

    def draw(self, index: int, device: torch.device) -> torch.Generator:
        """Return the generator of call `index` for an operator that is about to draw from it."""
        if not self.has_drawn and (index, device) not in self._put_aside:
            self.note_drawn()
        return self.generator(index, device)

    def note_drawn(self) -> None:
        """Advance the caller's stream, as a call has drawn; once. The base, if none is known, is what that gives."""
        self._decide(self._note_drawn)

    def _decide(self, step: Callable[[], object]) -> None:
        """Take a step while no other call takes one.

        What it makes may have garbage collected here. A finalizer may draw, read states or make a map, whose calls on
        other threads draw: all of which would wait for the lock. So meanwhile this thread draws as a call of no map.
        """
        seeds = running.seeds
        if seeds is not None:
            running.seeds = GivenSeeds(_mix(next(_steps), _APART))
        try:
            with self._lock:
                step()
        finally:
            running.seeds = seeds

    def _settle_base(self) -> int:
        if self._base is None:
            self._base = self._take_base()
        return self._base

    def _promise(self, own: object) -> None:
        self._promises.add(own)
        _promised.setdefault(self._settle_base(), self)

    def _note_drawn(self) -> None:
        if not self.has_drawn:
            self.has_drawn = True
            if self._is_apart:
                return
            base = self._advance_caller()
            if self._base is None:
                while self._is_promised(base):
                    base = self._advance_caller()
                self._base = base

    def set_state(self, index: int, device: torch.device, state: torch.Tensor) -> None:
        """Continue the stream of call `index` from `state`; from its own one if that is put back (Rule 3)."""
        generator = self.generator(index, device)
        own = self._put_aside.setdefault((index, device), generator.get_state())
        with _ExcludeDispatchKeyGuard(_PASSED_BY):
            is_own = torch.equal(own, state)
        if is_own:
            del self._put_aside[index, device]
        generator.set_state(state)

    def manual_seed(self, index: int, device: torch.device, seed: int) -> torch.Generator:
        """Continue the stream of call `index` from `seed`; return its generator."""
        self.set_state(index, device, _new_generator(device).manual_seed(seed).get_state())
        return self.generator(index, device)

    def _take_base(self) -> int:
        """Return what the caller's stream would draw next; what calls of another thread may draw is passed over."""
        while True:
            base = self._peek()
            if self._is_promised(base):
                self._advance_caller()
            elif not self._promises:
                return base
            elif _promised.setdefault(base, self) is self:
                if self._peek() == base:
                    return base
                del _promised[base]  # another thread has drawn it meanwhile

    def _is_promised(self, base: int) -> bool:
        """Whether calls of another thread may draw it."""
        known = _promised.get(base, self)
        if known is not self and not known._promises:  # they have ended, or Ctrl-C left it behind
            _promised.pop(base, None)
            return False
        return known is not self

    def _peek(self) -> int:
        return _next_draw(self._caller().clone_state())

    def _caller(self) -> torch.Generator:
        seeds, index = self._parent
        return PROCESS_GENERATOR if seeds is None else seeds.generator(index, CPU)

    def _advance_caller(self) -> int:
        seeds, index = self._parent
        return _next_draw(PROCESS_GENERATOR if seeds is None else seeds.draw(index, CPU))


class GivenSeeds(CallSeeds):
    """Generators that follow from a seed, and from no caller's stream; call 0 begins with the seed itself."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def seed_of(self, index: int) -> int:
        """Return what the generator of call `index` begins with."""
        return self._seed if index == 0 else _mix(self._seed, index)

    @contextmanager
    def promised(self) -> Iterator[None]:
        """Nobody else has the seed."""
        yield

    def _advance_caller(self) -> int:
        return 0  # there is none


def _forget(gone: weakref.ref[CallSeeds]) -> None:
    for base in [base for base, known in _apart.copy().items() if known is gone]:
        del _apart[base]


def _new_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _next_draw(generator: torch.Generator) -> int:
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def _mix(base: int, index: int) -> int:
    """Mix two numbers into 64 bits without visible structure (SplitMix64's finaliser; Steele et al., 2014)."""
    z = (base + 0x9E3779B97F4A7C15 * (index + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def _running_seeds() -> Iterator[CallSeeds]:
    """Return those of the call that this thread runs, and of the calls around it."""
    seeds = running.seeds
    while seeds is not None:
        yield seeds
        seeds, _ = seeds._parent


class _Forks(threading.local):
    """Those that a thread makes now, one in the midst of another: whose steps it has waited for."""

    def __init__(self) -> None:
        self.waited_for: list[list[CallSeeds]] = []


_forks = _Forks()


def _wait_for_steps() -> None:
    """Before a fork let steps end: the child has no thread that would, and none that gives its generator back.

    Not for ever: a step in whose midst a handler forks waits for this fork to let go of what it has waited for.
    """
    waited_for: list[CallSeeds] = []
    _forks.waited_for.append(waited_for)
    for seeds in _running_seeds():
        if seeds._lock.acquire(timeout=_PATIENCE_S):
            waited_for.append(seeds)


def _allow_steps() -> None:
    for seeds in _forks.waited_for.pop():
        seeds._lock.release()


def _allow_steps_in_child() -> None:
    for seeds in _running_seeds():
        if seeds not in _forks.waited_for[-1]:
            seeds._lock = threading.RLock()
    _allow_steps()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_wait_for_steps, after_in_parent=_allow_steps, after_in_child=_allow_steps_in_child
    )
    os.register_at_fork(after_in_child=_promised.clear)  # nobody waits for calls there
    os.register_at_fork(after_in_child=_apart.clear)
