"""What runs programs for tests tells of their ends as soon as it can."""

from __future__ import annotations

import pytest

from tests.support.subprocesses import run_ranks


def test_a_rank_that_fails_is_told_of_though_another_waits_for_it() -> None:
    program = """
        import sys, threading
        if sys.argv[1] == "0":
            sys.exit("the first has failed")
        print("the second waits", flush=True)
        threading.Event().wait()
        """
    with pytest.raises(AssertionError, match=r"exit 1\n(.|\n)*the first has failed(.|\n)*exit None\n"):
        run_ranks(program, limit_s=100.0)


def test_a_rank_that_hangs_is_told_of_with_what_it_has_printed() -> None:
    program = """
        import threading
        print("as far as here", flush=True)
        threading.Event().wait()
        """
    with pytest.raises(
        TimeoutError, match=r"expected an end within 3.0 s(.|\n)*exit None\n(.|\n)*as far as here"
    ):
        run_ranks(program, num_ranks=1, limit_s=3.0)
