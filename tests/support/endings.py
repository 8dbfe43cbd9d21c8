"""What programs that end in the midst of maps begin with."""

from __future__ import annotations

PREAMBLE = """
    import atexit, os, signal, sys, threading, traceback
    import torch
    from moe_autograd import map_with_parallel_backward
    from tests.support.functions_waiting import Calls, Meets

    def run(actions, where="forward"):
        inputs = [torch.ones(2, requires_grad=True) for _ in actions]
        calls = [(x, a, None) if where == "forward" else (x, None, a) for x, a in zip(inputs, actions)]
        torch.stack(map_with_parallel_backward(Calls, *calls)).sum().backward()
        return sum(x.grad.sum().item() for x in inputs)

    def meet(parties):
        barrier = threading.Barrier(parties)
        inputs = [torch.ones(2, requires_grad=True) for _ in range(parties)]
        torch.stack(map_with_parallel_backward(Meets, *[(x, barrier) for x in inputs])).sum().backward()
        return sum(x.grad.sum().item() for x in inputs)

    def interrupt_main_thread():
        # Python misses a signal that comes when its main thread is just about to wait; so only once it sleeps.
        stat, num_seen_asleep = f"/proc/self/task/{os.getpid()}/stat", 0
        while threading.current_thread() is not threading.main_thread() and num_seen_asleep < 10:
            with open(stat) as file:
                state = file.read().rpartition(")")[2].split()[0]
            num_seen_asleep = num_seen_asleep + 1 if state == "S" else 0
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
"""
