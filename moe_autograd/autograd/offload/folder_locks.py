"""Locks of folders that one owner at a time may write to, in this process or another.

A forked child inherits the open file, and the lock with it. So it closes its own at once, which leaves the lock to the
parent; and the parent ends the lock by name, not only by closing, since a child that has just begun may not have yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path


class FolderLock:
    """The lock of one file, until `release`, or until nobody has this any more, or its process ends.

    Args:
        path: of the file, which is made if it is not there.

    Raises:
        BlockingIOError: somebody has the lock.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        self._path, self._fd = path, fd
        self.release = weakref.finalize(self, _release, fd, os.getpid())
        _locks.add(self)

    def is_in_place(self) -> bool:
        """Whether the file there is still the one that was locked: who finds another one locks that."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        return False


def _release(fd: int, process: int) -> None:
    if os.getpid() == process:  # else the parent would lose it
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: else its parent's folders stay locked as long as the child lives."""
    for lock in _locks:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
