"""How many threads an operator uses, set for one thread and for nobody else.

What holds in torch 2.13 with OpenMP on the CPU:

1. Each thread has its own team size. `torch.set_num_threads` sets the caller's and, besides, the default that
   threads take at their first operator: a worker that calls it changes threads made later by anybody.
2. OpenMP's own `omp_set_num_threads` changes the calling thread's team and nothing else, once the thread has taken
   its default; MKL and oneDNN follow it. One call costs about 0.1 us.
3. A team is made when the first parallel operator needs it and stays with its thread: 64 workers with a full team
   each keep 64 idle OpenMP threads per extra member, 130 MB and more. A team of one makes none.
4. A second team in a process makes all of them slow: libgomp lets members spin between operators only as long as those
   of all teams, resting ones too, are no more than the cores, and else wakes them by the kernel for every operator. On
   two cores the Adam steps of 16 small experts took 13 ms with a team of two on the only thread that ever had one, 28
   on a second thread, and 25 without a team.

So workers set their team through OpenMP (rule 2), to one where calls run side by side (rules 3 and 4). Where torch was
built without OpenMP the team stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import torch
from threadpoolctl import ThreadpoolController


def _find_setter() -> Callable[[int], object] | None:
    torch_folder = os.path.dirname(torch.__file__)
    openmp = ThreadpoolController().select(user_api="openmp").lib_controllers
    for library in sorted(openmp, key=lambda library: not library.filepath.startswith(torch_folder)):
        # PyDLL keeps the interpreter lock: the call is shorter than giving the lock up and taking it back.
        setter = ctypes.PyDLL(library.filepath).omp_set_num_threads
        setter.argtypes, setter.restype = [ctypes.c_int], None
        return setter
    return None


# Found on import: the search holds the loader's lock, which a process forked meanwhile would never get back.
_omp_set_num_threads = _find_setter()
_has_taken_default = threading.local()


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_team_size() -> int:
    """Return how many threads the operators of the calling thread use."""
    return torch.get_num_threads()


def set_team_size(num_threads: int) -> None:
    """Let the operators of the calling thread, and of no other, use `num_threads` threads."""
    if _omp_set_num_threads is None:
        return
    if not hasattr(_has_taken_default, "done"):
        torch.get_num_threads()  # takes the default now, so that it cannot replace what is set below (rule 2)
        _has_taken_default.done = True
    _omp_set_num_threads(num_threads)


@contextlib.contextmanager
def team_of_one() -> Iterator[None]:
    """Let the operators of the calling thread use no other thread inside."""
    before = get_team_size()
    set_team_size(1)
    try:
        yield
    finally:
        set_team_size(before)
