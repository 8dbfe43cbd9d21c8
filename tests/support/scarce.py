"""A system that is short of something."""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def no_thread_to_give() -> Iterator[None]:
    """Within, no thread of Python's can be started in this process."""
    usual = threading.stack_size(1 << 46)  # more than there is address space for
    try:
        yield
    finally:
        threading.stack_size(usual)


@contextlib.contextmanager
def few_threads_to_give(most: int) -> Iterator[None]:
    """Within, so many of the threads that are started there are alive at most. (To root a system gives any number.)"""
    starter = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    usual, places = getattr(threading, starter), threading.Semaphore(most)

    def start(function: Callable[..., object], *args: Any, **options: Any) -> Any:
        def run(*given: Any) -> None:
            try:
                function(*given)
            finally:
                places.release()

        if not places.acquire(blocking=False):
            raise RuntimeError("can't start new thread")
        return usual(run, *args, **options)

    setattr(threading, starter, start)
    try:
        yield
    finally:
        setattr(threading, starter, usual)


@contextlib.contextmanager
def no_descriptor_to_give() -> Iterator[None]:
    """Within, this process opens no file and no socket; those that are open stay so."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Within, no file takes another byte of this process."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@contextlib.contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Within, this process gets no more than that many bytes on top of what it has."""
    usual = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
