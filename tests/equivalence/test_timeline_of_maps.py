"""Maps put each call on a timeline, forwards and backwards, by the name of its expert; the numbers stay the same."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from moe_autograd import MixtureOfExperts, TopKRouter, map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.timeline import Timeline, record_timeline
from tests.support.comparison import MapFunction, assert_same, loss_of, one_after_another
from tests.support.functions_waiting import PATIENCE_S, Calls, Meets
from tests.support.module_programs import NUM_CALLS, parameters, seeded

NAMES = [f"ffn.{index}" for index in range(NUM_CALLS)]


def counted(timeline: Timeline) -> Counter[tuple[str, str]]:
    return Counter((span.name, span.phase) for span in timeline.spans)


def once_each(names: list[str], *phases: str) -> Counter[tuple[str, str]]:
    return Counter((name, phase) for name in names for phase in phases)


def experts() -> list[nn.Module]:
    made = seeded(lambda: nn.Linear(4, 4))
    for module, name in zip(made, NAMES, strict=True):
        module.expert_name = name  # type: ignore[assignment]  # what names an expert is a str
    return made


def inputs() -> list[Tensor]:
    return [torch.ones(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(NUM_CALLS)]


def test_a_name_that_is_no_text_is_taken_as_text() -> None:
    module = nn.Linear(4, 4)
    module.expert_name = ("block", 1)  # type: ignore[assignment]
    with record_timeline() as timeline:
        parallel_apply([module] * 2, [(torch.ones(2, 4),)] * 2)
    assert counted(timeline) == {("('block', 1)", "forward"): 2}
    assert json.dumps(timeline.chrome_trace())


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"max_concurrency": 1}], ids=str)
def test_modules_are_there_by_the_names_of_their_experts(options: dict[str, Any]) -> None:
    with record_timeline() as timeline:
        loss_of(parallel_apply(experts(), [(x,) for x in inputs()], **options)).backward()
    assert counted(timeline) == once_each(NAMES, "forward", "backward")
    assert all(span.start_s <= span.end_s for span in timeline.spans)


def test_weight_gradients_that_come_later_are_a_second_part_of_the_backward() -> None:
    with record_timeline() as timeline:
        loss_of(parallel_apply(experts(), [(x,) for x in inputs()], defer_weight_grads=True)).backward()
    assert counted(timeline) == once_each(NAMES, "forward", "backward", "backward")


def test_modules_without_a_name_are_there_by_their_place() -> None:
    with record_timeline() as timeline:
        parallel_apply([nn.Linear(4, 4).double(), nn.Tanh()], [(x,) for x in inputs()[:2]])
    assert counted(timeline) == once_each(["call 0 (Linear)", "call 1 (Tanh)"], "forward")


def test_the_experts_of_a_layer_are_there_by_their_place_in_it() -> None:
    layer = MixtureOfExperts(TopKRouter(4, 2, top_k=2), [nn.Linear(4, 4), nn.Linear(4, 4)])
    with record_timeline() as timeline:
        layer(torch.randn(5, 4)).sum().backward()
    assert counted(timeline) == once_each(["expert 0", "expert 1"], "forward", "backward")


@pytest.mark.parametrize("recompute", [False, True])
def test_offloaded_experts_are_there_and_in_profiles_by_the_names_of_their_store(recompute: bool) -> None:
    names = [f"expert-{index:05}" for index in range(3)]
    linears = (nn.Linear(4, 4) for _ in range(3))
    with OffloadedExperts(linears, torch.optim.SGD, max_resident_bytes=1000) as experts:
        layer = MixtureOfExperts(TopKRouter(4, 2, top_k=2), experts[:2], recompute=recompute)
        with record_timeline() as timeline, profile() as profiled:
            y = layer(torch.randn(5, 4)) + experts[2](torch.randn(5, 4))
            y.sum().backward()
    assert counted(timeline) == once_each(names, "forward", "backward")
    shown = {event.key for event in profiled.key_averages()}
    assert shown >= {
        f"OffloadedExperts, {phase}: {name}" for name in names for phase in ("forward", "backward")
    }


@pytest.mark.parametrize("num_calls", [1, 3])
def test_functions_are_there_call_by_call(num_calls: int) -> None:
    xs = [torch.ones(2, requires_grad=True) for _ in range(num_calls)]
    with record_timeline() as timeline:
        torch.stack(map_with_parallel_backward(Calls, *[(x,) for x in xs])).sum().backward()
    names = [f"call {index} (Calls)" for index in range(num_calls)]
    assert counted(timeline) == once_each(names, "forward", "backward")


def test_the_spans_of_calls_that_met_overlap() -> None:
    barrier = threading.Barrier(3)
    xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    with record_timeline() as timeline:
        torch.stack(map_with_parallel_backward(Meets, *[(x, barrier) for x in xs])).sum().backward()
    for phase in ("forward", "backward"):
        spans = [span for span in timeline.spans if span.phase == phase]
        assert max(span.start_s for span in spans) <= min(span.end_s for span in spans)


def test_a_call_that_fails_has_its_span_as_well() -> None:
    barrier = threading.Barrier(3)

    def act(fails: bool) -> None:
        barrier.wait(PATIENCE_S)
        if fails:
            raise LookupError

    calls = [(torch.ones(2), lambda fails=index == 1: act(fails)) for index in range(3)]
    with record_timeline() as timeline, pytest.raises(LookupError):
        map_with_parallel_backward(Calls, *calls)
    assert len(timeline.spans) == 3


def test_gradients_of_gradients_are_backwards() -> None:
    xs = inputs()
    with record_timeline() as timeline:
        outputs = parallel_apply([nn.Tanh()] * NUM_CALLS, [(x,) for x in xs])
        grads = torch.autograd.grad(loss_of(outputs), xs, create_graph=True)
        loss_of(list(grads)).backward()
    assert {span.phase for span in timeline.spans if span.name == "call 0 (Tanh)"} == {"forward", "backward"}
    assert sum(span.phase == "forward" for span in timeline.spans) == NUM_CALLS


def test_the_numbers_are_those_without_a_recording() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), inputs()
        with record_timeline():
            outputs = apply(modules, [(x,) for x in xs])
            loss_of(outputs).backward()
        return [*outputs, *[x.grad for x in [*xs, *parameters(modules)]]]

    assert_same(program(one_after_another), program(parallel_apply), tolerance=1e-12)
