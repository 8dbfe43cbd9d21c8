"""Checkpoints: what is saved is what was, the last ones stay, and a folder has one server."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import grpc
import pytest
import safetensors.torch
import torch
import xxhash
from click.testing import CliRunner

from experts_server import ExpertsServer
from experts_server.checkpoints.checkpoint import CheckpointFolder, _sealed
from experts_server.checkpoints.earlier import FORMAT
from experts_server.checkpoints.snapshot import Snapshot
from experts_server.command.cli import main
from moe_autograd.errors import CheckpointError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.checkpointing import BEGUN_AND_STOPPED, D, adam, experts, served, train
from tests.support.servers import ServerProcess, WireClient, tokens


def test_training_across_a_restart_is_training_without_one(tmp_path: Path) -> None:
    with served(tmp_path / "a") as server, WireClient(server.address) as client:
        train(client, 6)
        expected = client.get_state()
    for _ in range(3):  # saved by stopping, loaded by starting
        with served(tmp_path / "b") as server, WireClient(server.address) as client:
            client.sequence = 1000 * (1 + max(client.num_updates().values()))
            train(client, 2)
            state, num_updates = client.get_state(), client.num_updates()
    assert num_updates == {"ffn.0": 6, "glu.0": 6}
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_gathered_gradients_the_ledger_and_the_answers_to_repeated_updates_outlive_a_restart(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server, WireClient(server.address) as client:
        client.forward("ffn.0", tokens(5, D))
        client.backward("ffn.0", tokens(5, D, seed=1), sequence=7)
    with served(tmp_path) as server, WireClient(server.address) as client:
        repeated = client.backward("ffn.0", tokens(5, D, seed=1), sequence=7, inputs=[tokens(5, D)])
        assert repeated.code == "OK"
        assert [u.num_updates for u in client.step(sequence=8).updates] == [1, 0]
        once = client.get_state()
    local = experts()["ffn.0"]
    optimizer = adam(local.parameters())
    local(tokens(5, D)).backward(tokens(5, D, seed=1))
    optimizer.step()
    torch.testing.assert_close(once["ffn.0"], local.state_dict())
    with served(tmp_path) as server, WireClient(server.address) as client:
        assert [u.num_updates for u in client.step(sequence=8).updates] == [1, 0], (
            "a repeated step counts once"
        )
        torch.testing.assert_close(client.get_state(), once, rtol=0, atol=0)


def test_schedule_and_learning_rate_outlive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        f"""
        listen = "127.0.0.1:0"
        checkpoint_dir = {json.dumps(str(tmp_path / "saved"))}
        optimizer = {{ name = "sgd", lr = 1.0, schedule = {{ name = "StepLR", args = {{ step_size = 1 }} }} }}
        [experts.e]
        class = "torch.nn:Linear"
        args = {{ in_features = 1, out_features = 1, bias = false }}
        """
    )
    weights = []
    for number in range(2):
        with ServerProcess("--config", str(file)) as server, WireClient(server.address) as client:
            client.sequence = 100 * number
            weights.append(client.get_state()["e"]["weight"].item())
            client.forward("e", torch.ones(1, 1))
            client.backward("e", torch.ones(1, 1))
            client.step()
            client.zero_grad()
            weights.append(client.get_state()["e"]["weight"].item())
            assert server.stop() == 0
    assert weights[1] == pytest.approx(weights[0] - 1.0)
    assert weights[2] == weights[1]
    assert weights[3] == pytest.approx(weights[2] - 0.1), (
        "the second step has a tenth of the first one's rate"
    )


def test_only_the_last_generations_stay_and_nothing_else(tmp_path: Path) -> None:
    with served(tmp_path) as server, WireClient(server.address) as client:
        names = [client.save() for _ in range(4)]
    assert names == [f"generation-0000000{n}" for n in (2, 3, 4, 5)], "the first is of the start"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generation-00000005",
        "generation-00000006",
        "lock",
    ]
    files = {path.name for path in (tmp_path / "generation-00000006").iterdir()}
    assert files == {"manifest.json", "ffn.0.safetensors", "glu.0.safetensors"}


KINDS = {
    "weights.scalar": torch.tensor(2.0, dtype=torch.float64),
    "weights.bools": torch.tensor([True, False, True]),
    "weights.empty": torch.ones(0, 3),
    "weights.complex": torch.full((3, 2), 1 + 2j, dtype=torch.complex64),
    "weights.small": torch.arange(3).to(torch.float8_e5m2fnuz),
    "weights.matrix": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "weights.count": torch.tensor([1, 2**63], dtype=torch.uint64),
    "weights.scales": torch.tensor([1.0, 0.5]).to(torch.float8_e8m0fnu),
}


def test_safetensors_reads_what_a_checkpoint_holds_of_each_kind_of_tensor(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        folder.write([Snapshot(KINDS, {"expert": "e"})])
        newest = folder.read_newest()
    assert newest is not None
    assert newest[1]["e"].plain == {"expert": "e"}
    read = safetensors.torch.load_file(tmp_path / "generation-00000001" / "e.safetensors")
    for found in (newest[1]["e"].tensors, read):
        assert found.keys() == KINDS.keys()
        for name, tensor in KINDS.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert found[name].tolist() == tensor.tolist()


def test_a_checkpoint_that_safetensors_itself_has_written_is_loaded(tmp_path: Path) -> None:
    """As those of before are: their tensors lie in another order."""
    with CheckpointFolder(tmp_path) as folder:
        folder.write([Snapshot(KINDS, {"expert": "e"})])
        file = tmp_path / "generation-00000001" / "e.safetensors"
        with safetensors.safe_open(file, "pt") as ours:
            content = safetensors.torch.save(KINDS, ours.metadata())
        assert content != file.read_bytes()
        file.write_bytes(content)
        entry = {"file": file.name, "num_bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
        manifest = _sealed({"format": FORMAT, "generation": 1, "experts": {"e": entry}})
        file.with_name("manifest.json").write_bytes(manifest)
        newest = folder.read_newest()
    assert newest is not None
    assert newest[1]["e"].plain == {"expert": "e"}
    found = newest[1]["e"].tensors
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        n: t.tolist() for n, t in KINDS.items()
    }


def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    with served(tmp_path), pytest.raises(CheckpointError, match="another server uses"):
        served(tmp_path).start()


def test_a_server_whose_folder_was_removed_does_not_save_into_that_of_another_one(tmp_path: Path) -> None:
    """Else the newest generation would be of whichever stopped last, and the other's training lost without a word."""
    folder = tmp_path / "checkpoints"
    with served(folder) as server, WireClient(server.address) as client:
        shutil.rmtree(folder)
        folder.mkdir()
        assert client.save() == "generation-00000001", "nobody else has it"
        shutil.rmtree(folder)
        with served(folder):
            with pytest.raises(grpc.RpcError, match="another server uses"):
                client.save()
            assert [path.name for path in folder.glob("gen*")] == ["generation-00000001"]


def test_a_folder_that_cannot_be_looked_through_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with served(tmp_path) as server, WireClient(server.address) as client:
        monkeypatch.setattr(Path, "iterdir", fail)
        with pytest.raises(
            grpc.RpcError, match=r"expected the folder that was opened, got 'Input/output error'"
        ):
            client.save()
        monkeypatch.undo()
        assert client.save() == "generation-00000002"


def test_saving_without_a_folder_is_refused() -> None:
    with ExpertsServer(experts()) as server, WireClient(server.address) as client:
        with pytest.raises(grpc.RpcError) as refused:
            client.save()
        assert "expected a checkpoint_dir to save to, got none" in refused.value.details()


def test_leftovers_of_an_interrupted_save_are_removed_at_the_start(tmp_path: Path) -> None:
    with served(tmp_path):
        pass
    for name in ("writing-00000003", "removing-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("torn")
    with served(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [*BEGUN_AND_STOPPED, "lock"]


def test_files_and_links_named_like_leftovers_stand_in_no_save_s_way(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x").touch()
    folder = tmp_path / "saved"
    with served(folder) as server, WireClient(server.address) as client:
        (folder / "writing-00000002").touch()
        (folder / "writing-00000003").symlink_to(elsewhere)
        (folder / "removing-00000001").touch()
        assert [client.save() for _ in range(2)] == ["generation-00000002", "generation-00000003"]
        assert sorted(p.name for p in folder.iterdir()) == [
            "generation-00000002",
            "generation-00000003",
            "lock",
        ]
    assert (elsewhere / "x").exists(), "what a link leads to is not ours"


def test_save_export_and_import_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    file = tmp_path / "expert.safetensors"
    with served(tmp_path / "saved") as server, WireClient(server.address) as client:
        assert run(main, ["save", server.address]).output == "generation-00000002\n"
        assert run(main, ["export", server.address, "ffn.0", str(file)]).exit_code == 0
        state = safetensors.torch.load_file(file)
        FeedForwardExpert(D).load_state_dict(state)
        torch.testing.assert_close(state, client.get_state()["ffn.0"], rtol=0, atol=0)
        changed = {key: value + 1 for key, value in state.items()}
        safetensors.torch.save_file(changed, file)
        assert run(main, ["import", server.address, "ffn.0", str(file)]).exit_code == 0
        torch.testing.assert_close(client.get_state()["ffn.0"], changed, rtol=0, atol=0)
        refused = run(main, ["import", server.address, "glu.0", str(file)])
        assert (refused.exit_code, "unknown=['down.bias', 'up.bias']" in refused.output) == (1, True), (
            refused.output
        )
        torch.save(changed, file)  # `state` may be a mapping of this file
        said = run(main, ["import", server.address, "ffn.0", str(file)]).output
        assert "expected a safetensors file" in said
        assert "what torch.save wrote" in said


def test_config_check_says_what_is_wrong_without_serving(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[experts."ffn.[0:2]"]\nclass = "ffn"\nargs = { d_model = 8 }\n')
    good = CliRunner().invoke(main, ["config", "--check", str(file)])
    assert (good.exit_code, good.output) == (0, f"{file}: 2 experts, no mistakes\n")
    file.write_text('[experts.e]\nclass = "ffn"\nargs = { d_modell = 8 }\n')
    bad = CliRunner().invoke(main, ["config", "--check", str(file)])
    assert bad.exit_code == 1
    assert "d_modell" in bad.output
