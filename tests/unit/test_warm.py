"""What tells of warm processes says what is so, or nothing."""

from __future__ import annotations

import os

from tests.support.servers import START_S
from tests.support.subprocesses import assert_prints
from tests.support.warm import WarmProcess


def test_a_process_of_whose_end_nobody_can_tell_has_no_status() -> None:
    """It was taken for one that had exited 0. In a process of its own: the one that forks is killed there."""
    assert_prints(
        """
        import os, signal
        from tests.support.warm import WarmProcess

        out = os.open(os.devnull, os.O_WRONLY)
        process = WarmProcess("import signal; signal.pause()", stdout=out, stderr=out)
        with open(f"/proc/{process.pid}/stat") as file:
            forking = int(file.read().rpartition(")")[2].split()[1])
        os.kill(forking, signal.SIGKILL)
        try:
            process.wait(60)
        except EOFError as error:
            print(str(error).partition(",")[0])
        os.kill(process.pid, signal.SIGKILL)
        """,
        "warm process: expected its pid or status",
    )


def test_the_end_of_a_process_that_was_seen_to_end_is_not_waited_for() -> None:
    """Its limit of time was slept through."""
    with open(os.devnull, "w") as out:
        process = WarmProcess("", stdout=out.fileno(), stderr=out.fileno())
    assert [process.wait(START_S), process.wait()] == [0, 0]
