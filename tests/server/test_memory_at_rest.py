"""A server at rest gives what was freed back to the system, and one at work does not."""

from __future__ import annotations

import asyncio
import queue

import pytest

from experts_server.command import daemon
from experts_server.serving.server import ExpertServer
from tests.support.gated import D, Gated, Waiting, serving
from tests.support.servers import START_S, WireClient, tokens, wait_until


def test_freed_memory_is_given_back_once_after_each_time_of_work_and_not_during_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
    looks: list[int] = []
    work_of, give_back = daemon._work_of, daemon.give_back_freed_memory

    def look(server: ExpertServer) -> tuple[int, int, int]:
        looks.append(len(looks))
        return work_of(server)

    def note() -> None:
        give_back()
        given_back.put(work_of(inner))

    def wait_for_looks() -> None:
        enough = len(looks) + 5
        wait_until(lambda: len(looks) >= enough)

    monkeypatch.setattr(daemon, "REST_S", 0.001)
    monkeypatch.setattr(daemon, "_work_of", look)
    monkeypatch.setattr(daemon, "give_back_freed_memory", note)
    expert = Gated()
    with serving({"e": expert}) as server, WireClient(server.address) as client:
        assert server._server is not None
        inner, loop = server._server, server._server._loop
        assert loop is not None
        task = asyncio.run_coroutine_threadsafe(daemon.give_back_memory_at_rest(inner), loop)
        wait_for_looks()
        assert given_back.empty(), "there was no work"
        call = Waiting(lambda: client.forward("e", tokens(3, D), call_id=1))
        assert expert.started.acquire(timeout=START_S)
        wait_for_looks()
        assert given_back.empty(), "it is at work"
        expert.let_go()
        assert call.result().code == "OK"
        assert given_back.get(timeout=START_S)[1] > 0, "the forward is kept"
        wait_for_looks()
        assert given_back.empty(), "once is enough"
        inner.memory.kept.max_age_s = 0.0
        inner.memory.kept.let_go_expired()
        assert given_back.get(timeout=START_S)[1] == 0, "what clients left was let go"
        assert not task.done()
        task.cancel()
