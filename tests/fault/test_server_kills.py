"""Servers that are killed while clients train and a save is under way: what was saved is there, and counts once."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch

from tests.support.servers import START_S, ServerProcess, WireClient

CONFIG = """
listen = "127.0.0.1:0"
checkpoint_dir = {folder}
optimizer = {{ name = "sgd", lr = 1.0 }}
experts.e = {{ class = "tests.support.kill_while_saving:Counting" }}
"""


class Run:
    """A training run over many servers. Update n adds n to a weight of zero: one lost or repeated shows in the sum.

    Attributes:
        num_saved: so many updates had been acknowledged when the last acknowledged save began.
        num_acknowledged: so many have been, by any server; the next to be sent are those after `num_saved`.
        num_interrupted: so many kills came while a save was under way.
    """

    def __init__(self) -> None:
        self.num_saved = self.num_acknowledged = self.num_interrupted = 0

    def go_on(self, server: ServerProcess, alive_s: float) -> None:
        """Train and save, and kill the server `alive_s` after a save began; the first time, after one was done."""
        self.num_acknowledged = self.num_saved
        saving, saved, killed = threading.Event(), threading.Event(), threading.Event()
        with (
            WireClient(server.address) as client,
            WireClient(server.address, client_id=b"operator") as operator,
        ):
            self.check(client)
            work = [
                threading.Thread(target=_until_killed, args=(killed, function))
                for function in (lambda: self._update(client), lambda: self._save(operator, saving, saved))
            ]
            for thread in work:
                thread.start()
            assert (saving if self.num_saved else saved).wait(START_S)
            threading.Event().wait(alive_s)  # the fault's random moment
            self.num_interrupted += saving.is_set()
            killed.set()
            server.kill()
            for thread in work:
                thread.join(START_S)
            assert not any(thread.is_alive() for thread in work)

    def check(self, client: WireClient) -> None:
        """Assert that nothing saved was lost and nothing counted twice."""
        counted = client.num_updates()["e"]
        assert counted >= self.num_saved, f"lost: {counted} of {self.num_saved} saved updates"
        assert client.get_state("e")["e"]["weight"].item() == counted * (counted + 1) / 2

    def _update(self, client: WireClient) -> None:
        number = self.num_acknowledged + 1
        sequence, client.settled_below = 3 * number, 3 * self.num_saved + 3
        client.zero_grad("e", sequence=sequence)
        grad, x = torch.tensor([-float(number)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        answer = client.backward("e", grad, call_id=number, sequence=sequence + 1, inputs=[x])
        assert answer.code == "OK", answer.text
        client.step("e", sequence=sequence + 2)
        self.num_acknowledged = number

    def _save(self, operator: WireClient, saving: threading.Event, saved: threading.Event) -> None:
        acknowledged = self.num_acknowledged
        saving.set()
        operator.save()
        saving.clear()
        self.num_saved = acknowledged
        if acknowledged:
            saved.set()


def _until_killed(killed: threading.Event, work: Callable[[], None]) -> None:
    with contextlib.suppress(grpc.RpcError):
        while not killed.is_set():
            work()
        return
    assert killed.wait(START_S), "an RPC failed, and nobody had killed the server"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_servers_killed_in_the_middle_of_saves_lose_nothing_that_was_saved_and_count_nothing_twice(
    tmp_path: Path, is_full_size: bool
) -> None:
    """Whole servers, over gRPC: a hundred of them in the soak, a few here."""
    folder, config = tmp_path / "saved", tmp_path / "server.toml"
    config.write_text(CONFIG.format(folder=json.dumps(str(folder))))
    chance, run = random.Random(0), Run()
    num_kills = 100 if is_full_size else 8
    server = ServerProcess("--config", str(config))
    for _ in range(num_kills):
        with server:
            run.go_on(server, chance.uniform(0.0, 0.5))
    with server:
        with WireClient(server.address) as client:
            run.check(client)
        assert server.stop() == 0
    assert run.num_saved > 0
    assert run.num_interrupted >= num_kills // 4, "kills hit saves under way"
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"generation", "lock"}
