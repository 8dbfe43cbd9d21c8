"""Let Ctrl-C wait while state is changed that has to fit together.

Python runs the handler of a signal after almost any instruction of the main thread. What it raises, as Ctrl-C does,
may come between two changes that belong together; just when a lock has been taken, and nobody knows yet who is to
release it; or just when a context is to be left, which then is not. Inside of `uninterrupted` the handler waits for the
end, or for the next `let_through`::

        with uninterrupted() as section:
            take()
            try:
                with section.opened():    # as outside: what takes long is here
                    work()
            finally:
                give_back()

Sections may be nested: the outermost ends the wait, or `let_through`, which is for those who wait within one.

A generator that is a context (`_contexts`) is not left where Ctrl-C comes just as it would be; it ends when the
exception goes, which a notebook keeps. One that is `unwindable` ends where the exception leaves what is `unwinding`.

Threads: any; on others than the main thread nothing is to be done, since handlers do not run there.

Mutable state: `_main` is the main thread's alone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython and PyPy; typeshed leaves it out
import contextlib
import functools
import gc
import inspect
import itertools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from types import FrameType, GeneratorType
from typing import Any, ParamSpec, TypeVar, cast

from moe_autograd._contexts import GeneratorContext

P = ParamSpec("P")
T = TypeVar("T")

# What `signal` is made of, without the enums around it: with them a look at a handler takes 2 us.
get_handler, set_handler = _signal.getsignal, _signal.signal
_get_ident = threading.get_ident


class _Main:
    """What the main thread holds back, and what it has entered."""

    __slots__ = ("entered", "forks", "frame", "handler", "has_come", "is_held", "thread_id")

    def __init__(self) -> None:
        self.thread_id = threading.main_thread().ident
        self.is_held = False
        self.handler: Callable[[int, FrameType | None], Any] | None = None  # which waits
        self.has_come = False
        self.frame: FrameType | None = None  # where that was
        self.entered: list[Generator[Any, None, None]] = []  # contexts, the innermost last
        self.forks = False  # whether a child is its own


_main = _Main()


class uninterrupted:
    """Inside, the handler of SIGINT waits."""

    __slots__ = ("_began_here",)

    def __enter__(self) -> uninterrupted:
        self._began_here = _get_ident() == _main.thread_id and not _main.is_held and _hold()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # What a generator has entered, another thread's collection of garbage may leave.
        if self._began_here and _get_ident() == _main.thread_id:
            _release()

    def opened(self) -> _Opened:
        """Return a context in which handlers run as they did outside of the section."""
        return _Opened(self._began_here)


class _Opened:
    __slots__ = ("_is_open",)

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open

    def __enter__(self) -> None:
        if self._is_open:
            _release()

    def __exit__(self, *exc_info: object) -> None:
        if self._is_open and _get_ident() == _main.thread_id:
            _hold()


class _Unwindable(GeneratorContext[T]):
    def __enter__(self) -> T:
        if _get_ident() == _main.thread_id:
            _main.entered.append(self.generator)
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> bool | None:
        try:
            return super().__exit__(*exc_info)
        finally:
            generator = cast("GeneratorType[Any, None, None]", self.generator)
            is_last = _get_ident() == _main.thread_id and _main.entered[-1:] == [generator]
            if is_last and generator.gi_frame is None:
                _main.entered.pop()


def unwindable(function: Callable[P, Iterator[T]]) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Do as `contextmanager`; what is entered ends at the latest with what is `unwinding` around it."""

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> _Unwindable[T]:
        return _Unwindable(function(*args, **kwargs))

    return enter


def unwinding(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function that raises end what was entered in it (`unwindable`), and was not left."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        num_entered = len(_main.entered)
        try:
            return function(*args, **kwargs)
        except BaseException:
            if _get_ident() == _main.thread_id:
                while len(_main.entered) > num_entered:
                    _main.entered.pop().close()
            raise

    return run


def came_by_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised an exception on this thread, as that of Ctrl-C does.

    Natively it ends a loop of calls, and is none of theirs. A handler is known by what it is given: a signal's number,
    and the frame in the midst of which it was called. One that had to wait is called by `_release`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if _get_ident() != _main.thread_id:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        beneath.f_code is _release.__code__ or _is_handler(frame, beneath)
        for beneath, frame in itertools.pairwise(frames)
    )


def _is_handler(frame: FrameType, beneath: FrameType) -> bool:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no function
        return False
    before = gc.get_referents(frame)
    args, rest, _, values = inspect.getargvalues(frame)
    others = rest and values.get(rest)
    arguments = [values.get(name) for name in args] + list(others if isinstance(others, tuple) else ())
    is_handler = any(type(one) is int and given is beneath for one, given in itertools.pairwise(arguments))
    # Until Python 3.13 the frame keeps a dictionary of its variables, and so them, once somebody has asked for it.
    if isinstance(values, dict) and not any(one is values for one in before):
        values.clear()
    return is_handler


def let_through() -> None:
    """Run the handler now, if it waits: where state fits together, and whatever is raised is heard."""
    if _main.has_come and _get_ident() == _main.thread_id:
        try:
            _release()
        finally:
            _hold()


def _hold() -> bool:
    """Hold the handler back; return whether there is one."""
    handler = get_handler(signal.SIGINT)
    if handler is not _note:  # else whoever was interrupted has not given it back
        if not callable(handler):
            return False
        _main.has_come, _main.frame = False, None
        _main.handler = handler  # first: another signal's handler may raise just behind the next line
        set_handler(signal.SIGINT, _note)
    _main.is_held = True
    return True


def _note(_: int, frame: FrameType | None) -> None:
    _main.has_come, _main.frame = True, frame


def _release() -> None:
    """Put the handler back, unless somebody has set another one meanwhile; run it if it was to run."""
    _main.is_held = False
    if get_handler(signal.SIGINT) is _note:
        set_handler(signal.SIGINT, _main.handler)  # which may come just here, and is noted still
    if _main.has_come:
        frame = _main.frame
        _main.has_come, _main.frame = False, None
        handler = get_handler(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        elif handler == signal.SIG_DFL:
            signal.raise_signal(signal.SIGINT)


def _note_who_forks() -> None:
    _main.forks = _get_ident() == _main.thread_id


def _start_anew() -> None:
    """In a child that another thread has forked: that is the main one there, and in no section of the parent's."""
    if _main.forks:
        return
    _main.thread_id, _main.is_held, _main.has_come, _main.frame = _get_ident(), False, False, None
    _main.entered.clear()
    if get_handler(signal.SIGINT) is _note:
        set_handler(signal.SIGINT, _main.handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_who_forks, after_in_child=_start_anew)
