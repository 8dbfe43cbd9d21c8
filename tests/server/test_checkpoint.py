"""Checkpoints: what is saved is what was; a damaged generation is passed over; one that does not fit is refused."""

from __future__ import annotations

import copy
import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from experts_server import ExpertsServer
from experts_server.checkpoints.checkpoint import CheckpointFolder, _sealed
from experts_server.checkpoints.snapshot import FORMAT
from experts_server.command.cli import main
from moe_autograd.errors import CheckpointError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.checkpointing import BEGUN_AND_STOPPED, D, adam, experts, served, snapshot_of, train
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


def flip_a_byte(folder: Path) -> None:
    file = folder / "ffn.0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_format(folder: Path) -> None:
    file = folder / "manifest.json"
    content, told = file.read_bytes(), rb"\"format\": %d"
    assert told % FORMAT in content
    file.write_bytes(content.replace(told % FORMAT, told % (FORMAT + 1)))


ENTRY = {"file": "../generation-00000001/ffn.0.safetensors", "num_bytes": 1, "xxh3_64": ""}
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped byte": flip_a_byte,
    "truncated file": lambda folder: (folder / "glu.0.safetensors").write_bytes(b"short"),
    "missing file": lambda folder: (folder / "glu.0.safetensors").unlink(),
    "changed manifest": change_the_format,
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "foreign manifest": lambda folder: (folder / "manifest.json").write_bytes(
        b'{"manifest": "{}", "xxh3_64": ""}'
    ),
    "manifest that leaves its folder": lambda folder: (folder / "manifest.json").write_bytes(
        _sealed({"format": FORMAT, "generation": 2, "experts": {"../generation-00000001/ffn.0": ENTRY}})
    ),
    "list as manifest": lambda folder: (folder / "manifest.json").write_bytes(b"[]"),
    "lists without end": lambda folder: (folder / "manifest.json").write_bytes(b"[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_passed_over_and_that_is_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointFolder(tmp_path) as folder:
        for number in (1, 2):
            folder.write([snapshot_of(name, number) for name in ("ffn.0", "glu.0")])
        DAMAGES[damage](tmp_path / "generation-00000002")
        with caplog.at_level(logging.ERROR):
            name, snapshots = folder.read_newest() or ("", {})
    assert name == "generation-00000001"
    assert snapshots["ffn.0"].tensors["weights.w"].item() == 1
    assert "generation-00000002" in caplog.text
    assert "Falling back" in caplog.text


def write_another_format(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(_sealed({"format": FORMAT + 1, "experts": {}}))


def lead_in_circles(folder: Path) -> None:
    """Stands for all that says nothing of what is on the disk, as missing permissions do to all but root."""
    (folder / "glu.0.safetensors").unlink()
    (folder / "glu.0.safetensors").symlink_to("glu.0.safetensors")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (write_another_format, f"expected format {FORMAT}, got {FORMAT + 1}: another version"),
        (lead_in_circles, r"expected files that can be read, got 'Too many levels .*' \(glu.0.safetensors\)"),
    ],
)
def test_a_generation_that_may_be_whole_and_cannot_be_read_is_not_passed_over(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    """After a downgrade, or as another user, a server would go on from an older state and remove the newer one."""
    with CheckpointFolder(tmp_path) as folder:
        for number in (1, 2):
            folder.write([snapshot_of(name, number) for name in ("ffn.0", "glu.0")])
        spoil(tmp_path / "generation-00000002")
        with pytest.raises(CheckpointError, match=text) as refused:
            folder.read_newest()
        assert "move this generation away" in str(refused.value)
        with pytest.raises(CheckpointError, match=text):
            folder.read_newest_of("glu.0")


def test_if_no_generation_is_whole_the_server_refuses_to_start_afresh(tmp_path: Path) -> None:
    with served(tmp_path):
        pass
    for generation in tmp_path.glob("generation-*"):
        flip_a_byte(generation)
    with pytest.raises(CheckpointError, match="expected a whole generation, got 2 damaged"):
        served(tmp_path).start()


@pytest.mark.parametrize(
    ("modules", "optimizer", "text"),
    [
        ({"ffn.0": FeedForwardExpert(D)}, adam, "expected the configured experts ffn.0, got ffn.0, glu.0"),
        ({**experts(), "ffn.0": FeedForwardExpert(D, 4)}, adam, "'up.bias': '(4,) float32'"),
        ({**experts(), "glu.0": SwiGLUExpert(D, 8)}, adam, "'up.weight': '(8, 8) float32'"),
        (
            {**experts(), "ffn.0": SwiGLUExpert(D, 4)},
            adam,
            "got {'expert': 'ffn.0', 'class': 'FeedForwardExpert'",
        ),
        (experts(), lambda p: torch.optim.SGD(p, lr=1), "'optimizer': 'SGD'} as configured, got"),
    ],
    ids=["other experts", "other shapes", "other shapes of the last", "other class", "other optimizer"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_both_sides_named(
    tmp_path: Path, modules: dict[str, nn.Module], optimizer: Any, text: str
) -> None:
    with served(tmp_path):
        pass
    given = copy.deepcopy(modules)
    for module in given.values():
        nn.init.zeros_(next(module.parameters()))
    before = copy.deepcopy([module.state_dict() for module in given.values()])
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, given, optimizer).start()
    assert text in str(refused.value)
    torch.testing.assert_close([module.state_dict() for module in given.values()], before, rtol=0, atol=0)
    with served(tmp_path):
        pass  # it is still there, and the folder is free again


def test_a_checkpoint_of_other_trained_parameters_is_refused(tmp_path: Path) -> None:
    """The optimizer's state goes by their places: it would be given to others."""
    with served(tmp_path):
        pass
    modules = experts()
    modules["ffn.0"].get_parameter("up.weight").requires_grad_(False)
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, modules).start()
    assert "expected 3 trained parameters as configured, got 4 (differing: 0 up.weight)" in str(refused.value)


class WithSecrets(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (WithSecrets(D, D), "expert 'e', '_extra_state' of its state_dict: expected a tensor, got dict"),
        (nn.Linear(D, D, dtype=torch.complex128), "expected tensors that safetensors can hold, got one that it cannot"),
    ],
    ids=["extra state", "dtype"],
)  # fmt: skip
def test_an_expert_that_no_checkpoint_can_hold_is_refused_at_the_start(
    tmp_path: Path, module: nn.Module, text: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, {"e": module}).start()
    assert text in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class Quantizing(torch.optim.SGD):
    """Keeps state in tensors that are made of others, as optimizers with 8 bits do."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = TwoTensor(parameter.grad.clone(), parameter.grad.clone())
        super().step()


class Slowing(torch.optim.SGD):
    """Changes its rate, which is a tensor, as it likes."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["lr"] = self.param_groups[0]["lr"] / 2


def test_a_setting_that_has_changed_and_is_no_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    slowing = functools.partial(Slowing, lr=torch.tensor(0.1))
    config = {"checkpoint_dir": str(tmp_path)}
    server = ExpertsServer({"e": nn.Linear(D, D)}, optimizer=slowing, config=config).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step()
    said = r"expert 'e', optimizer, group 'lr': expected a value that JSON gives back, got Tensor\."
    with pytest.raises(CheckpointError, match=said):
        server.stop()


def test_optimizer_state_that_no_checkpoint_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    config = {"checkpoint_dir": str(tmp_path)}
    server = ExpertsServer({"e": nn.Linear(D, D)}, optimizer=Quantizing, config=config).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step()
    with pytest.raises(CheckpointError, match=r"expert 'e', optimizer, state 'kept': .* got TwoTensor"):
        server.stop()


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
