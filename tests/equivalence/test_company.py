"""The maps inside what else PyTorch users do: checkpointing, profiling, compiling, scaling, hooks, anomalies."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same,
    assert_same_program,
    loss_of,
    one_after_another,
)
from tests.support.functions_context import SavesInput, SavesOutput
from tests.support.functions_waiting import Calls
from tests.support.module_programs import NUM_CALLS, leaves, parameters, seeded


def assert_same_modules_program(program: Callable[[MapFunction], Any], tolerance: float = 1e-12) -> Any:
    return assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=tolerance
    )


def mixture(apply: MapFunction, modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """A layer over all modules; the parts differ in size, so that a mix-up shows."""
    return lambda x: torch.cat(apply(modules, [(x[: i + 1] * i,) for i in range(len(modules))])).tanh()


@pytest.mark.stress
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inputs", ["of one size", "of several sizes"])
def test_checkpoint_around_a_map_gives_the_same_gradients(use_reentrant: bool, inputs: str) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), leaves()
        same_size = lambda x: torch.cat(apply(modules, [(x * i,) for i in range(NUM_CALLS)]))  # noqa: E731
        layer = same_size if inputs == "of one size" else mixture(apply, modules)
        outputs = [checkpoint(layer, x, use_reentrant=use_reentrant) for x in xs]
        loss_of(outputs).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    for _ in range(10):
        assert not isinstance(assert_same_modules_program(program), Raised)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_mapped_function_gives_the_same_gradients(use_reentrant: bool) -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        layer = lambda *xs: torch.stack(apply(SavesOutput, *[(x,) for x in xs]))  # noqa: E731
        loss_of(checkpoint(layer, *xs, use_reentrant=use_reentrant)).backward()
        return [x.grad for x in xs]

    assert_same_program(program)


def test_a_checkpoint_of_the_older_kind_inside_a_call_says_what_to_pass() -> None:
    """It differentiates everything behind it, and so PyTorch refuses to run it where gradients are asked for."""
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    calls = [lambda x, m=m: checkpoint(m, x, use_reentrant=True) for m in modules]
    loss = loss_of(parallel_apply(calls, [(x,) for x in xs]))
    with pytest.raises(RuntimeError, match="set use_reentrant=False") as raised:
        loss.backward()
    assert "parallel_apply, backward: raised by call 0" in raised.value.__notes__[0]


def test_a_sequence_of_checkpointed_maps_gives_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        modules, (x,) = seeded(lambda: nn.Linear(4, 4)), leaves(1)
        layer = lambda x: sum(apply(modules, [(x,)] * NUM_CALLS))  # noqa: E731
        loss_of(checkpoint_sequential([layer] * 4, 2, x, use_reentrant=False)).backward()
        return [y.grad for y in [x, *parameters(modules)]]

    assert_same_modules_program(program)


def test_checkpoint_inside_the_calls_gives_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), leaves()
        calls = [lambda x, m=m: checkpoint(m, x, use_reentrant=False) for m in modules]
        loss_of(apply(calls, [(x,) for x in xs])).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_reentrant_checkpoint_inside_the_calls_is_refused_in_pytorchs_words() -> None:
    """It calls `.backward()` inside, which PyTorch forbids below `autograd.grad`, and the map's calls are below."""
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    calls = [lambda x, m=m: checkpoint(m, x, use_reentrant=True) for m in modules]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss_of(parallel_apply(calls, [(x,) for x in xs])).backward()


def test_saved_tensor_hooks_see_as_many_tensors_and_may_change_them() -> None:
    def program(apply: MapFunction) -> Any:
        packed: list[Any] = []
        xs = leaves()
        with saved_tensors_hooks(lambda x: (packed.append(tuple(x.shape)), x * 2)[1], lambda x: x):
            results = apply(SavesInput, *[(x * 1,) for x in xs])
        loss_of(results).backward()
        return packed, [x.grad for x in xs]

    assert_same_program(program)


def test_modules_under_save_on_cpu_give_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), leaves()
        with save_on_cpu():
            outputs = apply(modules, [(x,) for x in xs])
        loss_of(outputs).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program)


def test_gradient_scaling_and_unscaling_give_the_same_step() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        optimizer = torch.optim.SGD(parameters(modules), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(apply(modules, [(x,) for x in xs]))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters(modules), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in parameters(modules)]

    assert_same_modules_program(program)


def test_optimizers_that_step_in_backward_hooks_give_the_same_weights() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        for p in parameters(modules):
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(q: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(apply(modules, [(x,) for x in xs])).backward()
        return [p.detach() for p in parameters(modules)], [p.grad for p in parameters(modules)]

    assert_same_modules_program(program)


def test_autocast_gives_the_same_outputs_and_gradients() -> None:
    """To bfloat16's precision: the plain loop adds the gradients of a cached cast up in bfloat16."""

    def program(apply: MapFunction) -> Any:
        modules = [
            module.float() for module in seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        ]
        modules[3] = modules[0]  # its cast weight may be cached
        xs = [x.detach().float().requires_grad_() for x in leaves()]
        with torch.autocast("cpu"):
            outputs = [*apply(modules, [(x,) for x in xs]), *apply(modules, [(x,) for x in xs])]
        loss_of(outputs).backward()
        return [y.detach() for y in outputs], [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_modules_program(program, tolerance=2e-2)


@pytest.mark.parametrize("cache", [True, False])
def test_recompute_runs_in_the_autocast_of_the_forward(cache: bool) -> None:
    def run(*, recompute: bool) -> tuple[list[torch.dtype], list[Tensor | None]]:
        modules = [module.float() for module in seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))]
        xs, dtypes = [x.detach().float().requires_grad_() for x in leaves()], []
        for linear in (module[0] for module in modules):  # type: ignore[index]  # each is a Sequential
            linear.register_forward_hook(lambda m, args, output: dtypes.append(output.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            outputs = parallel_apply(modules, [(x,) for x in xs], recompute=recompute)
        loss_of(outputs).backward()
        return dtypes, [x.grad for x in [*xs, *parameters(modules)]]

    plain, recomputed = run(recompute=False), run(recompute=True)
    assert recomputed[0] == 2 * plain[0] == [torch.bfloat16] * 2 * NUM_CALLS
    assert_same(plain[1], recomputed[1])


@contextlib.contextmanager
def anomalies(*, check_nan: bool = True) -> Iterator[list[warnings.WarningMessage]]:
    """Detect anomalies; what PyTorch has to say about them, it says in warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=check_nan):
            yield warned


def test_anomaly_detection_finds_a_nan_and_the_function_that_made_it() -> None:
    def make_nan(x: Tensor) -> Tensor:
        return torch.sqrt(x * 0 - 1)

    for apply in (one_after_another, parallel_apply):
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"), anomalies() as warned:
            loss_of(apply([torch.sin, make_nan], [(x,) for x in leaves(2)])).backward()
        assert any("in make_nan" in str(warning.message) for warning in warned)


class DividesByZero(torch.autograd.Function):
    """The gradient of its second tensor is not a number, in one of many calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: float, y: Tensor) -> Tensor:
        ctx.divisor = divisor
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, grad * 0 / torch.tensor(ctx.divisor)


@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_detection_names_the_autograd_function_and_its_call(check_nan: bool) -> None:
    def program(apply: MapFunction) -> Any:
        x, *ys = leaves(4)
        calls = [(x, divisor, y) for divisor, y in zip((1.0, 0.0, 1.0), ys, strict=True)]
        with anomalies(check_nan=check_nan):
            loss_of(apply(DividesByZero, *calls)).backward()
        return [y.grad is not None and y.grad.isnan() for y in ys]

    said = assert_same_program(program)
    assert isinstance(said, Raised) == check_nan
    assert not check_nan or "raised by call 1 (DividesByZero) of 3." in said.notes[0]


def test_anomaly_detection_shows_where_a_failing_backward_came_from() -> None:
    def fail() -> None:
        raise LookupError("broken")

    def the_function_that_mapped(x: Tensor) -> Any:
        return map_with_parallel_backward(Calls, (x,), (x, None, fail))

    with pytest.raises(LookupError, match="broken"), anomalies() as warned:
        loss_of(the_function_that_mapped(torch.ones(2, requires_grad=True))).backward()
    assert any("in the_function_that_mapped" in str(warning.message) for warning in warned)


def test_the_profiler_shows_a_range_for_each_call_of_both_passes() -> None:
    """On whatever thread it ran: the switch to see them all is in the profiler's experimental config."""
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    for index, module in enumerate(modules):
        module.expert_name = f"ffn.{index}"  # type: ignore[assignment]  # what names an expert is a str
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
    ) as profile:
        loss_of(parallel_apply(modules, [(x,) for x in xs])).backward()
        loss_of(map_with_parallel_backward(SavesInput, *[(x,) for x in xs])).backward()
    names = [event.name for event in profile.events()]
    for title in ("parallel_apply", "map_with_parallel_backward"):
        for where in ("forward", "backward"):
            ranges = [name for name in names if title in name and f", {where}: call" in name]
            assert len(ranges) == NUM_CALLS, (title, where, names)
            assert len(set(ranges)) == NUM_CALLS
            if title == "parallel_apply":
                assert all(any(f"'ffn.{i}'" in name for name in ranges) for i in range(NUM_CALLS)), ranges


@pytest.mark.parametrize("fullgraph_inside", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_function_around_a_map_gives_the_same_gradients(fullgraph_inside: bool) -> None:
    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        modules, (x,) = seeded(lambda: nn.Linear(4, 4)), leaves(1)
        calls = (
            [torch.compile(m, backend="aot_eager", fullgraph=True) for m in modules]
            if fullgraph_inside
            else modules
        )

        def layer(x: Tensor) -> Tensor:
            outputs = apply(calls, [(x * i,) for i in range(NUM_CALLS)])
            return torch.cat(outputs).sin()

        layer = layer if fullgraph_inside else torch.compile(layer, backend="aot_eager")
        for _ in range(2):
            loss_of(layer(x * 2)).backward()
        return [y.grad for y in [x, *parameters(modules)]]

    said = assert_same_modules_program(program)
    assert not isinstance(said, Raised), said


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_function_around_a_mapped_function_gives_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        xs = leaves(2)

        @torch.compile(backend="eager")
        def layer(x: Tensor, y: Tensor) -> Tensor:
            first, second = apply(SavesInput, (x * 2,), (y * 3,))
            return first.sin() * second

        loss_of(layer(*xs)).backward()
        return [x.grad for x in xs]

    said = assert_same_program(program, tolerance=1e-12)
    assert not isinstance(said, Raised), said


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_backward_through_a_map_gives_the_same_gradients(options: dict[str, Any]) -> None:
    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        modules, (first,), (x,) = (
            seeded(lambda: nn.Linear(4, 4)),
            seeded(lambda: nn.Linear(4, 4), 1),
            leaves(1),
        )
        modules[3] = modules[0]
        hidden = first(x)
        outputs = apply(modules, [(hidden * i,) for i in range(NUM_CALLS)])
        with compiled_autograd._enable(torch.compile(backend="eager")):
            (loss_of(outputs) + loss_of([modules[1].weight])).backward()
        return [y.grad for y in [x, *first.parameters(), *parameters(modules)]]

    mapped = functools.partial(parallel_apply, **options)
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=1e-12)
    assert not isinstance(said, Raised), said


@pytest.mark.parametrize("num_calls", [1, NUM_CALLS])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_backward_through_a_mapped_function_gives_the_same_gradients(num_calls: int) -> None:
    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        xs = leaves(num_calls)
        results = apply(SavesInput, *[(x * 2,) for x in xs])
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss_of(results).backward()
        return [x.grad for x in xs]

    said = assert_same_program(program, tolerance=1e-12)
    assert not isinstance(said, Raised), said
