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
from torch import Tensor

from experts_server.command.cli import main
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.parcels import messages_of


def exported(answer: list[bytes], folder: Path) -> Any:
    """Run the export command against a server that answers so."""
    handlers = {"GetState": grpc.unary_stream_rpc_method_handler(lambda request, context: iter(answer))}
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return CliRunner().invoke(main, ["export", f"127.0.0.1:{port}", "e", str(folder / "e.safetensors")])
    finally:
        server.stop(None).wait()


def entries(*parcels: tuple[Any, list[Tensor | None]]) -> list[bytes]:
    writer = ParcelWriter()
    writer.add(pb.StateUpdate(num_entries=len(parcels)))
    for head, tensors in parcels:
        writer.add(head, tensors)
    return list(messages_of(writer))


GOOD = pb.StateEntry(expert="e", key="weight"), [torch.ones(3)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            entries(GOOD, (pb.CallResult(call=1), [torch.ones(3)])),
            "state entries of one tensor each, got CallResult",
        ),
        (entries((pb.StateEntry(expert="e", key="weight"), [])), "got StateEntry with 0"),
        (entries((pb.StateEntry(expert="e", key="weight"), [None])), "got StateEntry with 1"),
        ([entries(GOOD)[0][:-1] + b"\x00"], "checksum"),
        ([b"noise"], "expected"),
    ],
    ids=["another parcel", "no tensor", "None", "flipped byte", "noise"],
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
