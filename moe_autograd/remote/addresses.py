"""Addresses as users write them, and what a name among them stands for."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from moe_autograd._interrupts import uninterrupted
from moe_autograd._waiting import get
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote.operations import Operation
from moe_autograd.wire.addresses import is_host_and_port, joined_address, split_address


def check_addresses(addresses: Sequence[str]) -> list[str]:
    """Return the addresses, each once.

    Raises:
        ValueError: one of them is not `host:port`, or there is none.

    >>> check_addresses(["[::1]:8080", "experts.example:31415", "[::1]:8080"])
    ['[::1]:8080', 'experts.example:31415']
    """
    for address in addresses:
        if not isinstance(address, str) or not is_host_and_port(address):
            raise ValueError(
                f"address: expected host:port, got {address!r}. Take what `experts-server serve` printed, or the "
                "`address` of an `ExpertsServer` that has started; several are a list, an IPv6 address stands in "
                "brackets, such as [::1]:31415, and a TOML file is given as a `Path`."
            )
    if not addresses:
        raise ValueError("addresses: expected at least one host:port, got none. Name a server.")
    return list(dict.fromkeys(addresses))


def resolve(
    addresses: Sequence[str], operation: Operation
) -> Mapping[str, list[str] | ServerUnavailableError]:
    """Return for each address with a name all addresses with numbers that it stands for, or why there are none.

    The resolver of the system has no deadline and cannot be stopped. So it is asked on threads of our own; one that
    hangs is left behind, and ends when the resolver does.
    """
    answers: queue.SimpleQueue[tuple[str, list[str] | ServerUnavailableError] | None] = queue.SimpleQueue()
    for address in addresses:
        try:
            with uninterrupted():  # which `threading` makes a RuntimeError of, too
                threading.Thread(
                    target=lambda at=address: answers.put((at, _ask_resolver(at))), daemon=True
                ).start()
        except RuntimeError as error:
            unasked = (
                f"expected a thread to resolve its name on, got {str(error)!r}. Raise the limit of threads."
            )
            answers.put((address, ServerUnavailableError(f"server at {address}: {unasked}")))
    found: dict[str, list[str] | ServerUnavailableError] = {}
    wake = partial(answers.put, None)
    operation.cancellation.add(wake)
    try:
        while len(found) < len(addresses):
            answer = get(answers, operation.deadline.remaining_s)
            if answer is None:
                break
            found.update([answer])
    except queue.Empty:
        pass
    finally:
        operation.cancellation.remove(wake)
    late = (
        f"expected its addresses, got no answer of the resolver in time, {operation.deadline}. Is the name server "
        "there?"
    )
    return {
        address: found.get(address) or ServerUnavailableError(f"server at {address}: {late}")
        for address in addresses
    }


def _ask_resolver(address: str) -> list[str] | ServerUnavailableError:
    host, port = split_address(address)
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        unresolved = ServerUnavailableError(
            f"server at {address}: expected a name that resolves to addresses, got {error}. Check the name."
        )
        unresolved.__cause__ = error.with_traceback(None)  # which knows this frame, and so itself
        return unresolved
    # resolvers turn them round; we want one order
    numbers = sorted({str(place[0]) for *_, place in answers}, key=lambda number: (":" in number, number))
    return [joined_address(number, port) for number in numbers]
