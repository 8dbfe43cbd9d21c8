"""On an accelerator the kernels of calls come after their caller's earlier ones and before its later ones.

The device is one that only remembers (`tests.support.streams`); maps, threads and the engine are real. What a GPU
makes of it is in `tests/device`.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_autograd import _streams, map_with_parallel_backward, parallel_apply
from moe_autograd.autograd import accumulating
from moe_autograd.errors import UnsupportedTransformError
from tests.support.functions_waiting import PATIENCE_S, Calls
from tests.support.streams import Kernel, RecordingAccelerator, Stream

NUM_CALLS = 4


@pytest.fixture(params=[1, 2])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RecordingAccelerator:
    accelerator = RecordingAccelerator(request.param)
    monkeypatch.setattr(_streams, "_built_for", accelerator)
    return accelerator


def launch_everywhere(accelerator: RecordingAccelerator) -> list[Kernel]:
    return [accelerator.launch(device) for device in accelerator.devices()]


class Launches(Function):
    """Queues a kernel on each device, in forward and in backward, once all calls have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[str], None]) -> Tensor:
        ctx.launch = launch
        launch("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.launch("backward")
        return grad * 2, None


class Log:
    """The kernels of all calls, by pass."""

    def __init__(self, accelerator: RecordingAccelerator, num_calls: int = NUM_CALLS) -> None:
        self.kernels: dict[str, list[Kernel]] = {"forward": [], "backward": []}
        self._accelerator = accelerator
        self._barrier = threading.Barrier(num_calls)

    def launch(self, where: str) -> None:
        self._barrier.wait(PATIENCE_S)
        self.kernels[where] += launch_everywhere(self._accelerator)


def leaves() -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(NUM_CALLS)]


def assert_between(earlier: list[Kernel], kernels: list[Kernel], later: list[Kernel]) -> None:
    assert all(kernel.comes_after(other) for kernel in kernels for other in earlier)
    assert all(other.comes_after(kernel) for kernel in kernels for other in later)


@pytest.mark.parametrize("is_module", [False, True])
def test_both_passes_come_after_what_was_queued_before_and_before_what_is_queued_after(
    accelerator: RecordingAccelerator, is_module: bool
) -> None:
    log, xs = Log(accelerator), leaves()
    before = launch_everywhere(accelerator)
    if is_module:
        outputs = parallel_apply([lambda x: Launches.apply(x, log.launch)] * NUM_CALLS, [(x,) for x in xs])
    else:
        outputs = map_with_parallel_backward(Launches, *[(x, log.launch) for x in xs])
    between = launch_everywhere(accelerator)
    torch.stack(list(outputs)).sum().backward()
    after = launch_everywhere(accelerator)
    assert len(log.kernels["forward"]) == len(log.kernels["backward"]) == NUM_CALLS * accelerator.num_devices
    assert_between(before, log.kernels["forward"], between)
    assert_between(between, log.kernels["backward"], after)


def test_each_call_has_streams_of_its_own_the_same_in_both_passes(accelerator: RecordingAccelerator) -> None:
    log = Log(accelerator)
    torch.stack(map_with_parallel_backward(Launches, *[(x, log.launch) for x in leaves()])).sum().backward()
    forward, backward = ({kernel.stream for kernel in kernels} for kernels in log.kernels.values())
    assert forward == backward == set(accelerator.lanes.values())
    assert len(forward) == NUM_CALLS * accelerator.num_devices
    for kernel in log.kernels["forward"]:
        for other in log.kernels["forward"]:
            assert not kernel.comes_after(other), "calls do not wait for each other"


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_backward_of_some_calls_has_the_streams_of_their_forwards(
    accelerator: RecordingAccelerator, is_module: bool, again: bool
) -> None:
    """What a call keeps beside its saved tensors is memory of its stream, and nobody records it elsewhere."""
    streams: dict[str, list[tuple[Stream, ...]]] = {"forward": [], "backward": []}

    def launch(where: str) -> None:
        streams[where].append(tuple(kernel.stream for kernel in launch_everywhere(accelerator)))

    xs = leaves()
    if is_module:
        outputs = parallel_apply(
            [lambda x: Launches.apply(x, launch)] * NUM_CALLS, [(x,) for x in xs], max_concurrency=2
        )
    else:
        outputs = list(map_with_parallel_backward(Launches, *[(x, launch) for x in xs], max_concurrency=2))
    taken = [(device, number) for number in (1, 3) for device in accelerator.devices()]
    own = {accelerator.lanes[place] for place in taken}
    torch.autograd.grad(outputs[1].sum() + outputs[3].sum(), xs, allow_unused=True, create_graph=again)
    assert {stream for found in streams["backward"] for stream in found} == own


@pytest.mark.parametrize("which", [0, -1])
def test_a_callers_own_stream_and_device_are_those_of_the_map(
    accelerator: RecordingAccelerator, which: int
) -> None:
    """Calls are ordered with the stream that is current when a pass begins, whatever is on the default ones."""
    own = Stream(accelerator.devices()[which], "the caller's own")
    accelerator.set_stream(own)
    log, devices = Log(accelerator), []

    def launch(where: str) -> None:
        devices.append(accelerator.current_device())
        log.launch(where)

    before = launch_everywhere(accelerator)
    map_with_parallel_backward(Launches, *[(x, launch) for x in leaves()])
    after = launch_everywhere(accelerator)
    assert before[which].stream is after[which].stream is own
    assert_between(before, log.kernels["forward"], after)
    assert devices == [own.device] * NUM_CALLS
    assert accelerator.current_stream(own.device) is own
    assert accelerator.current_device() == own.device


def test_workers_get_their_own_streams_back(
    accelerator: RecordingAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, streams = threading.Barrier(NUM_CALLS), []

    def note() -> None:
        barrier.wait(PATIENCE_S)
        streams.append(accelerator.current_stream(0))

    calls = [(torch.ones(2), note)] * NUM_CALLS
    map_with_parallel_backward(Calls, *calls)
    assert set(streams) == {lane for (device, _), lane in accelerator.lanes.items() if device == 0}
    streams.clear()
    monkeypatch.setattr(_streams, "_built_for", None)  # the threads are still there, now without lanes
    map_with_parallel_backward(Calls, *calls)
    assert streams == [accelerator.defaults[0]] * NUM_CALLS


def test_a_failing_call_is_waited_for_as_well(accelerator: RecordingAccelerator) -> None:
    log = Log(accelerator)

    def fail(where: str) -> None:
        log.launch(where)
        raise LookupError

    with pytest.raises(LookupError):
        map_with_parallel_backward(Launches, *[(x, fail) for x in leaves()])
    assert_between([], log.kernels["forward"], launch_everywhere(accelerator))


def test_nested_maps_are_ordered_with_the_call_that_they_are_in(accelerator: RecordingAccelerator) -> None:
    inner = [Log(accelerator) for _ in range(2)]
    around: list[tuple[list[Kernel], list[Kernel]]] = [([], []), ([], [])]

    def run(index: int) -> None:
        before = launch_everywhere(accelerator)
        map_with_parallel_backward(Launches, *[(x, inner[index].launch) for x in leaves()])
        around[index] = before, launch_everywhere(accelerator)

    map_with_parallel_backward(
        Calls, *[(torch.ones(2), lambda index=index: run(index)) for index in range(2)]
    )
    for log, (before, after) in zip(inner, around, strict=True):
        assert_between(before, log.kernels["forward"], after)


@pytest.mark.parametrize("alone", ["one call", "one at a time"])
def test_calls_that_run_on_the_callers_thread_stay_on_its_stream(
    accelerator: RecordingAccelerator, alone: str
) -> None:
    log = Log(accelerator, 1)
    xs = leaves()[: 1 if alone == "one call" else None]
    map_with_parallel_backward(Launches, *[(x, log.launch) for x in xs], max_concurrency=1)
    assert {kernel.stream for kernel in log.kernels["forward"]} == set(accelerator.defaults)
    assert accelerator.lanes == {}


def test_tensors_are_recorded_where_they_are_used(accelerator: RecordingAccelerator) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    def uses() -> dict[bool, int]:
        used = dict.fromkeys((False, True), 0)
        for _, stream in accelerator.recorded:
            used[stream.name.startswith("lane")] += 1
        accelerator.recorded.clear()
        return used

    results = map_with_parallel_backward(Saves, *[(x,) for x in leaves()])
    assert uses() == {True: NUM_CALLS, False: 2 * NUM_CALLS}, (
        "arguments there; results and what is saved here"
    )
    torch.stack(results).sum().backward()
    assert uses() == {True: 2 * NUM_CALLS, False: NUM_CALLS}, (
        "saved tensors and gradients there; gradients here"
    )


def test_modules_arguments_and_returned_tensors_are_recorded(accelerator: RecordingAccelerator) -> None:
    xs = leaves()
    with torch.no_grad():
        outputs = parallel_apply([lambda x: x.tanh()] * NUM_CALLS, [(x,) for x in xs])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    assert {(id(x), True) for x in xs} | {(id(y), False) for y in outputs} <= recorded


def test_tensors_in_objects_that_modules_take_and_return_are_recorded(
    accelerator: RecordingAccelerator,
) -> None:
    boxes = [types.SimpleNamespace(x=x) for x in leaves()]
    calls = [lambda box: types.SimpleNamespace(y=box.x.tanh(), rest=[box.x.detach() * 2])] * NUM_CALLS
    outputs = parallel_apply(calls, [(box,) for box in boxes])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    returned = {(id(y), False) for output in outputs for y in (output.y, *output.rest)}
    assert {(id(box.x), True) for box in boxes} | returned <= recorded


def test_tensors_in_lists_that_functions_return_are_recorded(accelerator: RecordingAccelerator) -> None:
    class ReturnsAList(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 2, [x * 3]

    outputs = map_with_parallel_backward(ReturnsAList, *[(x,) for x in leaves()])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    assert {(id(listed), False) for _, (listed,) in outputs} <= recorded


def test_the_caller_waits_for_the_stream_that_a_call_has_left_current(
    accelerator: RecordingAccelerator,
) -> None:
    others = [Stream(device, f"a stream of the call's, on {device}") for device in accelerator.devices()]
    kernels: list[Kernel] = []

    def leave_current() -> None:
        for other in others:
            accelerator.set_stream(other)
        kernels.extend(launch_everywhere(accelerator))

    notes = [leave_current, *[lambda: None] * (NUM_CALLS - 1)]
    map_with_parallel_backward(Calls, *[(torch.ones(2), note) for note in notes])
    after = launch_everywhere(accelerator)
    assert {kernel.stream for kernel in kernels} == set(others)
    assert {kernel.stream for kernel in after} == set(accelerator.defaults)
    assert all(later.comes_after(kernel) for later in after for kernel in kernels)


@pytest.mark.parametrize("numel", [2, accumulating.LEAST_ADDED])
def test_a_sum_of_gradients_comes_after_what_each_call_has_queued_for_its_own(
    accelerator: RecordingAccelerator, numel: int
) -> None:
    """They are added on the stream of whoever adds; small ones by the engine, after all calls."""
    log, shared = Log(accelerator), torch.ones(numel, requires_grad=True)
    outputs = map_with_parallel_backward(Launches, *[(shared, log.launch)] * NUM_CALLS)
    accelerator.recorded.clear()
    torch.stack(outputs).sum().backward()
    of_device = [kernel for kernel in log.kernels["backward"] if kernel.stream.device == 0]
    waited = [
        all(
            kernel.stream is own.stream or own.stream.known.get(kernel.stream, 0) >= kernel.number
            for kernel in of_device
        )
        for own in of_device
    ]
    assert any(waited) == (numel > 2)
    assert shared.grad is not None
    assert torch.equal(shared.grad, torch.full((numel,), 2.0 * NUM_CALLS))


def test_a_backward_of_one_call_of_several_has_its_streams(accelerator: RecordingAccelerator) -> None:
    log, xs = Log(accelerator, 1), leaves()
    outputs = map_with_parallel_backward(Launches, *[(x, log.launch) for x in xs])
    outputs[2].sum().backward()
    of_one = {accelerator.lane(device, 2) for device in accelerator.devices()}
    assert {kernel.stream for kernel in log.kernels["backward"]} == of_one


def test_a_capture_is_refused_before_a_call_runs(accelerator: RecordingAccelerator) -> None:
    accelerator.defaults[0].is_in_capture = True
    log = Log(accelerator)
    with pytest.raises(UnsupportedTransformError, match="expected no graph capture around it"):
        map_with_parallel_backward(Launches, *[(x, log.launch) for x in leaves()])
    assert log.kernels["forward"] == []


def test_a_backward_within_a_call_stays_on_its_thread(accelerator: RecordingAccelerator) -> None:
    """The engine would hand it to the device's thread, which waits for the calls."""
    seen: list[bool] = []

    def note() -> None:
        seen.append(torch.autograd.is_multithreading_enabled())

    outputs = map_with_parallel_backward(Calls, *[(x, note, note) for x in leaves()])
    torch.stack(outputs).sum().backward()
    assert seen == [False] * 2 * NUM_CALLS
    assert torch.autograd.is_multithreading_enabled()


class Notes(nn.Module):
    """Notes the kernels that it queues, one on each device; it keeps statistics if it is told to."""

    def __init__(self, accelerator: RecordingAccelerator, *, keeps_statistics: bool) -> None:
        super().__init__()
        self.keeps_statistics = keeps_statistics
        self.accelerator, self.kernels, self.caches_casts = accelerator, list[list[Kernel]](), set[bool]()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.kernels.append(launch_everywhere(self.accelerator))
        self.caches_casts.add(torch.is_autocast_cache_enabled())
        return x * self.weight


@pytest.mark.parametrize("recompute", [False, True])
def test_calls_that_take_turns_do_so_on_the_devices_as_well(
    accelerator: RecordingAccelerator, recompute: bool
) -> None:
    """Statistics that a call adds to are those that the call before has queued a kernel for."""
    shared = Notes(accelerator, keeps_statistics=True)
    outputs = parallel_apply([shared] * NUM_CALLS, [(x,) for x in leaves()], recompute=recompute)
    forward, shared.kernels = shared.kernels, []
    torch.stack(outputs).sum().backward()
    assert len(shared.kernels) == (NUM_CALLS if recompute else 0)
    for kernels in (forward, shared.kernels):
        for earlier, later in itertools.pairwise(kernels):
            assert all(kernel.comes_after(other) for kernel in later for other in earlier)


@pytest.mark.parametrize("is_shared", [False, True])
def test_calls_that_share_a_weight_cast_it_each_for_itself(
    accelerator: RecordingAccelerator, is_shared: bool
) -> None:
    """A cast that another call has put into autocast's cache is on another stream."""
    made = [Notes(accelerator, keeps_statistics=False) for _ in range(NUM_CALLS)]
    parallel_apply([made[0]] * NUM_CALLS if is_shared else made, [(x,) for x in leaves()])
    assert made[0].caches_casts == {not is_shared}
    assert torch.is_autocast_cache_enabled()

    class Casts(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            made[0].caches_casts.add(torch.is_autocast_cache_enabled())
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad

    made[0].caches_casts.clear()
    weights = [made[0].weight] * NUM_CALLS if is_shared else leaves()
    map_with_parallel_backward(Casts, *zip(leaves(), weights, strict=True))
    assert made[0].caches_casts == {not is_shared}


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: (x + 1j).conj(),
        lambda x: (x + 1j).conj().imag,
    ],
    ids=["strided", "coo", "csr", "csc", "jagged", "nested", "conjugate", "negative"],
)
def test_a_tensors_memory_is_found_in_every_layout(make: Callable[[Tensor], Tensor]) -> None:
    made = make(torch.eye(3))
    parts = _streams._strided_parts(made)
    assert parts
    for part in parts:
        assert part.layout is torch.strided
        records_otherwise = part.is_nested, part.is_conj(), part.is_neg()
        assert not any(records_otherwise)
        assert part.untyped_storage().nbytes() > 0
    if made.layout is torch.strided and not made.is_nested:
        assert parts[0].untyped_storage().data_ptr() == made.untyped_storage().data_ptr()


def test_lengths_and_offsets_of_jagged_tensors_are_memory_as_well() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    recorded = {part.data_ptr() for part in _streams._strided_parts(jagged)}
    assert {jagged.values().data_ptr(), jagged.offsets().data_ptr()} <= recorded


def test_zeros_that_keep_no_memory_are_not_recorded() -> None:
    assert _streams._strided_parts(torch._efficientzerotensor(3)) == ()


def test_without_an_accelerator_there_are_no_lanes() -> None:
    if torch.accelerator.current_accelerator() is None:
        assert _streams.lanes_from_here(shares_weights=False) is None
        _streams.use_here([torch.ones(2)])


@pytest.mark.parametrize("by_name", [False, True])
def test_calls_of_jagged_tensors_stay_on_the_callers_streams(
    accelerator: RecordingAccelerator, by_name: bool
) -> None:
    """The engine cannot hand their gradients from one stream to another."""
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    kernels: list[Kernel] = []

    def call(x: Tensor) -> Tensor:
        kernels.extend(launch_everywhere(accelerator))
        return x * 2

    given: list[Any] = [{"x": jagged}] * NUM_CALLS
    if by_name:
        parallel_apply([call] * NUM_CALLS, [()] * NUM_CALLS, given)
    else:
        parallel_apply([call] * NUM_CALLS, [(jagged,)] * NUM_CALLS)
    assert {kernel.stream for kernel in kernels} == set(accelerator.defaults)


def test_gradients_of_a_batch_are_recorded_as_the_memory_that_they_are() -> None:
    found: list[Tensor] = []

    class Looks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.extend(_streams._strided_parts(grad))
            return grad

    x, grads = torch.ones(3, requires_grad=True), torch.eye(3)
    torch.autograd.grad(Looks.apply(x), x, grads, is_grads_batched=True)  # type: ignore[no-untyped-call]
    assert [one.untyped_storage().data_ptr() for one in found] == [grads.untyped_storage().data_ptr()]


def test_modes_see_nothing_of_it() -> None:
    seen: list[Any] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class SeesFunctions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class OnNothing(_streams.Accelerator):
        def __init__(self) -> None:
            self.kind = "meta"

        def current_stream(self, device: int) -> Any:
            return torch.Stream("cpu")

    x, refused = torch.ones(2, device="meta"), pytest.raises(NotImplementedError, match="record_stream")
    with Sees(), SeesFunctions(), refused:  # by torch itself
        OnNothing().record(x)
    assert [func for func in seen if "record_stream" in str(func)] == []
