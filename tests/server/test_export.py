"""What the export command does with what a server answers."""

from __future__ import annotations

import json
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.command.cli import main
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import ParcelWriter
from moe_autograd.wire.tensors import TensorLimits
from tests.support.parcels import messages_of


def exported(answer: list[bytes], folder: Path) -> Any:
    """Run the export command against a server that answers so."""
    handler = grpc.unary_stream_rpc_method_handler(lambda request, context: iter(answer))
    return run_beside("GetState", handler, "export", str(folder / "e.safetensors"))


def imported(*updates: pb.ExpertUpdate, folder: Path) -> Any:
    """Run the import command against a server that answers so."""
    save_file({"weight": torch.ones(3)}, folder / "e.safetensors")
    reply = seal(pb.UpdateReply(updates=updates))
    handler = grpc.stream_unary_rpc_method_handler(lambda messages, context: reply)
    return run_beside("SetState", handler, "import", str(folder / "e.safetensors"))


def run_beside(rpc: str, handler: grpc.RpcMethodHandler, command: str, file: str) -> Any:
    """Run a command against a server that has one RPC."""
    handlers = {rpc: handler}
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return CliRunner().invoke(main, [command, f"127.0.0.1:{port}", "e", file])
    finally:
        server.stop(None).wait()


def entries(*parcels: tuple[Any, list[Tensor | None]]) -> list[bytes]:
    writer = ParcelWriter()
    writer.add(pb.StateUpdate(num_entries=len(parcels)))
    for head, tensors in parcels:
        writer.add(head, tensors)
    return list(messages_of(writer))


GOOD = pb.StateEntry(expert="e", key="weight"), [torch.ones(3)]


def test_weights_larger_than_a_client_takes_by_default_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *others = TensorLimits.__init__.__defaults__
    monkeypatch.setattr(TensorLimits.__init__, "__defaults__", (8, *others))  # for 1 GiB
    assert exported(entries(GOOD), tmp_path).exit_code == 0
    assert load_file(tmp_path / "e.safetensors").keys() == {"weight"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            entries(GOOD, (pb.CallResult(call=1), [torch.ones(3)])),
            "state entries of one tensor each, got CallResult",
        ),
        (entries((pb.StateEntry(expert="e", key="weight"), [])), "got StateEntry with 0"),
        (entries(GOOD, GOOD), "expected 2 entries, got 1. Try again."),
        (entries((pb.StateEntry(expert="e", key="weight"), [None])), "got StateEntry with 1"),
        ([entries(GOOD)[0][:-1] + b"\x00"], "checksum"),
        ([b"noise"], "expected"),
    ],
    ids=["another parcel", "no tensor", "twice", "None", "flipped byte", "noise"],
)
def test_an_export_of_what_is_no_state_says_so_and_writes_no_file(
    tmp_path: Path, answer: list[bytes], text: str
) -> None:
    ended = exported(answer, tmp_path)
    assert (ended.exit_code, text in ended.output) == (1, True), ended.output
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_cannot_be_written_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "e.safetensors").write_bytes(b"the old one")
    wide = pb.StateEntry(expert="e", key="weight"), [torch.ones(3, dtype=torch.complex128)]
    ended = exported(entries(wide), tmp_path)
    assert (ended.exit_code, "that safetensors can hold" in ended.output) == (1, True), ended.output
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"the old one"]


def test_an_export_into_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    ended = exported(entries(GOOD), tmp_path / "none")
    assert (ended.exit_code, "(No such file or directory). Check path" in ended.output) == (1, True), (
        ended.output
    )


def test_an_export_of_good_entries_is_a_file(tmp_path: Path) -> None:
    ended = exported(entries(GOOD), tmp_path)
    assert (ended.exit_code, [path.name for path in tmp_path.iterdir()]) == (0, ["e.safetensors"]), (
        ended.output
    )


def test_an_export_over_a_file_leaves_who_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "e.safetensors"
    file.touch(mode=0o400)
    assert exported(entries(GOOD), tmp_path).exit_code == 0
    assert (file.stat().st_mode & 0o777, load_file(file).keys()) == (0o400, {"weight"})


def test_an_import_of_a_dtype_that_does_not_travel_says_so(tmp_path: Path) -> None:
    file = tmp_path / "e.safetensors"
    save_file({"weight": torch.ones(3, dtype=torch.float8_e4m3fn)}, file)
    ended = CliRunner().invoke(main, ["import", "127.0.0.1:9", "e", str(file)])
    assert (ended.exit_code, type(ended.exception)) == (1, SystemExit)
    assert f"import: 'weight' of '{file}': tensor: expected a dense tensor of float64" in ended.output


def test_an_import_of_a_dtype_that_safetensors_does_not_give_to_torch_says_so(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [0, 3]}}).encode()
    file = tmp_path / "e.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    ended = CliRunner().invoke(main, ["import", "127.0.0.1:9", "e", str(file)])
    assert (ended.exit_code, type(ended.exception)) == (1, SystemExit)
    assert f"import: expected tensors of dtypes that travel, got 'F8_E8M0' in '{file}'" in ended.output


def test_an_import_of_a_file_without_tensors_says_so(tmp_path: Path) -> None:
    save_file({}, tmp_path / "e.safetensors")
    with ExpertsServer({"e": nn.Linear(3, 3)}) as server:
        ended = CliRunner().invoke(main, ["import", server.address, "e", str(tmp_path / "e.safetensors")])
    assert (ended.exit_code, "import: expected tensors in" in ended.output) == (1, True), ended.output


def test_an_export_to_what_is_no_file_leaves_it_what_it_is() -> None:
    with ExpertsServer({"e": nn.Linear(3, 3)}) as server:
        ended = CliRunner().invoke(main, ["export", server.address, "e", "/dev/null"])
    assert (ended.exit_code, ended.output, Path("/dev/null").is_char_device()) == (0, "", True)


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        ([], "expected an answer for it, got those for []"),
        ([pb.ExpertUpdate(expert="f")], "expected an answer for it, got those for ['f']"),
        (
            [pb.ExpertUpdate(expert="e", status=pb.Status(code=pb.EXPERT_FAILED, message="it is odd"))],
            "it is odd",
        ),
    ],
    ids=["none", "another expert", "a failure"],
)
def test_an_import_that_is_not_confirmed_has_failed(
    tmp_path: Path, updates: list[pb.ExpertUpdate], text: str
) -> None:
    ended = imported(*updates, folder=tmp_path)
    assert (ended.exit_code, type(ended.exception), text in ended.output) == (1, SystemExit, True), (
        ended.output
    )
    assert "expert 'e' at 127.0.0.1:" in ended.output


def test_an_import_that_is_confirmed_has_gone_well(tmp_path: Path) -> None:
    ended = imported(pb.ExpertUpdate(expert="e", num_updates=7), folder=tmp_path)
    assert (ended.exit_code, ended.output) == (0, "")
