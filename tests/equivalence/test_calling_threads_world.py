"""A worker sees what the calling thread sees: one case for each thing that PyTorch or Python keeps per thread.

Each case probes its entry inside every call, forward and backward, natively and through the map, with the entry
set around the forward, around the backward, and around both. What PyTorch does is what is expected, also where
it surprises (gradients are off inside `forward`; a backward sees the world of whoever calls `.backward()`).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_autograd import map_with_parallel_backward
from moe_autograd._ambient import Ambient
from tests.support.comparison import MapFunction, assert_same_program
from tests.support.functions_waiting import PATIENCE_S, Calls

NUM_CALLS = 4
Probe = Callable[[], Any]
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Probes(Function):
    """Doubles its input; reports what `probe` sees in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Probe, seen: list[Any]) -> Tensor:
        ctx.probe, ctx.seen = probe, seen
        seen.append(("forward", probe()))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(("backward", ctx.probe()))
        return grad * 2, None, None


@dataclass(frozen=True)
class Entry:
    """One thing kept per thread: how to set it, and how to see it."""

    name: str
    set: Callable[[], AbstractContextManager[Any]]
    probe: Probe

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def variable_set() -> Iterator[None]:
    token = variable.set("set")
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def switched(switch: Callable[[bool], Any]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextlib.contextmanager
def default_device_set() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype_set() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def autocast_facts() -> tuple[Any, ...]:
    # Constants without gradients: what is cast is not cached, so that each thread casts for itself.
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        product.dtype,
    )


ENTRIES = [
    Entry("enable_grad", torch.enable_grad, torch.is_grad_enabled),
    Entry("no_grad", torch.no_grad, torch.is_grad_enabled),
    Entry("inference_mode", torch.inference_mode, torch.is_inference_mode_enabled),
    Entry("autocast", lambda: torch.autocast("cpu"), autocast_facts),
    Entry("autocast dtype", lambda: torch.autocast("cpu", dtype=torch.float16), autocast_facts),
    Entry("autocast cache", lambda: torch.autocast("cpu", cache_enabled=False), autocast_facts),
    Entry("autocast off inside on", lambda: torch.autocast("cpu", enabled=False), autocast_facts),
    Entry("default device", default_device_set, lambda: str(torch.empty(1).device)),
    Entry("device context", lambda: torch.device("meta"), lambda: str(torch.empty(1).device)),
    Entry("default dtype", default_dtype_set, lambda: torch.empty(1).dtype),
    Entry("contextvars", variable_set, variable.get),
    Entry(
        "multithreading",
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    Entry(
        "view replay",
        lambda: torch.autograd._force_original_view_tracking(True),
        torch._C._is_view_replay_enabled,
    ),
    Entry(
        "saved-tensor hooks disabled",
        lambda: disable_saved_tensors_hooks("not here"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    Entry(
        "forward-mode gradients off",
        lambda: forward_ad._set_fwd_grad_enabled(False),
        torch._C._is_fwd_grad_enabled,
    ),
    Entry(
        "torch functions of subclasses off",
        torch._C.DisableTorchFunctionSubclass,
        torch._C._is_torch_function_enabled,
    ),
    Entry("torch functions off", torch._C.DisableTorchFunction, torch._C._is_torch_function_all_disabled),
    Entry(
        "flush denormal",
        lambda: switched(torch.set_flush_denormal),
        lambda: (torch.full((8,), 1e-310, dtype=torch.float64) / 2 == 0).all().item(),
    ),
    Entry(
        "deterministic algorithms",
        lambda: switched(torch.use_deterministic_algorithms),
        torch.are_deterministic_algorithms_enabled,
    ),
    Entry("anomaly mode", lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
]


def run_probes(apply: MapFunction, probe: Probe, around_forward: Any, around_backward: Any) -> Any:
    """Through the map, the calls meet before they probe, so that no two are run by the same thread."""
    if apply is map_with_parallel_backward:
        barrier, alone = threading.Barrier(NUM_CALLS), probe
        probe = lambda: (barrier.wait(PATIENCE_S), alone())[1]  # noqa: E731  # reads better than a def
    seen: list[list[Any]] = [[] for _ in range(NUM_CALLS)]
    inputs = [torch.ones(2, requires_grad=True) for _ in range(NUM_CALLS)]
    with around_forward():
        results = apply(Probes, *[(x, probe, seen[i]) for i, x in enumerate(inputs)])
    loss = torch.stack(results).sum() if results[0].requires_grad else None
    with around_backward():
        if loss is not None:
            loss.backward()
    return seen


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_worker_sees_what_the_caller_sees(entry: Entry, where: str) -> None:
    around = (
        entry.set if where != "backward" else nullcontext,
        entry.set if where != "forward" else nullcontext,
    )
    assert_same_program(lambda apply: run_probes(apply, entry.probe, *around))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_worlds_of_two_threads_mapping_at_once_do_not_mix(entry: Entry) -> None:
    if entry.name in ("default dtype", "deterministic algorithms", "anomaly mode"):
        pytest.skip("a setting of the whole process")
    native = [run_probes(natively, entry.probe, around, around) for around in (entry.set, nullcontext)]
    barrier = threading.Barrier(2 * NUM_CALLS)
    seen: dict[bool, Any] = {}

    def meet_and_probe() -> Any:
        barrier.wait(PATIENCE_S)
        return entry.probe()

    def work(is_set: bool) -> None:
        around = entry.set if is_set else nullcontext
        seen[is_set] = run_probes(map_with_parallel_backward, meet_and_probe, around, around)

    if not native[0][0][1:]:
        pytest.skip("no backward in this world: the two threads could not meet there")
    threads = [threading.Thread(target=work, args=(is_set,)) for is_set in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[True], seen[False]] == native


def natively(func: type[Function], *args_per_call: Any) -> Any:
    return tuple(func.apply(*args) for args in args_per_call)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_failure_leaves_workers_and_caller_in_their_own_worlds(entry: Entry) -> None:
    before = entry.probe()

    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError), entry.set():
        map_with_parallel_backward(Calls, *[(torch.ones(2), fail)] * NUM_CALLS)
    assert entry.probe() == before
    assert_same_program(lambda apply: run_probes(apply, entry.probe, nullcontext, nullcontext))


class Records(TorchFunctionMode):
    """Records each `torch.erfinv`, a function that nobody else calls."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.erfinv:
            self.log.append("erfinv")
        return func(*args, **(kwargs or {}))


class RecordsDispatch(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.erfinv.default:
            self.log.append("erfinv")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Records, RecordsDispatch])
@pytest.mark.parametrize("nested", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_modes_see_what_is_called_in_workers(mode: Any, nested: int, where: str) -> None:
    def program(apply: MapFunction) -> Any:
        log: list[str] = []

        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for _ in range(nested):
                    stack.enter_context(mode(log))
                yield

        around = (
            inside if where != "backward" else nullcontext,
            inside if where != "forward" else nullcontext,
        )
        run_probes(apply, lambda: torch.erfinv(torch.zeros(1)).item(), *around)
        return log

    said = assert_same_program(program)
    # `Tensor.backward` is itself a call the mode sees.
    assert said or (mode is Records and where == "backward")


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_saved_tensor_hooks_see_what_is_saved_inside_a_call(where: str) -> None:
    def program(apply: MapFunction) -> Any:
        log: list[str] = []

        def inside() -> Any:
            return saved_tensors_hooks(
                lambda x: (log.append("packed"), x)[1] if x.shape == (3,) else x,  # type: ignore[func-returns-value]
                lambda x: (log.append("unpacked"), x)[1] if x.shape == (3,) else x,  # type: ignore[func-returns-value]
            )

        def probe() -> list[float]:
            with torch.enable_grad():
                x = torch.ones(3, requires_grad=True)
                (x**3).sum().backward()
            assert x.grad is not None
            return x.grad.tolist()  # type: ignore[no-any-return]  # torch types it as Any

        around = (
            inside if where != "backward" else nullcontext,
            inside if where != "forward" else nullcontext,
        )
        return run_probes(apply, probe, *around), sorted(log)

    assert assert_same_program(program)[1]


def test_a_thread_that_is_in_inference_mode_gets_the_other_settings_as_well() -> None:
    """To leave inference mode sets backwards to several threads, and view replay off, whatever they were."""
    switches = torch.autograd.set_multithreading_enabled, torch.autograd._force_original_view_tracking
    with switches[0](False), switches[1](True):
        ambient = Ambient()
    with switches[0](False), switches[1](True), torch.inference_mode():
        before = torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled()
        seen = ambient.run(
            lambda: (torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled())
        )
        after = torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled()
    assert seen == (False, True)
    assert after == before


def test_the_intra_op_thread_count_is_left_alone_here_and_in_threads_made_later() -> None:
    counts: list[int] = []

    def note_count() -> None:
        counts.append(torch.get_num_threads())

    note_count()
    run_probes(
        map_with_parallel_backward,
        lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum(),
        *[nullcontext] * 2,
    )
    note_count()
    later = threading.Thread(target=note_count)
    later.start()
    later.join()
    assert counts == [counts[0]] * 3
