"""Offloaded experts in a forked child: they are its parent's; nothing there waits, or touches the parent's files."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.hosting.offloading import OffloadMemory
from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offload_checkpoints import assert_equal, build, states, train

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing forks here")


def in_fork(function: Callable[[], object]) -> str:
    """Call a function in a forked child; return what it said, or was told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


X = torch.ones(4, 8)

DOORS: dict[str, Callable[[OffloadedExperts], object]] = {
    "call": lambda experts: experts[3](X),
    "calls": lambda experts: parallel_apply(experts[1:], [X] * 3),
    "step": OffloadedExperts.step,
    "zero_grad": OffloadedExperts.zero_grad,
    "gradients": lambda experts: experts.gradients(0),
    "state_dict": lambda experts: experts.state_dict(0),
    "apply": lambda experts: experts[0].apply(lambda _: None),
    "prefetch": OffloadedExperts.prefetch,
    "resident_bytes": lambda experts: experts.resident_bytes,
    "checkpoint": OffloadedExperts.checkpoint,
    "restore": OffloadedExperts.restore,
    "beside": lambda experts: OffloadedExperts([nn.Linear(8, 8)], beside=experts),
}


@pytest.mark.parametrize("what", [*DOORS, "backward"])
def test_a_forked_child_is_told_that_experts_are_its_parents(tmp_path: Path, what: str) -> None:
    """Also where another thread has the lock at the fork: in the child nobody lets go of it."""
    experts = build(tmp_path)
    experts.checkpoint()
    train(experts, range(2))
    sum(expert(X) for expert in experts).sum().backward()  # type: ignore[union-attr]
    loss = experts[0](X).sum()
    before = states(experts)
    enter = {**DOORS, "backward": lambda _: loss.backward()}[what]
    with experts.residency._lock:
        said = in_fork(lambda: enter(experts))
    assert said.startswith(
        f"RuntimeError: OffloadedExperts: expected process {os.getpid()}, which built them"
    )
    assert_equal(states(experts), before)
    loss.backward()
    experts.step()
    experts.close()


@pytest.mark.parametrize("what", ["describe", "close", "let go of"])
def test_a_forked_child_may_describe_close_and_let_go_of_experts_without_waiting(
    tmp_path: Path, what: str
) -> None:
    torch.manual_seed(0)
    experts = OffloadedExperts(
        [nn.Linear(8, 8) for _ in range(4)], max_resident_bytes=1500, store=tmp_path, num_microbatches=2
    )
    held: list[Any] = [experts, experts[0](X.clone().requires_grad_())]
    before = states(experts)

    def let_go() -> object:
        nonlocal experts
        known = weakref.ref(experts)
        del experts
        held.clear()
        gc.collect()
        return known()

    does = {"describe": lambda: repr(experts), "close": experts.close, "let go of": let_go}[what]
    with experts.residency._lock:
        said = in_fork(does)
    assert said == (repr(experts) if what == "describe" else "None")
    held[1].sum().backward()
    assert_equal(states(experts), before)
    experts.close()


@pytest.mark.parametrize(
    "open_folder",
    [build, functools.partial(OffloadMemory, 1000), CheckpointFolder],
    ids=["experts", "a server's experts", "a server's checkpoints"],
)
def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path, open_folder: Callable[[Path], Any]) -> None:
    owner = open_folder(tmp_path)
    (has_ended, end), (has_begun, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(begin, b"1")
        os.read(has_ended, 1)  # until the parent closes its end
        os._exit(0)
    os.read(has_begun, 1)
    with pytest.raises(Exception, match=r"expected (a folder that nobody uses|it to be free), got one"):
        open_folder(tmp_path)  # it is the parent's still
    owner.close()
    open_folder(tmp_path).close()
    os.close(end)
    os.waitpid(child, 0)
