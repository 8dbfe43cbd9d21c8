"""A debugger in calls: one at a time reads the terminal, in the order of a loop."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterable

from tests.support.subprocesses import ROOT

PROGRAM = """
import pdb
import torch
from moe_autograd import map_with_parallel_backward, parallel_apply

class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        breakpoint()
        return grad, None

class Expert(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        pdb.set_trace()
        return x.clone()

x = torch.ones(2, requires_grad=True)
parallel_apply([Expert(number) for number in range(3)], [x] * 3)
outputs = map_with_parallel_backward(Stops, *[(x, number) for number in range(3)])
sum(y.sum() for y in outputs).backward()
"""


def answers(program: str, questions: Iterable[str]) -> list[str]:
    """Ask the debugger of a program in a terminal; return the last line of what it says to each question."""
    terminal, its_end = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb"},
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    try:
        said = [_until_asked(terminal)]
        for question in questions:
            os.write(terminal, f"{question}\n".encode())
            said.append(_until_asked(terminal))
        os.write(terminal, b"c\n")
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(terminal)
    return [text.split()[-2] for text in said[1:]]


def _until_asked(terminal: int) -> str:
    said = b""
    while not said.endswith(b"(Pdb) "):
        assert select.select([terminal], [], [], 120)[0], said
        said += os.read(terminal, 1024)  # raises where the program has ended
    return said.decode()


def test_debuggers_are_open_one_after_the_other() -> None:
    in_forward, in_backward = ["p self.number"] * 2, ["p ctx.number"] * 2
    questions = [*in_forward, "c", *in_forward, "c", *in_forward, "c"]
    questions += [*in_backward, "c", *in_backward, "c", *in_backward]
    told = answers(PROGRAM, questions)
    numbers = [number for question, number in zip(questions, told, strict=True) if question != "c"]
    assert numbers == [*"001122", *"221100"]
