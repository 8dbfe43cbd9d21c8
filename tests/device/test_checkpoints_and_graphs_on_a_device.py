"""Checkpoints, pinned memory, anomaly mode, profilers, compiled models and captured graphs around maps on a device.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import natively, one_after_another
from tests.support.devices import HAS_GPU, needs_gpu
from tests.support.modules_held_up import (
    NUM_CALLS,
    WIDTH,
    Apply,
    Delay,
    Late,
    assert_same_of_modules,
    delayed,
    experts,
    gradients_of,
    grads_of,
    inputs,
    layer,
    loss_of,
    parameters,
    values_of,
)
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_map_gives_the_same_gradients(use_reentrant: bool) -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, (x, *_) = experts(), inputs()
        layer = lambda x: torch.cat(apply(modules, [(x * i,) for i in range(NUM_CALLS)]))  # noqa: E731
        loss_of([checkpoint(layer, delayed(x), use_reentrant=use_reentrant)]).backward()
        return grads_of([x, *parameters(modules)])

    assert_same_of_modules(program)


def test_checkpoints_within_the_calls_give_the_same_gradients() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, xs = experts(lambda: nn.Sequential(Late(), nn.Dropout(0.0))), inputs()
        calls = [lambda x, m=m: checkpoint(m, x, use_reentrant=False) for m in modules]
        loss_of(apply(calls, [(delayed(x),) for x in xs])).backward()
        return grads_of([*xs, *parameters(modules)])

    assert_same_of_modules(program)


@pytest.mark.parametrize("where", ["forward", "both passes"])
def test_what_is_saved_on_the_cpu_in_pinned_memory_comes_back_whole(where: str) -> None:
    def program(apply: Apply, of_function: Apply) -> list[Tensor]:
        modules, xs = experts(), inputs()
        with contextlib.ExitStack() as stack:
            stack.enter_context(save_on_cpu(pin_memory=True))
            outputs = apply(modules, [(delayed(x),) for x in xs])
            outputs = of_function(Delay, *[(y * 2,) for y in outputs])
            loss = loss_of(outputs)
            if where == "forward":
                stack.close()
            # It lies where the allocator had put what was saved.
            noise = [torch.full_like(y, torch.nan) for y in outputs]
            loss.backward()
        del noise
        return grads_of([*xs, *parameters(modules)])

    for _ in range(3):
        ours = program(parallel_apply, map_with_parallel_backward)
        torch.testing.assert_close(ours, program(one_after_another, natively))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_detection_finds_a_nan_within_a_call() -> None:
    def make_nan(x: Tensor) -> Tensor:
        return delayed(torch.sqrt(x * 0))  # loss_of's gradient is 0 there, and that of the root infinite

    for apply in (one_after_another, parallel_apply):
        with (
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"),
            torch.autograd.detect_anomaly(check_nan=True),
        ):
            loss_of(apply([delayed, make_nan], [(x,) for x in inputs()[:2]])).backward()


def test_a_profiler_shows_a_range_for_each_call_and_kernels_of_many_streams() -> None:
    modules, xs = experts(), inputs()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * HAS_GPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        loss_of(parallel_apply(modules, [(x,) for x in xs])).backward()
        if HAS_GPU:
            torch.cuda.synchronize()
    events = profile.events()
    assert events is not None
    on_cpu = torch.autograd.DeviceType.CPU
    names = [event.name for event in events if event.device_type == on_cpu]
    for phase in ("forward", "backward"):
        ranges = [name for name in names if f"parallel_apply, {phase}: call" in name]
        assert len(ranges) == len(set(ranges)) == NUM_CALLS
    on_device = [event for event in events if event.device_type != on_cpu and not event.is_user_annotation]
    assert not HAS_GPU or len({event.device_resource_id for event in on_device}) > NUM_CALLS


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_model_around_a_layer_gives_the_same_gradients() -> None:
    torch._dynamo.reset()
    ours, theirs = layer(), layer()
    compiled = torch.compile(lambda x: ours(x.sin()).cos(), backend="aot_eager")
    torch.testing.assert_close(
        gradients_of(ours, compiled), gradients_of(theirs, lambda x: plain_loop(theirs, x.sin()).cos())
    )


@needs_gpu
def test_experts_that_are_cuda_graphs_are_called_side_by_side() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, xs = experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), inputs()
        graphed: list[Any] = [
            torch.cuda.make_graphed_callables(m, (torch.zeros_like(x).requires_grad_(),))
            for m, x in zip(modules, xs, strict=True)
        ]
        said = []
        for factor in (1, 2):
            for tensor in (*xs, *parameters(modules)):
                tensor.grad = None
            outputs = apply(graphed, [(delayed(x) * factor,) for x in xs])
            loss_of(outputs).backward()
            said += [*values_of(outputs), *grads_of([*xs, *parameters(modules)])]
        return said

    assert_same_of_modules(program)


@needs_gpu
def test_a_plain_loop_can_be_captured_after_maps_have_run() -> None:
    modules, xs = experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), inputs()

    def step(apply: Apply) -> None:
        for tensor in (*xs, *parameters(modules)):
            tensor.grad = None
        torch.cat(apply(modules, [(x * 2,) for x in xs])).square().sum().backward()

    for _ in range(3):
        step(parallel_apply)
    expected = grads_of([*xs, *parameters(modules)])
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step(one_after_another)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    for tensor in (*xs, *parameters(modules)):
        tensor.grad = None
    with torch.cuda.graph(graph):
        step(one_after_another)
    graph.replay()
    torch.testing.assert_close(grads_of([*xs, *parameters(modules)]), expected)
    step(parallel_apply)
    torch.testing.assert_close(grads_of([*xs, *parameters(modules)]), expected)
