"""What users have under way on a connection: each operation has one deadline, and all its parts are cancelled together.

Threads: any number of operations at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from moe_autograd.errors import CallCancelledError, ServerUnavailableError
from moe_autograd.remote.awaiting import SCOPE
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.deadline import Deadline

_PHASES = {"ZeroGrad": "zero_grad", "GetState": "state_dict", "SetState": "load_state_dict"}


def phase_of(rpc: str) -> str:
    """Return what errors call an RPC: as users do."""
    return _PHASES.get(rpc, rpc.lower())


@dataclass(frozen=True)
class Operation:
    """One thing a user asked for."""

    deadline: Deadline
    cancellation: Cancellation

    def part(self, timeout_s: float) -> Operation:
        """Return a part of it, of so many seconds from now on, and not after its end."""
        return Operation(self.deadline.part(timeout_s), self.cancellation)

    def place(self, whose: str, rpc: str) -> str:
        """Return where an RPC of it is just now, as errors begin: `expert 'ffn.3' at a:1, step, after 2.0 s (...)`."""
        return f"{whose}, {phase_of(rpc)}, {self.deadline}"


class UnderWay:
    """An operation while a block lasts, cancelled with any of some groups.

    What the block raises since it was cancelled so is a `CallCancelledError`, as no server is the reason.
    """

    __slots__ = ("_groups", "_operation")

    def __init__(self, operation: Operation, groups: Sequence[Cancellation]) -> None:
        self._operation, self._groups = operation, groups

    def __enter__(self) -> Operation:
        try:
            for group in self._groups:
                group.add(self._operation.cancellation.cancel)
        except BaseException:  # such as Ctrl-C
            self.__exit__()
            raise
        return self._operation

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        cancellation = self._operation.cancellation
        for group in self._groups:
            group.remove(cancellation.cancel)
        if kind is ServerUnavailableError and cancellation.is_unwanted:
            raise CallCancelledError(str(error)) from error


class Operations:
    """All of one connection.

    Args:
        given: the addresses that the user gave, for errors.
        timeout_s: of each operation.
    """

    def __init__(self, given: Sequence[str], timeout_s: float) -> None:
        self._given = given
        self._timeout_s = timeout_s
        self._all = Cancellation()  # of what is under way
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that connected, and not its fork."""
        return os.getpid() == self._process

    def begin(self) -> UnderWay:
        """Begin an operation: its deadline runs, and `close` cancels it, or the scope that this thread is in.

        Raises:
            RuntimeError: in a forked child.
            CallCancelledError: after `close`.
        """
        if not self.is_here:
            raise RuntimeError(
                f"connection to {', '.join(self._given)}: expected to be used in the process that made it, "
                f"{self._process}, got {os.getpid()}, its fork. A fork cannot share a connection: connect anew in it."
            )
        if self._all.is_cancelled:
            raise CallCancelledError(
                f"connection to {', '.join(self._given)}: expected an open connection, got a closed one. "
                "Call experts within the block of `connect`."
            )
        groups = [group for group in (self._all, SCOPE.get()) if group is not None]
        return UnderWay(Operation(Deadline(self._timeout_s), Cancellation()), groups)

    def close(self) -> None:
        """Cancel what is under way; nothing is begun any more."""
        self._all.cancel()

    def __repr__(self) -> str:
        return f"Operations({self._all!r}, timeout_s={self._timeout_s})"
