"""Train, save and get killed, again and again: `python -m tests.support.kill_while_saving FOLDER NUM_KILLS`.

Each child (a fork, since importing torch takes seconds) loads the newest checkpoint, goes on with the updates that the
parent has not seen acknowledged-and-saved, and saves after every few, until SIGKILL comes at a random moment. It
reports each step with one byte, so the parent knows what had been acknowledged.

The expert counts: update n adds n to a weight of zero, so a lost or repeated update shows in the sum. Prints the number
of kills, and how many of them hit a save.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from experts_server.budget import Budget
from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.checkpoints.snapshot import restore, take
from experts_server.hosting.calls import BackwardCall, UpdateCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.training import Training

CLIENT = b"client"
# b"u" update acknowledged, b"w" save begins, b"s" save acknowledged; up to which update.
RECORD = struct.Struct("<cI")


class Counting(nn.Module):
    """Its weight's gradient is minus its input's sum; some ballast makes saving take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("ballast", torch.zeros(1 << 18))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def make_expert() -> HostedExpert:
    module = Counting()
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, "gathered"), Budget(1 << 20, "replies"))
    return HostedExpert("e", module, Training(torch.optim.SGD([module.weight], lr=1.0)), memory)


def apply(expert: HostedExpert, number: int, settled: int) -> None:
    """Send update `number`: a zero_grad, a backward and a step with three sequence numbers of their own."""
    sequence, below = 3 * number, 3 * settled

    def ignore(*_: object) -> None: ...

    x, grad = torch.ones(1, dtype=torch.float64), torch.tensor([-float(number)], dtype=torch.float64)
    expert.update(UpdateCall(CLIENT, ignore, "zero_grad", sequence, below))
    expert.backward(BackwardCall(CLIENT, ignore, number, sequence + 1, below, (grad,), (False,), inputs=(x,)))
    expert.update(UpdateCall(CLIENT, ignore, "step", sequence + 2, below))


def work(folder: Path, report: int, resume_from: int) -> None:
    """Be the server, until killed. Updates from `resume_from` on are sent, whether they were applied before or not."""
    with CheckpointFolder(folder) as checkpoints:
        expert = make_expert()
        newest = checkpoints.read_newest()
        if newest is not None:
            restore(expert, newest[1]["e"])
        assert expert.num_updates + 1 >= resume_from, (
            f"lost: {expert.num_updates} of {resume_from - 1} saved ones"
        )
        number, loaded = resume_from, expert.num_updates
        while True:
            apply(expert, number, resume_from)
            # A save can be on the disk although its acknowledgement was cut off.
            counted = max(number, loaded)
            assert expert.num_updates == counted
            total = counted * (counted + 1) / 2
            assert expert.module.weight.item() == total, f"{expert.module.weight.item()} is not {total}"
            os.write(report, RECORD.pack(b"u", number))
            if number % 3 == 0:
                os.write(report, RECORD.pack(b"w", number))
                checkpoints.write([take(expert)])
                os.write(report, RECORD.pack(b"s", number))
            number += 1


def run_child(folder: Path, resume_from: int, alive_s: float) -> tuple[int, bool, bool]:
    """Fork, wait, kill; return up to where is saved, whether a save was hit, and whether the child came that far."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            work(folder, writer, resume_from)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(writer)
    first = os.read(reader, RECORD.size)  # it has loaded; the clock starts
    time.sleep(alive_s)  # the fault's random moment
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    records = first
    while chunk := os.read(reader, 1 << 16):
        records += chunk
    os.close(reader)
    events = list(RECORD.iter_unpack(records[: len(records) // RECORD.size * RECORD.size]))
    saved = max((number for kind, number in events if kind == b"s"), default=resume_from - 1)
    kinds = [kind for kind, _ in events if kind != b"u"]
    return saved, bool(kinds) and kinds[-1] == b"w", os.WIFSIGNALED(status)


def main(folder: Path, num_kills: int) -> int:
    torch.set_num_threads(1)
    # torch imports a second's worth of modules at the first step: once here, not in each child.
    apply(make_expert(), 1, 0)
    chance = random.Random(0)
    saved = interrupted = 0
    for _ in range(num_kills):
        saved, was_saving, was_killed = run_child(folder, saved + 1, chance.uniform(0.0, 0.05))
        interrupted += was_saving
        if not was_killed:
            return 1
    print(num_kills, interrupted)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
