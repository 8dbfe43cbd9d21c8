"""How maps on a GPU end: calls that fail, wait for each other or are interrupted while kernels run; and processes.

What ends a process, or needs one that has not used the device yet, runs in a process of its own; all of these at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from tests.support.comparison import natively
from tests.support.devices import DEVICE, HAS_GPU, hold_up, needs_gpu

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
NUM_CALLS, SIZE = 6, 1 << 12
PATIENCE_S = 60.0
LIMIT_S = 150.0  # of a process, which imports torch first


class Does(Function):
    """Squares its input, held up, and calls on the way what it is given for the forward and for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: Any = None, in_backward: Any = None) -> Tensor:
        hold_up()
        ctx.save_for_backward(x * 1)
        if in_forward is not None:
            in_forward()
        ctx.in_backward = in_backward
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hold_up()
        grad = 2 * ctx.saved_tensors[0] * grads[0]
        if ctx.in_backward is not None:
            ctx.in_backward()
        return (grad, None, None)[: len(ctx.needs_input_grad)]


def nothing() -> None:
    return None


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def inputs(num_calls: int) -> list[Tensor]:
    return [torch.full((SIZE,), i + 1.0, device=DEVICE, requires_grad=True) for i in range(num_calls)]


def step(apply: Any, in_forward: list[Any], in_backward: list[Any]) -> list[Tensor]:
    xs = inputs(len(in_forward))
    hold_up()
    results = apply(
        Does, *[(x * 3, *own) for x, own in zip(xs, zip(in_forward, in_backward, strict=True), strict=True)]
    )
    torch.stack([y * 2 for y in results]).sum().backward()
    return [*[y.detach() for y in results], *[x.grad * 1 for x in xs if x.grad is not None]]


def quiet(num_calls: int = NUM_CALLS) -> list[Any]:
    return [None] * num_calls


def assert_maps_work() -> None:
    got = step(map_with_parallel_backward, quiet(), quiet())
    torch.testing.assert_close(got, step(natively, quiet(), quiet()), rtol=0, atol=0)


# ---- errors


@pytest.mark.parametrize("failing", [[0], [5], [1, 2, 4]], ids=str)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, BaseException])
def test_the_lowest_failing_call_raises_its_own_error_while_others_are_held_up(
    kind: type[BaseException], phase: str, failing: list[int]
) -> None:
    errors = [raising(kind(i)) if i in failing else nothing for i in range(NUM_CALLS)]
    passes = (errors, quiet()) if phase == "forward" else (quiet(), errors)
    with pytest.raises(kind) as caught:
        step(map_with_parallel_backward, *passes)
    assert type(caught.value) is kind
    assert caught.value.args == (failing[0],)
    notes = "\n".join(caught.value.__notes__)
    assert f"{phase}: raised by call {failing[0]} (Does) of {NUM_CALLS}" in notes
    assert (f"{len(failing) - 1} other call" in notes) == (len(failing) > 1)
    assert_maps_work()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ctrl_c_from_within_a_call_interrupts_and_the_next_map_is_right(phase: str) -> None:
    """The engine runs a backward of a device on a thread of its own: there Ctrl-C may come once that is over."""
    has_come = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        has_come.set()

    def wait() -> None:
        assert has_come.wait(PATIENCE_S)

    calls = [interrupt if i == 2 else wait for i in range(NUM_CALLS)]

    def run() -> None:
        step(map_with_parallel_backward, *((calls, quiet()) if phase == "forward" else (quiet(), calls)))
        threading.Event().wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert_maps_work()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_hundreds_of_failing_maps_leave_neither_memory_nor_threads(phase: str, no_gc: None) -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
            ctx.save_for_backward(x * 1)
            if fails and phase == "forward":
                raise ValueError("on purpose")
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grads[0] * ctx.saved_tensors[0]
            raise ValueError("on purpose")

    xs = inputs(NUM_CALLS)

    def fail() -> None:
        results = map_with_parallel_backward(Fails, *[(x, i == 3) for i, x in enumerate(xs)])
        torch.stack(results).sum().backward()

    def memory_after(count: int) -> int:
        for _ in range(count):
            with pytest.raises(ValueError, match="on purpose"):
                fail()
        torch.ones((), device=DEVICE, requires_grad=True).backward()  # the engine lets go of the last one
        if not HAS_GPU:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before, num_threads = memory_after(20), threading.active_count()
    assert memory_after(250) == before
    assert threading.active_count() <= num_threads + NUM_CALLS


@needs_gpu
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_that_finds_no_memory_says_so_and_the_next_map_is_right(phase: str) -> None:
    def demand() -> None:
        torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)

    calls = [demand if i == 3 else None for i in range(NUM_CALLS)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(map_with_parallel_backward, *((calls, quiet()) if phase == "forward" else (quiet(), calls)))
    assert f"{phase}: raised by call 3" in "\n".join(caught.value.__notes__)
    assert_maps_work()


# ---- waiting


def test_calls_that_meet_between_their_kernels_all_come_in_both_passes() -> None:
    def meeting() -> list[Any]:
        return [threading.Barrier(8).wait] * 8

    def patiently(waits: list[Any]) -> list[Any]:
        return [lambda wait=wait: wait(PATIENCE_S) for wait in waits]

    got = step(map_with_parallel_backward, patiently(meeting()), patiently(meeting()))
    torch.testing.assert_close(got, step(natively, quiet(8), quiet(8)), rtol=0, atol=0)


@pytest.mark.parametrize("waits_for", [1, -1])
def test_sixty_four_calls_that_each_wait_for_the_next_all_end(waits_for: int) -> None:
    def chain() -> list[Callable[[], None]]:
        events = [threading.Event() for _ in range(64)]

        def call(i: int) -> None:
            if 0 <= i + waits_for < 64:
                assert events[i + waits_for].wait(PATIENCE_S)
            events[i].set()

        return [lambda i=i: call(i) for i in range(64)]  # type: ignore[misc]

    got = step(map_with_parallel_backward, chain(), chain())
    torch.testing.assert_close(got, step(natively, quiet(64), quiet(64)), rtol=0, atol=0)


# ---- processes

BEGINNING = """
import os, signal, sys, threading
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
        command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c"]
        whole = BEGINNING + textwrap.dedent(program)
        return subprocess.run(
            [*command, whole],
            cwd=ROOT,
            env={**os.environ, "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "2"},  # s, for backwards that never end
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

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
