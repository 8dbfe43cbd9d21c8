"""A program: a worker at rest has ended its team of intra-op threads. In a process without anybody else's threads."""

from __future__ import annotations

import os
import threading

import torch

from moe_autograd import _threads
from moe_autograd._intraop import end_team, num_cores, set_team_size
from moe_autograd._workers import run_all
from tests.support.servers import wait_until


def num_members() -> int:
    """Return how many threads of this process Python does not know."""
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())


def main() -> None:
    """Run two calls at once that have a team of two each; say how many members that adds, meanwhile and afterwards."""
    side_by_side, counts, threads = threading.Barrier(2), list[int](), set[threading.Thread]()

    def call(index: int) -> None:
        threads.add(threading.current_thread())
        torch.ones(1 << 20).add_(1)
        side_by_side.wait(60)
        counts.append(num_members())
        side_by_side.wait(60)

    before = num_members()
    set_team_size(2 * num_cores())  # of which each of as many calls as there are cores gets two
    assert run_all(call, range(2)) == {}
    end_team()
    (worker,) = threads - {threading.current_thread()}
    wait_until(lambda: worker in [idle.thread for idle in _threads._idle])
    print(min(counts) - before, num_members() - before)


if __name__ == "__main__":
    main()
