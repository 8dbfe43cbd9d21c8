"""A save that finds no memory fails clearly, and takes no more than a copy of what it saves; nor does a start."""

from __future__ import annotations

from pathlib import Path

from tests.support.subprocesses import assert_prints

PROGRAM = """
    import asyncio, pathlib
    import grpc
    import torch
    from torch import nn
    from experts_server import ExpertsServer
    from experts_server.checkpoints.checkpoint import CheckpointFolder
    from experts_server.checkpoints.snapshot import Snapshot
    from moe_autograd.errors import CheckpointError
    from tests.support.scarce import little_memory
    from tests.support.servers import WireClient

    MIB = 1 << 20
    path = pathlib.Path({folder!r})

    def snapshot(**plain):
        return Snapshot({{"weights.w": torch.ones(64 * MIB)}}, {{"expert": "e"}} | plain)

    def names():
        return sorted(file.name for file in path.iterdir())
"""


def program(folder: Path, text: str) -> str:
    return PROGRAM.format(folder=str(folder)) + text


def test_a_save_holds_no_second_copy_of_what_it_writes(tmp_path: Path) -> None:
    """Where there was no memory for one, safetensors ended the process."""
    text = """
    with CheckpointFolder(path) as folder:
        saved = snapshot()
        with little_memory(128 * MIB):
            print(folder.write([saved]))
    """
    assert_prints(program(tmp_path, text), "generation-00000001")


def test_a_start_holds_one_copy_of_what_it_reads(tmp_path: Path) -> None:
    text = """
    with CheckpointFolder(path) as folder:
        folder.write([snapshot()])
        with little_memory((256 + 128) * MIB):
            _, found = folder.read_newest()
        print(bool((found["e"].tensors["weights.w"] == 1).all()))
    """
    assert_prints(program(tmp_path, text), "True")


def test_a_checkpoint_that_there_is_no_memory_to_read_is_not_passed_over_as_damaged(tmp_path: Path) -> None:
    text = """
    with CheckpointFolder(path) as folder:
        folder.write([snapshot()])
        folder.write([snapshot()])
        for read in (folder.read_newest, lambda: folder.read_newest_of("e")):
            try:
                with little_memory(128 * MIB):
                    read()
            except CheckpointError as error:
                print("generation-00000002': expected memory to read it, got none. It may be whole" in str(error))
    """
    assert_prints(program(tmp_path, text), "True True")


def test_without_memory_to_write_a_save_fails_clearly_and_leaves_no_stray_file(tmp_path: Path) -> None:
    text = """
    with CheckpointFolder(path) as folder:
        saved = snapshot(told="x" * (128 * MIB))
        try:
            with little_memory(128 * MIB):
                folder.write([saved])
        except CheckpointError as error:
            print("expected memory to write generation-00000001, got none" in str(error), *names())
        print(folder.write([saved]))
    """
    assert_prints(program(tmp_path, text), "True lock generation-00000001")


def test_without_memory_for_a_copy_a_save_fails_clearly_and_the_server_goes_on(tmp_path: Path) -> None:
    text = """
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64 * MIB))

        def forward(self, x):
            return x * self.w[0]

    config = {"checkpoint_dir": path}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    with ExpertsServer({"e": Big()}, optimizer=sgd, config=config) as server, WireClient(server.address) as client:
        try:
            with little_memory(128 * MIB):
                client.save()
        except grpc.RpcError as error:
            print("expert 'e', 'weights.w': expected memory for a copy of 268435456 bytes" in error.details())
        print(client.forward("e", torch.ones(1, 1)).code, client.save())
    """
    assert_prints(program(tmp_path, text), "True OK generation-00000002")
