"""A system that is short of something."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_thread_to_give() -> Iterator[None]:
    """Within, no thread of Python's can be started in this process."""
    usual = threading.stack_size(1 << 46)  # more than there is address space for
    try:
        yield
    finally:
        threading.stack_size(usual)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Within, no file takes another byte of this process."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
