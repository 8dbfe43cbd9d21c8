"""Give memory that was freed back to the system.

The C library keeps what is freed for the next who asks. Blocks of up to 32 MB (activations, gradients) lie in heaps
that fragment, and stay the process's: with glibc some 0.5 GB in `benchmarks/offload`. Its `malloc_trim` gives free
pages back, but not while an expert computes. Whoever wants the last hundred megabytes asks for blocks that never lie
in heaps (`return_freed_memory_at_once`). Other C libraries have no such functions; there these do nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


def give_back_freed_memory() -> None:
    """Give free pages back; takes milliseconds, with the GIL released."""
    trim = _of_c_library("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def return_freed_memory_at_once() -> bool:
    """Let this process return every freed block of 128 KiB or more to the system at once.

    For programs whose peak memory counts more than their speed: such a block costs page faults each time. Applies to
    the whole process, from now on, as `MALLOC_MMAP_THRESHOLD_` in its environment would; nothing takes it back.

    Returns:
        Whether it will. `False` where the C library is not glibc: there nothing has changed.

    Threads: any; blocks that were taken before go the old way, so call it at the start of a program.
    """
    mallopt = _of_c_library("mallopt", ctypes.c_int, ctypes.c_int)
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, 128 * 1024) == 1


def limit_heaps(num_heaps: int) -> bool:
    """Let the threads of this process share `num_heaps` heaps, and the first; return whether they will.

    By default glibc gives each new thread a heap of its own, up to eight for each core, and what is free in one is of
    no use to the others. For programs that live long and whose threads mostly hold the interpreter lock. Applies to
    heaps that are not there yet, as `MALLOC_ARENA_MAX` in its environment would.
    """
    mallopt = _of_c_library("mallopt", ctypes.c_int, ctypes.c_int)
    return mallopt is not None and mallopt(_ARENA_MAX, num_heaps + 1) == 1


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # malloc.h


@functools.cache
def _of_c_library(name: str, *argument_types: Any) -> Callable[..., int] | None:
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim  # glibc has it, and others do not
        function = getattr(library, name)
    except (AttributeError, OSError, TypeError):  # not glibc, or Windows
        return None
    function.argtypes, function.restype = argument_types, ctypes.c_int
    return function  # type: ignore[no-any-return]
