"""Calls in turn beside hooks, checkpoints, profilers and what others put in the place of torch's: as in a loop."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn, parallel
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.saved_tensors import is_checkpointed
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.timeline import record_timeline
from tests.support.comparison import MapFunction, Raised, assert_same, assert_same_program, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.made_in_turn import expert, is_made_in_turn
from tests.support.operators import CountOperators
from tests.support.subprocesses import ROOT

NUM_CALLS = 4


pytestmark = pytest.mark.usefixtures("some_are_small")


@pytest.mark.parametrize("kind", [nn.Softmax, nn.LogSoftmax])
def test_a_warning_is_of_the_line_that_it_is_of_in_a_loop(kind: Callable[[], nn.Module]) -> None:
    def place(apply: MapFunction) -> tuple[str, int]:
        with pytest.warns(UserWarning, match="Implicit dimension choice") as seen:
            apply([kind()], [(torch.randn(3, 4),)])
        return seen[0].filename, seen[0].lineno

    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        assert is_made_in_turn(kind())
    assert place(parallel_apply) == place(one_after_another)


def test_hooks_on_all_modules_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_made_in_turn(expert())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_made_in_turn(expert())
        assert not in_turn.is_small(expert(), [torch.randn(3, 4)])
        assert in_turn.is_watched(expert())
    finally:
        handle.remove()


def test_an_error_names_its_call() -> None:
    modules = [expert(), expert(), expert()]
    inputs = [torch.randn(3, 4), torch.randn(3, 5), torch.randn(3, 4)]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        parallel_apply(modules, [(x,) for x in inputs])
    assert any("call 1" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("last", [nn.Linear, lambda *shape: nn.Sequential(nn.Linear(*shape), nn.Tanh())])
def test_a_checkpoint_that_ends_within_a_call_is_not_run_once_more(last: Callable[..., nn.Module]) -> None:
    """It ends its second run by raising, where the last tensor is saved: here in the last call, and by a hook."""

    def program(apply: MapFunction) -> Any:
        torch.manual_seed(1)
        modules = [last(4, 4) for _ in range(NUM_CALLS)]
        x = torch.randn(3, 4, requires_grad=True)
        outputs = checkpoint(lambda x: apply(modules, [(x,)] * NUM_CALLS), x, use_reentrant=False)
        with CountOperators() as counts:
            torch.stack(outputs).sum().backward()
        return [x.grad, *[p.grad for m in modules for p in m.parameters()]], counts.counts["addmm"]

    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)
    assert not isinstance(said, Raised)


def test_whoever_looks_sees_each_call_by_its_name() -> None:
    modules = [expert() for _ in range(NUM_CALLS)]
    inputs = [(torch.randn(3, 4),) for _ in modules]
    with torch.profiler.profile(
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    ) as profile:
        parallel_apply(modules, inputs)
    seen = {event.name for event in profile.events()}
    assert all(any(f"call {i} " in name for name in seen) for i in range(NUM_CALLS))
    with record_timeline():
        y = parallel_apply(modules, [(torch.randn(3, 4, requires_grad=True),) for _ in modules])[0]
    assert "Join" in type(y.grad_fn).__name__


def test_ctrl_c_behind_the_last_call_is_itself() -> None:
    class InterruptedAtItsEnd(list[Any]):
        num_passes = 0

        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            self.num_passes += 1
            if self.num_passes == 2:  # the calls are made; the first pass looks whether they are small
                signal.raise_signal(signal.SIGINT)

    args = InterruptedAtItsEnd([(torch.randn(3, 4),)] * NUM_CALLS)
    with pytest.raises(KeyboardInterrupt):
        in_turn.call_in_turn([expert()] * NUM_CALLS, args, [{}] * NUM_CALLS)


def test_who_replaces_how_parts_are_taken_in_turn_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[nn.Module] = []

    def parts_of(module: nn.Sequential) -> Iterator[nn.Module]:
        for part in module._modules.values():
            assert part is not None
            taken.append(part)
            yield part

    modules = [expert() for _ in range(NUM_CALLS)]
    monkeypatch.setattr(nn.Sequential, "__iter__", parts_of)
    assert in_turn.call_in_turn(modules, [(torch.randn(3, 4),)] * NUM_CALLS, [{}] * NUM_CALLS) is not None
    assert taken == [part for module in modules for part in module._modules.values()]


OPTIONS: list[dict[str, bool]] = [{"recompute": True}, {"defer_weight_grads": True}]


def dropouts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(expert(), nn.Dropout(0.5), nn.Linear(4, 4)) for _ in range(NUM_CALLS)]


def is_joined(result: Tensor) -> bool:
    return "Join" in type(result.grad_fn).__name__


def test_small_calls_do_not_defer_and_large_ones_are_not_made_in_turn_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules, x = dropouts(), torch.randn(3, 4)

    def run(**options: bool) -> Tensor:
        return parallel_apply(modules, [x] * NUM_CALLS, **options)[0]

    assert not is_joined(run(defer_weight_grads=True))
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    monkeypatch.setattr(in_turn, "LEAST_LARGE", 0)
    assert not is_joined(run())
    assert is_joined(run(defer_weight_grads=True))


@pytest.mark.parametrize("recompute", [True, Recompute(early_stop=False)])
def test_small_calls_that_recompute_are_checkpointed_in_turn(recompute: Any) -> None:
    modules = [expert() for _ in range(NUM_CALLS)]

    def program(apply: MapFunction) -> Any:
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        results = apply(modules, [(x,)] * NUM_CALLS)
        assert is_checkpointed(results[0].grad_fn)
        weights = [weight for module in modules for weight in module.parameters()]
        return results, torch.autograd.grad(torch.stack(results).sin().sum(), [x, *weights])

    def in_loop(modules: Any, inputs: Any) -> Any:
        return [
            checkpoint(module, *x, use_reentrant=False) for module, x in zip(modules, inputs, strict=True)
        ]

    def in_map(modules: Any, inputs: Any) -> Any:
        results = parallel_apply(modules, inputs, recompute=recompute)
        assert not any(map(is_joined, results))
        return results

    assert_same(program(in_loop), program(in_map))
    with torch.no_grad():
        assert_same(
            one_after_another(modules, [torch.ones(3, 4)] * NUM_CALLS),
            in_map(modules, [torch.ones(3, 4)] * NUM_CALLS),
        )


class SaysSo(nn.Module):
    """Says that it does only compute, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def only_computes(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + self.bias, 0.5, self.training)


def test_what_is_not_read_has_the_same_random_numbers_when_it_runs_again() -> None:
    module, x = SaysSo(), torch.ones(3, 4)
    (y,) = parallel_apply([module], [x], recompute=True)
    y.sum().backward()
    assert module.bias.grad is not None
    assert torch.equal(module.bias.grad, y.detach().sum(0))


def test_a_policy_of_ones_own_is_followed_on_threads() -> None:
    own = Recompute(context_fn=lambda: (nullcontext(), nullcontext()))
    results = parallel_apply([expert()] * NUM_CALLS, [torch.ones(3, 4)] * NUM_CALLS, recompute=own)
    assert all(map(is_joined, results))


def test_a_layer_that_drops_experts_calls_small_ones_in_turn_as_one_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, experts = TopKRouter(4, num_experts=NUM_CALLS, top_k=2), dropouts()
    x = torch.randn(6, 4, requires_grad=True)

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        layer = MixtureOfExperts(router, experts, **options)
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), torch.rand(3)]

    strict = run()
    monkeypatch.delattr(parallel, "run_units")
    assert_same(strict, run(on_failure="drop"))
    options: list[dict[str, Any]] = [{"recompute": True}, {"timeout_after_min_s": PATIENCE_S}]
    for threads in options:  # who comes late is left out: nobody is to wait in line
        with pytest.raises(NameError, match="run_units"):
            run(on_failure="drop", **threads)


@pytest.mark.parametrize("unrecorded", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_where_gradients_are_not_recorded_calls_with_options_are_those_without(
    options: dict[str, bool], unrecorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, xs = dropouts(), torch.randn(NUM_CALLS, 3, 4)

    def run(**options: bool) -> list[Tensor]:
        torch.manual_seed(1)
        return [*parallel_apply(modules, list(xs), **options), torch.rand(3)]

    with monkeypatch.context() as patched:
        patched.setattr(in_turn, "MOST_SMALL", -1)
        on_threads = run(**options)
    assert is_joined(on_threads[0])
    monkeypatch.delattr(parallel, "run_units")
    with unrecorded():
        for mine, without, same in zip(run(**options), run(), on_threads, strict=True):
            assert torch.equal(mine, without)
            torch.testing.assert_close(mine, same.detach())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_both_runs_of_a_reentrant_checkpoint_draw_the_same(options: dict[str, bool]) -> None:
    """Its first run records no gradients, and makes calls that recompute in turn; its second has them on threads."""

    def run(is_checkpointed: bool) -> list[Any]:
        modules, x = dropouts(), torch.ones(3, 4, requires_grad=True)

        def layer(x: Tensor) -> Tensor:
            return torch.stack(parallel_apply(modules, [(x,)] * NUM_CALLS, **options))

        torch.manual_seed(1)
        y = checkpoint(layer, x, use_reentrant=True) if is_checkpointed else layer(x)
        y.sum().backward()
        return [y, x.grad, *(p.grad for m in modules for p in m.parameters()), torch.rand(3)]

    for mine, same in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, same)


def test_a_recompute_of_ones_own_is_asked_where_gradients_are_not_recorded() -> None:
    asked = list[int]()

    def context_fn() -> Any:
        asked.append(1)
        return nullcontext(), nullcontext()

    modules, xs = dropouts(), [torch.randn(3, 4)] * NUM_CALLS
    with torch.no_grad():
        parallel_apply(modules, xs, recompute=Recompute(context_fn=context_fn))
        assert len(asked) == NUM_CALLS
        with pytest.raises(ValueError, match="determinism_check should be one of"):
            parallel_apply(modules, xs, recompute=Recompute(determinism_check="strict"))


PARTS = [nn.Sequential, nn.Linear, nn.GELU, nn.Linear]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (nn.Module, "__call__", PARTS),
        (nn.Module, "_call_impl", PARTS),
        (nn.Linear, "__call__", [nn.Linear] * 2),
    ],
)
def test_whoever_replaces_the_call_of_modules_sees_each(
    kind: Any, name: str, expected: list[type[nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[type[nn.Module]] = []
    replaced = getattr(kind, name)

    def seeing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module))
        return replaced(module, *args, **kwargs)

    monkeypatch.setattr(kind, name, seeing)
    assert is_made_in_turn(expert())
    assert seen == expected * 2  # two calls


@pytest.mark.parametrize(("owner", "name"), [(nn.Linear, "forward"), (F, "linear")])
def test_what_is_put_in_the_place_of_what_torchs_modules_compute_may_wait(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, replaced = threading.Barrier(NUM_CALLS), getattr(owner, name)

    def meets(*args: Any) -> Any:
        barrier.wait(PATIENCE_S)
        return replaced(*args)

    modules, x = [nn.Linear(4, 4) for _ in range(NUM_CALLS)], torch.randn(3, 4)
    expected = [module(x) for module in modules]
    monkeypatch.setattr(owner, name, meets)
    assert not in_turn.is_small(modules[0], [x])
    outputs = parallel_apply(modules, [x] * NUM_CALLS)
    assert all(torch.equal(y, same) for y, same in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("replaced", ["nn.Linear.forward", "nn.functional.linear"])
def test_so_may_what_was_put_there_before_our_import(replaced: str) -> None:
    program = f"""
        import threading
        from torch import nn, ones
        barrier, before = threading.Barrier(2), {replaced}
        {replaced} = lambda *args: (barrier.wait({PATIENCE_S}), before(*args))[1]
        from moe_autograd import parallel_apply
        parallel_apply([nn.Linear(4, 4)] * 2, [ones(3, 4)] * 2)
        print("met")
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.check_output(command, cwd=ROOT, text=True, timeout=120).split() == ["met"]


def test_whoever_replaced_the_call_of_modules_before_the_import_sees_each() -> None:
    program = [
        "from torch import nn, ones",
        "call, seen = nn.Module.__call__, []",
        "nn.Module.__call__ = lambda module, *args: (seen.append(type(module).__name__), call(module, *args))[1]",
        "from moe_autograd import parallel_apply",
        "parallel_apply([nn.Linear(4, 4)] * 2, [ones(3, 4)] * 2)",
        "print(*seen)",
    ]
    command = [sys.executable, "-c", "; ".join(program)]  # in a warm process ours would be imported already
    assert subprocess.check_output(command, cwd=ROOT, text=True, timeout=120).split() == ["Linear", "Linear"]


def test_a_part_that_is_compiled_runs_compiled() -> None:
    module, seen = expert(), list[Tensor]()
    part = module[0]

    def compiled(x: Tensor) -> Any:
        seen.append(x)
        return part._call_impl(x)

    # As `part.compile()` leaves it; torch compiles no single layer of its own.
    part._compiled_call_impl = compiled
    x = torch.randn(3, 4)
    assert is_made_in_turn(module, x)
    assert seen == [x, x]
