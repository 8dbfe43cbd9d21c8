"""A system that is short of something."""

from __future__ import annotations

import contextlib
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
