"""`parallel_apply(..., defer_weight_grads=True)` gives what a plain loop gives, and computes it later.

Who waits for whom is settled by events: a weight's gradient that waits for something upstream would wait for ever if
the backward did not go on there.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply, split_backward
from tests.support.comparing_modules import ORDER, PROGRAMS, assert_same_modules_program, name_of
from tests.support.comparison import MapFunction, assert_same, loss_of, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import gradients_of_a_few, leaves, parameters, seeded
from tests.support.subprocesses import assert_prints, run_python

deferring = functools.partial(parallel_apply, defer_weight_grads=True)


class InBackward(torch.autograd.Function):
    """The identity; its backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


class Scale(nn.Module):
    """Multiplies by a weight whose own gradient passes a function first; that of the input does not."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * InBackward.apply(self.weight, self.function)  # type: ignore[no-any-return, no-untyped-call]


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "nobody came"


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same(program: Callable[[MapFunction], Any]) -> None:
    assert_same_modules_program(program, deferring)


@pytest.mark.parametrize("wanted", ["inputs", "parameters", "one parameter", "a mixture"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_gradients_of_a_few_tensors_are_the_same_and_no_others_are_touched(wanted: str, how: str) -> None:
    assert_same_modules_program(functools.partial(gradients_of_a_few, wanted=wanted, how=how), deferring)


def test_the_backward_goes_on_upstream_before_the_weights_gradients_are_there() -> None:
    is_upstream = threading.Event()
    modules = [Scale(lambda: wait_for(is_upstream)) for _ in range(3)]
    (x,) = leaves(1)
    h = InBackward.apply(x, is_upstream.set)  # type: ignore[no-untyped-call]
    for _ in range(2):  # two layers: the second's gradients wait, and so do the first's
        h = sum(deferring(modules, [(h,)] * 3))
    h.sum().backward()
    assert x.grad is not None
    assert all(module.weight.grad is not None for module in modules)


def test_weight_gradients_are_computed_while_the_backward_is_upstream() -> None:
    has_computed = threading.Event()
    (x,) = leaves(1)
    h = InBackward.apply(x, lambda: wait_for(has_computed))  # type: ignore[no-untyped-call]
    deferring([Scale(has_computed.set)] * 2, [(h,)] * 2)[0].sum().backward()


def test_a_weight_that_serves_upstream_too_gets_one_sum_and_its_hooks_fire_once() -> None:
    def program(apply: MapFunction) -> Any:
        (module,), (x,) = seeded(lambda: nn.Linear(4, 4), 1), leaves(1)
        seen: list[Tensor] = []
        module.weight.register_hook(lambda grad: seen.append(grad.clone()))
        module.weight.register_hook(lambda grad: 2 * grad)
        module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        h = module(x)
        for _ in range(2):
            h = sum(apply([module] * 3, [(h,)] * 3))
        h.square().sum().backward()
        return [p.grad for p in module.parameters()], x.grad, seen

    said = assert_same_modules_program(program, deferring)
    assert len(said[2]) == 2


@pytest.mark.parametrize(
    "kind", ["retain_graph", "create_graph", "saved-tensor hooks", "checkpoint", "recompute"]
)
def test_where_a_backward_is_not_split_it_is_right_all_the_same(kind: str) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), leaves()
        weights = parameters(modules)

        def forward(*xs: Tensor) -> Tensor:
            return loss_of(apply(modules, [(x,) for x in xs]))

        if kind == "checkpoint":
            checkpoint(forward, *xs, use_reentrant=False).backward()
        elif kind == "saved-tensor hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                loss = forward(*xs)
            loss.backward()
        elif kind == "create_graph":
            grads = torch.autograd.grad(forward(*xs), [*xs, *weights], create_graph=True)
            loss_of(grads).backward()
        else:
            loss = forward(*xs)
            loss.backward(retain_graph=kind == "retain_graph")
            if kind == "retain_graph":
                loss.backward()
        return [x.grad for x in [*xs, *weights]]

    apply = functools.partial(deferring, recompute=True) if kind == "recompute" else deferring
    assert_same_modules_program(program, apply)


@pytest.mark.parametrize(
    "context_fn",
    [
        noop_context_fn,
        functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ],
    ids=["all", "some"],
)
def test_checkpoints_within_calls_compute_again_once(context_fn: Any) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs, runs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), leaves(), []

        def call(module: nn.Module, x: Tensor) -> Any:
            def forward(x: Tensor) -> Any:
                runs.append(module)
                return module(x)

            return checkpoint(forward, x, use_reentrant=False, context_fn=context_fn)

        calls = [functools.partial(call, module) for module in modules]
        loss_of(apply(calls, [(x,) for x in xs])).backward()
        return [x.grad for x in [*xs, *parameters(modules)]], len(runs)

    assert_same_modules_program(program, deferring)


@pytest.mark.parametrize("apply", [parallel_apply, deferring], ids=["at once", "deferring"])
def test_a_map_inside_a_split_backward_gives_its_weights_gradients(apply: MapFunction) -> None:
    def gradients(apply: MapFunction, *, is_split: bool) -> Any:
        modules, (x, unrelated) = seeded(lambda: nn.Linear(4, 4)), leaves(2)
        weights = [unrelated, *parameters(modules)]
        inputs = [(x,), (x,), (unrelated.sin(),), (x * unrelated,)]
        y = sum(apply(modules, inputs)).sum()
        if not is_split:
            return torch.autograd.grad(y, [x, *weights])
        first, pending = split_backward(y, None, x, weights)
        return (*first, *pending.run())

    assert_same(
        gradients(one_after_another, is_split=False), gradients(apply, is_split=True), tolerance=ORDER
    )


def test_maps_that_defer_may_stand_behind_weights_that_wait() -> None:
    """Second parts hold a map of their own, whose second parts nobody else has time for."""

    def program(apply: MapFunction) -> Any:
        makers, (x, seed) = seeded(lambda: nn.Linear(4, 4)), leaves(2)

        class Generated(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * sum(apply(makers, [(seed.detach(),)] * len(makers)))

        return (
            loss_of(apply([Generated()] * 3, [(x,)] * 3)).backward(),
            x.grad,
            [m.weight.grad for m in makers],
        )

    assert_same_modules_program(program, deferring)


def test_a_failure_among_the_weights_is_raised_by_the_backward_with_a_note() -> None:
    def fail() -> None:
        raise LookupError("no such weight")

    modules = [Scale(lambda: None), Scale(fail), Scale(lambda: None)]
    (x,) = leaves(1)
    with pytest.raises(LookupError, match="no such weight") as caught:
        sum(deferring(modules, [(x,)] * 3)).sum().backward()
    assert "weight gradients: raised by call 1 (Scale) of 3" in caught.value.__notes__[0]


def test_a_backward_that_fails_upstream_leaves_nothing_behind() -> None:
    """What runs comes to rest before the backward raises, what has not begun never does, and all is let go."""
    gc.collect()
    gc.disable()
    try:
        has_begun, may_end, is_failing = threading.Event(), threading.Event(), threading.Event()
        ended: list[str] = []

        def first_weight() -> None:
            has_begun.set()
            wait_for(is_failing)
            wait_for(may_end)
            ended.append("first")

        def fail() -> None:
            wait_for(has_begun)
            is_failing.set()
            threading.Timer(0.05, may_end.set).start()
            raise LookupError("upstream")

        (x,) = leaves(1)
        module, later = Scale(first_weight), Scale(lambda: ended.append("later"))
        watched = [weakref.ref(module), weakref.ref(module.weight)]
        h = InBackward.apply(x, fail)  # type: ignore[no-untyped-call]
        (h,) = deferring([later], [(h,)])
        (y,) = deferring([module], [(h,)])
        with pytest.raises(LookupError, match="upstream"):
            y.sum().backward()
        assert ended == ["first"]
        assert module.weight.grad is None
        assert later.weight.grad is None
        del module, later, y, h
        torch.ones(
            (), requires_grad=True
        ).backward()  # the engine keeps nodes that were ready until the next one
        assert [one() for one in watched] == [None, None]
    finally:
        gc.enable()


def test_what_only_the_inputs_gradients_need_is_freed_before_the_weights_are_done() -> None:
    saved: list[weakref.ref[Tensor]] = []
    alive_upstream: list[int] = []
    is_upstream = threading.Event()

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            factor = 2 * x
            ctx.save_for_backward(factor)
            saved.append(weakref.ref(factor))
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]

    class Expert(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Squares.apply(x))  # type: ignore[no-untyped-call]

    def look() -> None:
        alive_upstream.append(sum(one() is not None for one in saved))
        is_upstream.set()

    (x,) = leaves(1)
    h = InBackward.apply(x, look)  # type: ignore[no-untyped-call]
    sum(deferring([Expert(lambda: wait_for(is_upstream)) for _ in range(3)], [(h,)] * 3)).sum().backward()
    assert len(saved) == 3
    assert alive_upstream == [0]


def test_many_threads_may_go_backward_at_once() -> None:
    def gradients(apply: MapFunction, modules: list[nn.Module]) -> list[Tensor | None]:
        (x,) = leaves(1)
        h = x
        for _ in range(3):
            h = sum(apply(modules, [(h,)] * len(modules)))
        h.sum().backward()
        return [p.grad for p in [x, *parameters(modules)]]

    sets = [seeded(lambda: nn.Linear(4, 4)) for _ in range(9)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(functools.partial(gradients, deferring), sets[:8]))
    expected = gradients(one_after_another, sets[8])
    for one in found:
        assert_same(expected, one, tolerance=ORDER)


FORKING = """
import os, sys, torch
from torch import nn
from moe_autograd import parallel_apply

def gradients(defers):
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4) for _ in range(4)]
    h = torch.ones(3, 4)
    for _ in range(3):
        h = sum(parallel_apply(modules, [(h,)] * 4, defer_weight_grads=defers))
    h.sin().sum().backward()
    return [parameter.grad for module in modules for parameter in module.parameters()]

torch.set_num_threads(1)  # as PyTorch asks for of who forks
expected = gradients(False)
gradients(True)  # the parent has a worker, and a backlog
child = os.fork()
same = all(torch.allclose(a, b) for a, b in zip(gradients(True), expected, strict=True))
if child == 0:
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
sys.exit(0 if same and os.waitstatus_to_exitcode(status) == 0 else 4)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_defers_with_workers_of_its_own() -> None:
    done = run_python(FORKING, limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_a_layer_does_not_defer_what_it_may_have_to_leave_out() -> None:
    experts = [nn.Linear(4, 4) for _ in range(2)]
    with pytest.raises(ValueError, match="expected defer_weight_grads=False with on_failure='drop'"):
        MixtureOfExperts(TopKRouter(4, 2, top_k=1), experts, defer_weight_grads=True, on_failure="drop")


def test_a_failure_is_raised_also_where_no_worker_could_be_had_and_nobody_waits_for_one() -> None:
    assert_prints(
        """
    import torch
    from moe_autograd import parallel_apply
    from tests.equivalence.test_deferred import Scale
    from tests.support.scarce import no_thread_to_give

    def fail():
        raise LookupError("no such weight")

    for function in (fail, lambda: None):
        module, x = Scale(function), torch.ones(4).double().requires_grad_()
        with no_thread_to_give():
            outputs = parallel_apply([module] * 2, [(x,)] * 2, max_concurrency=1, defer_weight_grads=True)
            try:
                torch.stack(outputs).sum().backward()
            except LookupError as error:
                print(error)
            else:
                print(module.weight.grad.tolist())
    """,
        "no such weight\n[2.0, 2.0, 2.0, 2.0]",
    )
