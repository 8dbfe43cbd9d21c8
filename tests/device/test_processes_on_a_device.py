"""Processes that map on a GPU: their ends, signals, forks, and the first use of the device. All of them run at once."""

from __future__ import annotations

import subprocess
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.devices import needs_gpu
from tests.support.subprocesses import run_python

pytestmark = pytest.mark.gpu

LIMIT_S = 150.0
BEGINNING = """
import os, signal, sys, threading, warnings
os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "2"  # s, for backwards that never end
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of a fork beside threads
import torch
from torch.autograd import Function
from moe_autograd import map_with_parallel_backward
from tests.support.devices import DEVICE, HAS_GPU, hold_up

class Does(Function):
    @staticmethod
    def forward(ctx, x, in_forward=None, in_backward=None):
        ctx.in_backward = in_backward
        ctx.save_for_backward(x * 1)
        return x * x if in_forward is None else in_forward(x * x)

    @staticmethod
    def backward(ctx, grad):
        found = 2 * ctx.saved_tensors[0] * grad
        return (found if ctx.in_backward is None else ctx.in_backward(found), None, None)

def inputs(device, count=4):
    return [torch.full((1000,), i + 1.0, device=device, requires_grad=True) for i in range(count)]

def held_up(y):
    for _ in range(20):
        hold_up()
    return y * 1

def on_device(y):
    moved = y.to(DEVICE)
    hold_up()
    with torch.enable_grad():
        leaf = moved.detach().requires_grad_()
        (leaf * 3).sum().backward()
    assert leaf.grad.tolist() == [3.0] * 1000
    return (moved + 1 - torch.ones(1000, device=DEVICE)).to(y.device)
"""
FIRST_USE = """
assert not torch.cuda.is_initialized()
xs = inputs("cpu")
args = [(x * 3, {forward}, {backward}) for i, x in enumerate(xs)]
results = map_with_parallel_backward(Does, *args)
for i, y in enumerate(results):
    assert y.tolist() == [9.0 * (i + 1) ** 2] * 1000, y
torch.stack(results).sum().backward()
for i, x in enumerate(xs):
    assert x.grad.tolist() == [18.0 * (i + 1)] * 1000, x.grad
assert torch.cuda.is_initialized() == HAS_GPU
ys = map_with_parallel_backward(Does, *[(x,) for x in inputs(DEVICE)])
print([y[0].item() for y in ys])
"""
END = """
inside = threading.Barrier(5)
def call(y):
    held_up(y)
    inside.wait()
    threading.Event().wait()
def run():
    results = map_with_parallel_backward(Does, *[(x, {places}) for x in inputs(DEVICE)])
    torch.stack(results).sum().backward()
threading.Thread(target=run, daemon=True).start()
inside.wait()
print("over")
"""
PROGRAMS = {
    "first_in_one_call": FIRST_USE.format(forward="on_device if i == 2 else None", backward="None"),
    "first_in_all_calls": FIRST_USE.format(forward="on_device", backward="on_device"),
    "first_in_a_backward": FIRST_USE.format(forward="None", backward="on_device if i == 2 else None"),
    "first_in_all_backwards": FIRST_USE.format(forward="None", backward="on_device"),
    "streams": """
        seen = [set(), set()]
        def note(place):
            def noted(y):
                seen[place].add(torch.cuda.current_stream().stream_id if HAS_GPU else len(seen[place]))
                return y
            return noted
        for count in (8, 8, 3):
            xs = inputs(DEVICE, count)
            args = [(x, note(0), note(1)) for x in xs]
            torch.stack(map_with_parallel_backward(Does, *args)).sum().backward()
        own = torch.cuda.current_stream().stream_id if HAS_GPU else -1
        print(len(seen[0]) if HAS_GPU else 8, seen[0] == seen[1], own in seen[0])
    """,
    "end_in_forward": END.format(places="call, None"),
    "end_in_backward": END.format(places="None, call"),
    "weights": """
        from torch import nn
        from moe_autograd import parallel_apply
        layers = [nn.Linear(8, 8).to(DEVICE) for _ in range(4)]
        calls = [lambda x, layer=layer: held_up(layer(x)) for layer in layers]
        for _ in range(2):
            ys = parallel_apply(calls, [(torch.ones(2, 8, device=DEVICE),)] * 4)
            torch.stack(ys).sum().backward()
        print(all(weight.grad.abs().sum() > 0 for layer in layers for weight in layer.parameters()))
    """,
    "exit": """
        results = map_with_parallel_backward(Does, *[(x, held_up, held_up) for x in inputs(DEVICE)])
        torch.stack(results).sum().backward()
        sys.exit(3)
    """,
    "exit_in_call": """
        def leave(y):
            held_up(y)
            sys.exit(4)
        map_with_parallel_backward(Does, *[(x, leave if i == 1 else held_up) for i, x in enumerate(inputs(DEVICE))])
    """,
    "assertion": """
        def breaks(y):
            picked = y[torch.full((1000,), 10**6, device=DEVICE)]
            torch.cuda.synchronize()
            return picked
        try:
            args = [(x, breaks if i == 1 else held_up) for i, x in enumerate(inputs(DEVICE))]
            map_with_parallel_backward(Does, *args)
        except RuntimeError as error:
            print("device-side assert" in str(error), flush=True)
        os._exit(0)  # torch aborts as it lets go of tensors then
    """,
    "fork": """
        def loop(func, *args_per_call):
            return tuple(func.apply(*args) for args in args_per_call)

        def child(apply, device, differentiates):
            signal.alarm(8)
            try:
                xs = inputs("cpu")
                seen = apply(Does, *[(x, (lambda y: y.to(device).cpu())) for x in xs])
                assert [y[0].item() for y in seen] == [1.0, 4.0, 9.0, 16.0]
                if differentiates:
                    torch.stack(seen).sum().backward()
                    assert [x.grad[0].item() for x in xs] == [2.0, 4.0, 6.0, 8.0]
            except RuntimeError as error:
                return 7 if "re-initialize" in str(error) else 8
            return 0

        def in_child(*args):
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                status = 9
                try:
                    status = child(*args)
                finally:
                    os._exit(status)
            return os.waitpid(pid, 0)[1]

        torch.stack(map_with_parallel_backward(Does, *[(x,) for x in inputs(DEVICE)])).sum().item()
        print(in_child(map_with_parallel_backward, "cpu", False) == 0)
        print(in_child(map_with_parallel_backward, DEVICE, False) == (7 << 8 if HAS_GPU else 0))
        for _ in range(2):  # before and after the engine has started its threads
            native = in_child(loop, "cpu", True)
            mapped = in_child(map_with_parallel_backward, "cpu", True)
            print(native == mapped or (native, mapped))
            torch.stack(map_with_parallel_backward(Does, *[(x,) for x in inputs(DEVICE)])).sum().backward()
    """,
}
Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ended() -> dict[str, Future[Ended]]:
    """How each program ends."""

    def run(program: str) -> Ended:
        return run_python(BEGINNING + textwrap.dedent(program), limit_s=LIMIT_S)

    with ThreadPoolExecutor(len(PROGRAMS)) as pool:
        return {name: pool.submit(run, program) for name, program in PROGRAMS.items()}


@pytest.mark.parametrize(
    ("name", "status", "printed"),
    [
        ("first_in_one_call", 0, "[1.0, 4.0, 9.0, 16.0]"),
        ("first_in_all_calls", 0, "[1.0, 4.0, 9.0, 16.0]"),
        ("first_in_a_backward", 0, "[1.0, 4.0, 9.0, 16.0]"),
        ("first_in_all_backwards", 0, "[1.0, 4.0, 9.0, 16.0]"),
        ("streams", 0, "8 True False"),
        ("end_in_forward", 0, "over"),
        ("end_in_backward", 0, "over"),
        ("weights", 0, "True"),
        ("exit", 3, ""),
        ("exit_in_call", 4, ""),
        ("fork", 0, "True True True True"),
        pytest.param("assertion", 0, "True", marks=needs_gpu),
    ],
)
def test_a_process_ends_as_it_should_and_says_what_it_should(
    ended: dict[str, Future[Ended]], name: str, status: int, printed: str
) -> None:
    """Warnings are errors there: of weights whose gradients come from another stream PyTorch warns once a process."""
    one = ended[name].result()
    told = f"exit {one.returncode}\n{one.stdout}\n{one.stderr}"
    assert one.returncode == status, told
    assert " ".join(one.stdout.split()) == printed, told
