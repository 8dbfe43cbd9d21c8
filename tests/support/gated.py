"""An expert that waits until it is let go, and calls that wait for it, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from tests.support.servers import START_S, wait_until

D = 8


class Gated(nn.Module):
    """Waits before each call until it is let go, and notes how many rows each call had, and its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.started, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        self.rows: list[int] = []
        self.firsts: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.started.release()
        assert self.may_go.acquire(timeout=START_S)
        self.rows.append(x.shape[0])
        self.firsts += x.flatten()[:1].tolist()
        return self.linear(x)

    def let_go(self, times: int = 1000) -> None:
        self.may_go.release(times)


class Waiting:
    """A call on a thread of its own; `answers()` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._result.append(call()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(START_S)
        return self._result[0]


def serving(experts: dict[str, nn.Module], **settings: Any) -> ExpertsServer:
    return ExpertsServer(experts, config=ServingConfig(**settings))


def wait_until_queued(server: ExpertsServer, num_calls: int, calls: Sequence[Any] = ()) -> None:
    """Wait until so many calls wait for the expert called e; one of `calls` that has ended raises how it ended."""
    assert server._server is not None
    queue = server._server.registry["e"]

    def is_so() -> bool:
        ended = [call.result() for call in calls if call.done()]
        assert not ended, f"expected calls that wait, got answers {ended}"
        return len(queue) >= num_calls

    try:
        wait_until(is_so)
    except TimeoutError as error:
        error.add_note(f"{queue!r}, {server._server.service.doorway!r}, {server._server.pool!r}")
        raise
