"""The folder of offloaded experts is where they live: nobody else writes to it while a server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, OffloadConfig, ServingConfig
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.servers import ServerProcess, WireClient, tokens
from tests.support.subprocesses import run_command

D = 8
CONFIG = """
listen = "127.0.0.1:0"
optimizer = {{ name = "sgd", lr = 1.0 }}
memory = {{ recompute = true, offload = true }}
offload = {{ max_resident_bytes = 8000, store = {store!r} }}
experts."ffn.[0:6]" = {{ class = "ffn", args = {{ d_model = 8 }} }}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "server.toml"
    file.write_text(CONFIG.format(store=str(tmp_path / "store")))
    return file


def test_neither_a_check_nor_a_second_server_harms_the_weights_of_one_that_runs(config: Path) -> None:
    with ServerProcess("--config", str(config)) as server, WireClient(server.address) as client:
        names = [f"ffn.{n}" for n in range(6)]
        for name in names:
            client.forward(name, tokens(4, D))
            assert client.backward(name, tokens(4, D)).code == "OK"
        client.step()
        trained = client.get_state()
        assert run_command("config", "--check", str(config)).returncode == 0
        second = run_command("serve", "--config", str(config))
        assert second.returncode == 1
        assert "offload.store" in second.stderr.decode()
        assert "got one that another server uses" in second.stderr.decode()
        now = client.get_state()
        for name in names:
            for key, tensor in trained[name].items():
                assert torch.equal(now[name][key], tensor), (name, key)
        assert server.stop() == 0


def test_a_stopped_server_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    serving = ServingConfig(
        memory=MemoryConfig(recompute=True, offload=True),
        offload=OffloadConfig(max_resident_bytes=8000, store=tmp_path),
    )
    for _ in range(2):
        with (
            ExpertsServer({"e": FeedForwardExpert(D)}, config=serving) as server,
            WireClient(server.address) as c,
        ):
            assert c.forward("e", tokens(1, D)).code == "OK"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    serving = ServingConfig(
        memory=MemoryConfig(recompute=True, offload=True),
        offload=OffloadConfig(max_resident_bytes=8000, store=tmp_path / "file" / "store"),
    )
    server = ExpertsServer({"e": FeedForwardExpert(D)}, config=serving)
    with pytest.raises(
        ConfigError, match=r"offload.store '.*': expected a folder to write to, got 'Not a dir"
    ):
        server.start()


def test_a_store_that_cannot_be_read_is_in_the_answer_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serving = ServingConfig(
        memory=MemoryConfig(recompute=True, offload=True),
        offload=OffloadConfig(max_resident_bytes=4500, store=tmp_path),
    )
    names = ["one", "two", "three"]  # and room for two
    with (
        ExpertsServer({name: FeedForwardExpert(D) for name in names}, config=serving) as server,
        WireClient(server.address) as client,
    ):
        assert {client.forward(name, tokens(1, D)).code for name in names} == {"OK"}
        away = (tmp_path / "resident-store").rename(tmp_path / "away")
        answers = [client.forward(name, tokens(1, D), call_id=2) for name in names]
        assert any(answer.code == "INTERNAL" and "No such file" in answer.text for answer in answers)
        assert "a call failed in the server itself" in caplog.text
        away.rename(tmp_path / "resident-store")
        assert {client.forward(name, tokens(1, D), call_id=3).code for name in names} == {"OK"}
