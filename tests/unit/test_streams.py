"""On an accelerator the kernels of calls come after their caller's earlier ones and before its later ones.

The device is one that only remembers (`tests.support.streams`); maps, threads and the engine are real. What a GPU
makes of it is in `tests/device`.
"""

from __future__ import annotations

import threading

import pytest
import torch

from moe_autograd import _streams, map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.joining import accumulating
from moe_autograd.errors import UnsupportedTransformError
from tests.support.functions_waiting import PATIENCE_S, Calls
from tests.support.launches import NUM_CALLS, Launches, Log, assert_between, launch_everywhere, leaves
from tests.support.streams import Kernel, RecordingAccelerator, Stream


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
