"""How many threads an operator uses, set for one thread and for nobody else.

What holds in torch 2.13 with OpenMP on the CPU:

1. Each thread has its own team size. `torch.set_num_threads` sets the caller's and, besides, the default that
   threads take at their first operator: a worker that calls it changes threads made later by anybody.
2. OpenMP's own `omp_set_num_threads` changes the calling thread's team and nothing else, once the thread has taken
   its default; MKL and oneDNN follow it. One call costs about 0.1 us.
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
machine, which computes with the same cores (rule 5), unless little is to be computed. Where torch was built without
OpenMP the team stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable

import torch
from threadpoolctl import ThreadpoolController

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


# Found on import: the search holds the loader's lock, which a process forked meanwhile would never get back.
_openmp = _OpenMP()
_own = threading.local()  # `may_have_team`, from the first size on that was set


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_team_size() -> int:
    """Return how many threads the operators of the calling thread use."""
    return torch.get_num_threads()


def set_team_size(num_threads: int) -> None:
    """Let the operators of the calling thread, and of no other, use `num_threads` threads."""
    if _openmp.set_num_threads is None:
        return
    if not hasattr(_own, "may_have_team"):
        torch.get_num_threads()  # takes the default now, so that it cannot replace what is set below (rule 2)
        _own.may_have_team = False
    if num_threads > 1:
        _own.may_have_team = True
    _openmp.set_num_threads(num_threads)


def end_team() -> None:
    """End the team of the calling thread, which is about to rest; its next parallel operator makes another."""
    may_have_team = torch.get_num_threads() > 1 or getattr(_own, "may_have_team", True)
    if may_have_team and _openmp.end_team is not None and not hasattr(_own, "has_forked"):
        _openmp.end_team()
        _own.may_have_team = False


if hasattr(os, "register_at_fork"):
    # The thread that lives on in a child has its team without the members, and would wait for them for ever.
    os.register_at_fork(after_in_child=functools.partial(setattr, _own, "has_forked", True))
