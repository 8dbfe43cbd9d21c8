"""Every exception that moe_autograd and experts_server raise on purpose.

A bad call raises `ValueError` or `TypeError`, as in PyTorch. What goes wrong at run time raises from this
tree; each class also derives from the built-in one that existing handlers catch::

    MoeAutogradError
    ├── UnsupportedTransformError (RuntimeError)    forward-mode AD, a torch.func transform or a trace
    ├── ConfigError (ValueError)                    a configuration that cannot be served
    ├── CheckpointError (RuntimeError)              no whole checkpoint, or one that does not fit the config
    ├── TooFewExpertsError (RuntimeError)           a layer's tokens have fewer experts that answered than they need
    └── RemoteError (RuntimeError)                  a call of a remote expert did not succeed
        ├── ExpertNotFoundError (KeyError)          no server hosts an expert of that name
        ├── InvalidCallError (ValueError)           the call is refused: its shape, dtype, not finite, ...
        ├── PermissionDeniedError (PermissionError) credentials are missing, wrong, or not enough
        ├── ServerUnavailableError (ConnectionError) no connection, or it broke
        │   ├── UntrustedServerError                the server's certificate is not accepted here
        │   └── CallCancelledError                  the connection was closed here, or the task was cancelled
        ├── ServerBusyError                         a queue or a memory budget is full: try again later
        ├── DeadlineExceededError (TimeoutError)    the call's deadline passed
        │   └── StragglerError                      the others had answered, and this call was waited for long enough
        ├── CorruptDataError                        a checksum, length or shape does not match its data
        ├── ExpertFailedError                       the expert itself raised on its server
        ├── GradientsLostError                      a server no longer has the gradients of a step
        └── InputsNeededError                       the server let go of a forward; between client and server

Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

_MOST_LISTED = 8


def listed(things: Collection[object], separator: str = ", ") -> str:
    """Return the first few for a message, and how many more there are.

    >>> listed(range(10), "; ")
    '0; 1; 2; 3; 4; 5; 6; 7; and 2 more'
    """
    num_more = len(things) - _MOST_LISTED
    more = [f"and {num_more} more"] if num_more > 0 else []
    return separator.join([*map(str, islice(things, _MOST_LISTED)), *more])


class MoeAutogradError(Exception):
    """The base of this tree: everything that goes wrong at run time."""


class UnsupportedTransformError(MoeAutogradError, RuntimeError):
    """Forward-mode AD, a `torch.func` transform or a trace is active, and worker threads cannot see it.

    Or another engine than torch's own runs a backward.
    """


class ConfigError(MoeAutogradError, ValueError):
    """A configuration names something that does not exist or is not allowed."""


class CheckpointError(MoeAutogradError, RuntimeError):
    """A checkpoint is missing, torn, or does not fit the configuration."""


class TooFewExpertsError(MoeAutogradError, RuntimeError):
    """Some tokens of a layer have fewer experts that answered than `min_experts`.

    Args:
        message: names tokens, experts and reasons.
        tokens: the places of these tokens among those of the batch, its leading dimensions flattened.
        failures: what became of the experts that did not answer, as in `routing.failures`.
    """

    def __init__(self, message: str, tokens: Sequence[int] = (), failures: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.tokens = tuple(tokens)
        self.failures = tuple(failures)


class RemoteError(MoeAutogradError, RuntimeError):
    """A call of a remote expert did not succeed; the subclasses say why."""


class ExpertNotFoundError(RemoteError, KeyError):
    """No server that was asked hosts an expert of that name."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class InvalidCallError(RemoteError, ValueError):
    """The call was looked at and refused, here or on its server: wrong rank, width, dtype, or values not finite."""


class PermissionDeniedError(RemoteError, PermissionError):
    """The credentials are missing or wrong, or do not allow this call."""


class ServerUnavailableError(RemoteError, ConnectionError):
    """There is no connection to the server, or it broke before the answer."""


class UntrustedServerError(ServerUnavailableError):
    """There is somebody at the address, whose certificate is not accepted here, or who has none."""


class CallCancelledError(ServerUnavailableError):
    """Nobody waits for the call any more: its connection was closed here, or its task was cancelled.

    This says nothing of the server, so nobody goes on without it (``on_failure="drop"``).
    """


class ServerBusyError(RemoteError):
    """The server's queue or memory budget is full.

    Args:
        message: what was full.
        retry_after_s: the server's hint, in seconds; `None` without one.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RemoteError, TimeoutError):
    """The deadline of the whole operation passed before its answer came."""


class StragglerError(DeadlineExceededError):
    """A call was given up: the others had answered, and it was waited for as long as its user allows."""


class CorruptDataError(RemoteError):
    """Received bytes do not match their checksum, length or shape."""


class ExpertFailedError(RemoteError):
    """The expert raised on its server; the message carries its type and text."""


class GradientsLostError(RemoteError):
    """A server no longer has the gradients that a step wants to apply; the expert was not changed.

    Its server was restarted after the backward, from a checkpoint made before it; or it has let them go, after
    `limits.gathered_gradient_s` or as others had no room; or, with `split_backward`, it could not take them in. Call
    `zero_grad`, repeat forward and backward, and step again; or go on without this update.
    """


class InputsNeededError(RemoteError):
    """The server no longer keeps the forward of this backward; the client sends the inputs again."""
