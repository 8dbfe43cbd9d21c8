"""However a map ends, by Ctrl-C, exit, fork or failure after failure, nothing hangs and nothing is left behind.

Each ending is provoked in a process of its own, with real signals and real forks.
"""

from __future__ import annotations

import pytest

from tests.support.endings import PREAMBLE
from tests.support.subprocesses import assert_prints, run_ranks


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_sys_exit_in_a_call_exits_with_its_code_once_the_others_rest(where: str) -> None:
    assert_prints(
        PREAMBLE
        + f"""
    barrier = threading.Barrier(4)
    def action(mine):
        barrier.wait(60)
        if mine == 3:
            sys.exit(7)
    try:
        run([lambda i=i: action(i) for i in range(4)], {where!r})
    except SystemExit as error:
        print(error.code, meet(4))
    """,
        "7 16.0",
    )


@pytest.mark.parametrize("daemon", [True, False])
def test_the_interpreter_exits_while_a_map_runs_in_another_thread(daemon: bool) -> None:
    """A daemon's map is abandoned; anybody else's is waited for, as Python does with threads."""
    assert_prints(
        PREAMBLE
        + f"""
    barrier, go_on = threading.Barrier(5), threading.Event()
    def action():
        barrier.wait(60)
        go_on.wait({"None" if daemon else "60"})
    def work():
        value = run([action] * 4)
        if not {daemon}:
            print(value, run([None] * 8, "backward"), meet(8), flush=True)
    threading.Thread(target=work, daemon={daemon}).start()
    barrier.wait(60)
    if not {daemon}:
        go_on.set()
    print("main")
    """,
        "main" if daemon else "main 16.0 32.0 32.0",
    )


def test_a_map_works_at_interpreter_exit() -> None:
    assert_prints(PREAMBLE + "\n    meet(4)\n    atexit.register(lambda: print(run([None] * 8)))\n", "32.0")


def test_a_first_map_works_at_interpreter_exit() -> None:
    assert_prints(PREAMBLE + "\n    atexit.register(lambda: print(run([None] * 8)))\n", "32.0")


def test_a_forked_child_maps_with_workers_of_its_own() -> None:
    assert_prints(
        PREAMBLE
        + """
    print(meet(8), flush=True)
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        ok = meet(8) == 32.0 and meet(3) == 12.0
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), meet(8))
    """,
        "32.0 0 32.0",
    )


def test_children_forked_while_maps_run_can_map() -> None:
    """Whatever lock is held at the fork by a thread that the child does not have.

    But for PyTorch's own: each operator takes one the first time it is called in a process, and each node of a backward
    another one, for which one child in some hundreds or thousands waits for ever, as one of plain PyTorch does.
    """
    assert_prints(
        PREAMBLE
        + """
    assert run([None] * 6) == meet(6) == 24.0
    stop = threading.Event()
    def keep_mapping():
        while not stop.is_set():
            run([None] * 6)
    threads = [threading.Thread(target=keep_mapping) for _ in range(3)]
    for thread in threads: thread.start()
    codes = []
    for _ in range(30):
        child = os.fork()
        if child == 0:
            signal.alarm(100)
            os._exit(0 if meet(6) == 24.0 else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads: thread.join()
    print([code for code in codes if code != 0] in ([], [-signal.SIGALRM]))
    """,
        "True",
    )


def test_a_child_forked_inside_a_call_can_map() -> None:
    assert_prints(
        PREAMBLE
        + """
    codes = []
    def fork():
        child = os.fork()
        if child == 0:
            signal.alarm(100)
            try:
                with torch.enable_grad():
                    ok = meet(4) == 16.0
            except BaseException:
                traceback.print_exc()
                os._exit(2)
            os._exit(0 if ok else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert meet(4) == 16.0
    run([fork, fork])
    run([None, fork], "backward")
    print(codes)
    """,
        "[0, 0, 0]",
    )


def test_a_data_loader_worker_maps() -> None:
    assert_prints(
        PREAMBLE
        + """
    class Maps(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return meet(4) + i
    meet(4)
    loader = torch.utils.data.DataLoader(Maps(), num_workers=2, multiprocessing_context="fork")
    print(sorted(item.item() for item in loader))
    """,
        "[16.0, 17.0, 18.0, 19.0]",
    )


def test_a_map_works_when_the_system_has_no_thread_to_give() -> None:
    """No stack of a petabyte can be had; the calling thread does all the work, and threads come back later."""
    assert_prints(
        PREAMBLE
        + """
    usual = threading.stack_size(1 << 50)
    print(run([None] * 8), run([None] * 8, "backward"))
    threading.stack_size(usual)
    print(meet(8))
    """,
        "32.0 32.0 32.0",
    )


@pytest.mark.stress
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ten_thousand_failing_maps_leave_no_thread_file_or_memory(where: str) -> None:
    assert_prints(
        PREAMBLE
        + f"""
    import gc, psutil
    me = psutil.Process()
    def fail():
        raise LookupError("x" * 1000)
    def fail_often(times):
        for _ in range(times):
            try:
                run([None, fail, None, fail], {where!r})
            except LookupError:
                pass
    def left():
        counts = threading.active_count(), me.num_threads(), me.num_fds(), sys.getallocatedblocks()
        return *counts, me.memory_info().rss
    gc.disable()
    fail_often(2000)
    before = left()
    fail_often(10_000)
    after = left()
    # one thread, file or object for each failure is 10,000 of them; a cycle takes 180 MB
    allowed = 20, 20, 20, 3000, 20_000_000
    print(*[a - b if a - b > most else "few" for a, b, most in zip(after, before, allowed)])
    """,
        "few few few few few",
    )


@pytest.mark.parametrize("does", ["torch.linalg.svd(matrix)", "threading.Event().wait(0.3)"])
def test_what_computes_or_waits_within_torch_at_exit_ends_first(does: str) -> None:
    """A thread that came back from torch into an interpreter that had ended was ended there, and aborted the process.

    In a Python of its own: warm processes have no such end.
    """
    program = f"""
        import threading, time, torch
        from moe_autograd import _threads

        class EndsLate:
            def __del__(self, sleep=time.sleep):  # when other threads are ended already
                sleep(1.0)

        class Computes(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            def backward(ctx, grad):
                begun.set()
                {does}
                return grad

        _threads.EXIT_GRACE_S = 60.0
        torch.set_num_threads(1)
        ends_late, begun, matrix = EndsLate(), threading.Event(), torch.randn(300, 300)
        y = Computes.apply(torch.ones(2, requires_grad=True)).sum()
        _threads.start_soon(y.backward)
        begun.wait()
        """
    assert run_ranks(program, num_ranks=1) == [""]
