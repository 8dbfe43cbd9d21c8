"""How many threads an operator uses, set for one thread and for nobody else.

What holds in torch 2.13 with OpenMP on the CPU:

1. Each thread has its own team size. `torch.set_num_threads` sets the caller's and, besides, the default that
   threads take at their first operator: a worker that calls it changes threads made later by anybody.
2. OpenMP's own `omp_set_num_threads` changes the calling thread's team and nothing else, once the thread has taken
   its default; oneDNN follows it. MKL, which multiplies float32 matrices, does only as long as nobody has told it a
   number: `torch.set_num_threads` does (the caller's thread, and later each new one as it takes its default), and so
   does the variable MKL_NUM_THREADS. Two threads with a team of one then multiply with two threads each: after
   `torch.set_num_threads(2)` a step of eight transformer layers took 95 to 109 ms, and takes 52 to 58 without that.
   So MKL is told as well.
   One call of either costs about 0.3 us.
3. A team is made when the first parallel operator needs it and stays with its thread: 64 workers with a full team
   each keep 64 idle OpenMP threads per extra member, 130 MB and more. A team of one makes none.
4. libgomp lets the members of a team spin between operators only as long as all teams of the process, resting ones
   too, have no more members than there are cores, and else wakes them by the kernel for every operator. On two cores
   the Adam steps of 16 small experts took 13 ms with a team of two on the only thread that ever had one, 28 on a second
   thread, and 25 without a team; those on the first thread went from 18 to 32. `omp_pause_resource` ends the calling
   thread's team, and no other.
5. Spinning lasts some 5 ms after each operator, on a core each. To end a team of two and to make it anew takes 60 us,
   of 32 some 1.5 ms.

So workers set their team through OpenMP (rule 2), to one where calls run side by side (rule 3), and keep none while
they rest (rule 4): the caller's own operators would be slower for it. Nor does a thread that waits for a server on this
machine, which computes with the same cores (rule 5), unless little is to be computed, nor one that calls a map whose
calls will want all cores (`_habits`). Where torch was built without OpenMP the team stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from threadpoolctl import ThreadpoolController

SPIN_S = 0.005  # of a team's members, after an operator (rule 5)

_SOFT = 1  # a kind of pause, in OpenMP's words: what was set stays


class _OpenMP:
    """What is asked of torch's OpenMP; without one, nothing is done."""

    def __init__(self) -> None:
        torch_folder = os.path.dirname(torch.__file__)
        found = ThreadpoolController().select(user_api="openmp").lib_controllers
        paths = sorted((one.filepath for one in found), key=lambda path: not path.startswith(torch_folder))
        self.set_num_threads: Callable[[int], object] | None = None
        self.end_team: Callable[[], object] | None = None
        if not paths:
            return
        # PyDLL keeps the interpreter lock: the call is shorter than giving the lock up and taking it back.
        self.set_num_threads = ctypes.PyDLL(paths[0]).omp_set_num_threads
        self.set_num_threads.argtypes, self.set_num_threads.restype = [ctypes.c_int], None
        library = ctypes.CDLL(paths[0])  # gives up the interpreter lock: members are waited for
        if "libgomp" in os.path.basename(paths[0]) and hasattr(library, "omp_pause_resource"):
            # Other libraries pause all threads' teams.
            self.end_team = functools.partial(
                library.omp_pause_resource, _SOFT, library.omp_get_initial_device()
            )


def _find_set_mkl_threads() -> Callable[[int], int] | None:
    """Return what sets how many threads MKL uses on the calling thread, and returns how many that were.

    None where torch is built without MKL. 0 is as many as OpenMP says, or MKL_NUM_THREADS.
    """
    # It is looked for in what that links to as well.
    found = getattr(ctypes.PyDLL(torch._C.__file__), "MKL_Set_Num_Threads_Local", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
    return found


# Found on import: the search holds the loader's lock, which a process forked meanwhile would never get back.
_openmp = _OpenMP()
_set_mkl_threads = _find_set_mkl_threads()
_own = threading.local()  # `may_have_team`, from the first size on that was set


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TeamSize(NamedTuple):
    """How many threads the operators of a thread use, and how many MKL was told: 0 for nothing."""

    num_threads: int
    num_mkl_threads: int


def get_team_size() -> TeamSize:
    """Return what `set_team_size` gives back to the calling thread."""
    num_threads = torch.get_num_threads()  # first: the thread takes its default, MKL's too
    if _set_mkl_threads is None:
        return TeamSize(num_threads, 0)
    told: list[int] = []
    try:
        told += map(_set_mkl_threads, (0,))  # held, before Ctrl-C may come between the two calls
    finally:
        if told:
            _set_mkl_threads(told[0])
    return TeamSize(num_threads, told[0])


def set_team_size(size: int | TeamSize) -> None:
    """Let the operators of the calling thread, and of no other, use so many threads.

    To give back what was set before, call it once more where Ctrl-C has come into it.
    """
    if _openmp.set_num_threads is None:
        return
    num_threads, num_mkl_threads = size if isinstance(size, TeamSize) else (size, size)
    if not hasattr(_own, "may_have_team"):
        torch.get_num_threads()  # takes the default now, so that it cannot replace what is set below (rule 2)
        _own.may_have_team = False
    if num_threads > 1:
        _own.may_have_team = True
    _openmp.set_num_threads(num_threads)
    if _set_mkl_threads is not None:
        _set_mkl_threads(num_mkl_threads)


def end_team() -> None:
    """End the team of the calling thread, which is about to rest; its next parallel operator makes another."""
    may_have_team = torch.get_num_threads() > 1 or getattr(_own, "may_have_team", True)
    if may_have_team and _openmp.end_team is not None and not hasattr(_own, "has_forked"):
        _openmp.end_team()
        _own.may_have_team = False


if hasattr(os, "register_at_fork"):
    # The thread that lives on in a child has its team without the members, and would wait for them for ever.
    os.register_at_fork(after_in_child=functools.partial(setattr, _own, "has_forked", True))
