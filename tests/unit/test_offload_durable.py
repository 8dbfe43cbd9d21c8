"""Checkpoints of offloaded experts on the disk: flushed in order, and whole whenever their process is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moe_autograd.autograd.offload import checkpoints
from tests.support.offload_checkpoints import assert_equal, build, states, train
from tests.support.subprocesses import run_python

ROOT = Path(__file__).parents[2]


def test_every_file_is_flushed_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd: int) -> None:
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def watched_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(checkpoints.os, "fsync", watched_fsync)
    monkeypatch.setattr(checkpoints.os, "rename", watched_rename)
    with build(tmp_path) as experts:
        path = experts.checkpoint()
    at = events.index("rename")
    assert {f"flush {p.name}" for p in path.iterdir()} < set(events[:at])
    assert events[at - 1] == f"flush {path.name}.new"
    assert events[at + 1] == f"flush {tmp_path.name}"


PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_offload_checkpoints import build, train
    experts = build(Path({folder!r}))
    step = experts.restore()["step"] if {resume} else 0
    print("ready", step, flush=True)
    while True:
        train(experts, range(step, step + 1))
        step += 1
        if step % 2 == 0:
            experts.checkpoint({{"step": step}})
            print(step, flush=True)
    """
)


@pytest.mark.stress
def test_kill_9_at_any_moment_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """Checkpoint every second step, as fast as it goes; killed after a random number of printed bytes and spins."""
    choice = random.Random(0)
    folder, resume, acknowledged = tmp_path / "experts", False, 0
    for _ in range(2):
        program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), resume=resume)
        with subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            assert running.stdout.readline().split() == ["ready", str(acknowledged)]
            for _ in range(choice.randint(1, 6)):
                acknowledged = int(running.stdout.readline())
            # Some microseconds to milliseconds into what comes next.
            for _ in range(choice.randint(0, 200_000)):
                pass
            running.send_signal(signal.SIGKILL)
            rest = [int(line) for line in running.stdout.read().split()]
        at_least = max([acknowledged, *rest])
        with build(folder) as experts:
            step = experts.restore()["step"]
            assert step in (at_least, at_least + 2), "the last acknowledged checkpoint, or one just completed"
            got = states(experts)
        with build(tmp_path / "straight") as straight:
            train(straight, range(step))
            assert_equal(got, states(straight))
        shutil.rmtree(tmp_path / "straight")
        resume, acknowledged = True, step


KILL_AT_EVERY_CALL = """
    import os, signal, sys
    import torch
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_offload_checkpoints import build, states, train

    torch.set_num_threads(1)
    CALLS = ("link", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "write", "open")
    straight = build(Path({folder!r}) / "straight")
    want = [states(straight)]
    for step in range(2):
        train(straight, range(step, step + 1))
        want.append(states(straight))
    straight.close()

    def in_a_child(body):
        pid = os.fork()
        if pid == 0:
            body()
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    def run(folder, kill_at):
        experts = build(folder)
        experts.checkpoint(0)
        train(experts, range(1))
        experts.checkpoint(1)
        train(experts, range(1, 2))
        experts.residency.flush()  # so that every run makes the same calls
        count = 0
        def counting(call):
            def counted(*args, **kwargs):
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return counted
        for name in CALLS:
            setattr(os, name, counting(getattr(os, name)))
        experts.checkpoint(2)

    def check(folder):
        experts = build(folder)
        note = experts.restore()
        assert note in (1, 2), note
        for got, wanted in zip(states(experts), want[note], strict=True):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        experts.checkpoint(3)
        left = sorted(path.name for path in folder.iterdir())
        assert len(left) == 3 and left[1:] == ["resident-store", "resident-store.lock"], left
        print(note, flush=True)

    kill_at, killed = 0, True
    while killed:
        kill_at += 1
        folder = Path({folder!r}) / str(kill_at)
        killed = os.WIFSIGNALED(in_a_child(lambda: run(folder, kill_at)))
        assert in_a_child(lambda: check(folder)) == 0, kill_at
    print("calls", kill_at)
"""


@pytest.mark.stress
def test_killed_before_each_file_operation_of_a_checkpoint_the_old_or_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    ended = run_python(KILL_AT_EVERY_CALL.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    assert ended.returncode == 0, ended.stderr
    *notes, (_, count) = [line.split() for line in ended.stdout.splitlines()]
    assert int(count) == len(notes) > 30
    assert sorted(notes) == notes, "once the new one is there it stays"
    assert notes[0] == ["1"]
    assert notes[-1] == ["2"]
