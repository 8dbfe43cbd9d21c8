"""What a call saved goes when its graph goes, or its backward is done; never later, never by the collector.

All with `gc` disabled, watching tensors through weak references.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from moe_autograd import (
    map_with_parallel_backward,
    parallel_apply,
    run_isolated_backward,
    run_isolated_forward,
)
from tests.support.comparison import one_after_another
from tests.support.functions_context import SavesInput
from tests.support.functions_waiting import PATIENCE_S
from tests.support.histories import Copies, copied, leaf

NUM_CALLS = 6
pytestmark = pytest.mark.usefixtures("no_gc")


class Watch:
    """Weak references to tensors, and how many of them still live."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def __call__(self, value: Any) -> Any:
        self._refs.append(weakref.ref(value))
        return value

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._refs)


def test_what_hooks_packed_goes_with_each_node_of_a_calls_backward() -> None:
    def alive_in_the_middle(call_all: Callable[..., Any]) -> tuple[list[int], int]:
        watch, alive = Watch(), []

        def call(x: Tensor) -> Tensor:
            y = x.sin()
            y.register_hook(lambda _: alive.append(watch.alive))
            return y.exp().cos().sinh()

        class Packed(list[Tensor]):
            pass

        with saved_tensors_hooks(lambda tensor: watch(Packed([tensor])), lambda packed: packed[0]):
            (y,) = call_all([call], [(torch.ones(3, requires_grad=True),)])
        y.sum().backward()
        return alive, watch.alive

    assert (
        alive_in_the_middle(parallel_apply)
        == alive_in_the_middle(lambda calls, xs: [calls[0](*xs[0])])
        == ([1], 0)
    )


def test_hooks_unpack_what_a_call_saved_when_its_backward_asks_for_it() -> None:
    """What all calls saved was in memory at once: under `save_on_cpu`, all that was to be elsewhere."""

    def most_alive(call_all: Callable[..., Any]) -> int:
        watch, alive = Watch(), [0]

        def unpack(packed: Tensor) -> Tensor:
            unpacked: Tensor = watch(packed.clone())
            alive.append(watch.alive)
            return unpacked

        xs = [torch.ones(3, requires_grad=True) for _ in range(NUM_CALLS)]
        with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            ys = call_all([lambda x: x.exp().sin().cos()] * NUM_CALLS, [(x,) for x in xs])
        torch.stack(ys).sum().backward()
        assert len(alive) > 2 * NUM_CALLS
        return max(alive)

    one_by_one = functools.partial(parallel_apply, max_concurrency=1)
    assert most_alive(one_by_one) == most_alive(one_after_another)


class Keeps(Function):
    """Saves an intermediate, an input and its result, and keeps its context in view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch) -> Tensor:
        intermediate, result = watch(x.cos()), x.sin()
        ctx.save_for_backward(x, intermediate, result)
        ctx.watch = watch
        watch(ctx)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[1], None


class KeepsOnContext(Function):
    """Keeps its input and a graph of its own as attributes, which PyTorch frees with the node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch) -> Tensor:
        with torch.enable_grad():
            ctx.inner = watch(x.detach().requires_grad_())
            ctx.result = watch(ctx.inner.sin())
        watch(ctx)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.autograd.grad(ctx.result, ctx.inner, grad)[0], None


FUNCTIONS = pytest.mark.parametrize("func", [Keeps, KeepsOnContext])


def run(func: Any, watch: Watch, **kwargs: Any) -> tuple[Tensor, ...]:
    inputs = [watch(torch.ones(3, requires_grad=True)) for _ in range(NUM_CALLS)]
    products = [watch(x * 2) for x in inputs]
    return map_with_parallel_backward(func, *[(x, watch) for x in products], **kwargs)


@FUNCTIONS
@pytest.mark.parametrize("bound", [None, 1])
def test_everything_goes_with_the_results(func: Any, bound: int | None) -> None:
    watch = Watch()
    results = run(func, watch, max_concurrency=bound)
    assert watch.alive > NUM_CALLS
    watch(results[0])
    del results
    assert watch.alive == 0


@FUNCTIONS
def test_everything_goes_with_the_results_after_a_backward(func: Any) -> None:
    watch = Watch()
    results = run(func, watch)
    torch.stack(results).sum().backward()
    del results
    assert watch.alive == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_but_the_results(mode: Callable[[], Any]) -> None:
    watch = Watch()
    with mode():
        results = run(Keeps, watch)
    assert watch.alive == 0
    assert len(results) == NUM_CALLS


class Counted:
    """Lives exactly as long as the saved tensor that it was packed with."""

    live = 0
    _lock = threading.Lock()

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        with self._lock:
            Counted.live += 1

    def __del__(self) -> None:
        with self._lock:
            Counted.live -= 1

    @classmethod
    def saved_tensors(cls) -> saved_tensors_hooks:
        return saved_tensors_hooks(cls, lambda packed: packed.tensor)


def test_the_saved_tensors_go_with_the_backward_though_the_results_stay() -> None:
    x = torch.ones(3, requires_grad=True)
    with Counted.saved_tensors():
        results = map_with_parallel_backward(Keeps, *[(x, Watch())] * NUM_CALLS)
    loss = torch.stack(results).sum()
    assert Counted.live == 3 * NUM_CALLS
    loss.backward(retain_graph=True)
    assert Counted.live == 3 * NUM_CALLS
    loss.backward()
    assert Counted.live == 0
    assert len(results) == NUM_CALLS


def test_each_calls_saved_tensors_go_as_soon_as_its_own_backward_is_done() -> None:
    """Call 0 waits until the others are done, and then sees that only its own tensor is left."""
    num_entered, unpacked = threading.Semaphore(0), Watch()
    seen: list[int] = []

    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
            ctx.index = index
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            unpacked(x)
            if ctx.index == 0:
                for _ in range(NUM_CALLS - 1):
                    assert num_entered.acquire(timeout=PATIENCE_S)
                pause, patience = threading.Event(), 6000  # the last one is on its way out
                while unpacked.alive > 1 and patience:
                    patience -= pause.wait(0.01) or 1
                seen.append(unpacked.alive)
            num_entered.release()
            return grad * 2 * (x / x), None

    x = torch.ones(3, requires_grad=True)
    results = map_with_parallel_backward(Saves, *[(x * 1, i) for i in range(NUM_CALLS)])
    torch.stack(results).sum().backward()
    assert seen == [1]
    assert unpacked.alive == 0


class Splits(Function):
    """Its backward makes all gradients at once."""

    watch: Watch

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        return torch.stack(xs).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple([Splits.watch(grad + i) for i in range(NUM_CALLS)])


class Counts(Function):
    """Its backward notes how many gradients of all calls are there."""

    alive: list[int]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counts.alive.append(Splits.watch.alive)
        return torch.ones(3)


def of_functions(xs: list[Tensor]) -> Any:
    return map_with_parallel_backward(Counts, *[(x,) for x in xs], max_concurrency=1)


def of_modules(xs: list[Tensor]) -> Any:
    return parallel_apply([lambda x: Counts.apply(x)] * NUM_CALLS, xs, max_concurrency=1)


@pytest.mark.parametrize("call_all", [of_functions, of_modules])
@pytest.mark.parametrize("is_apart", [False, True])
def test_the_gradient_that_a_call_gets_goes_when_its_backward_is_done(
    call_all: Callable[[list[Tensor]], Any], is_apart: bool
) -> None:
    xs: list[Tensor] = [torch.ones(3, requires_grad=True) for _ in range(NUM_CALLS)]
    if is_apart:
        xs = [copied(x) for x in xs]
    Splits.watch, Counts.alive = Watch(), []
    Splits.apply(*call_all(xs)).sum().backward()  # type: ignore[no-untyped-call]
    assert Counts.alive == list(range(NUM_CALLS, 0, -1))


def test_a_call_that_needs_no_gradient_saves_nothing() -> None:
    packed = []
    xs = [torch.ones(3, requires_grad=i == 1) for i in range(NUM_CALLS)]
    with saved_tensors_hooks(lambda tensor: packed.append(tensor), lambda _: torch.ones(3)):
        map_with_parallel_backward(SavesInput, *[(x,) for x in xs])
    assert [tensor is xs[1] or tensor.data_ptr() == xs[1].data_ptr() for tensor in packed] == [True]


def test_a_modules_activations_go_with_its_outputs() -> None:
    watch = Watch()

    def call(x: Tensor) -> Tensor:
        return watch(watch(x.sin()) * watch(x.cos())) * 2

    inputs = [watch(torch.ones(3, requires_grad=True)) for _ in range(NUM_CALLS)]
    outputs = parallel_apply([call] * NUM_CALLS, [(x,) for x in inputs])
    watch(outputs[0])
    del inputs, outputs
    assert watch.alive == 0


def test_a_modules_activations_go_with_the_backward_though_the_outputs_stay() -> None:
    modules = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(NUM_CALLS)]
    with Counted.saved_tensors():
        outputs = parallel_apply(modules, [(torch.ones(2, 3, requires_grad=True),) for _ in modules])
    assert Counted.live > NUM_CALLS
    torch.stack(outputs).sum().backward()
    assert Counted.live == 0
    assert len(outputs) == NUM_CALLS


def test_a_modules_inputs_go_with_the_backward_though_the_outputs_stay() -> None:
    watch = Watch()
    calls = [nn.Linear(3, 3).__call__ for _ in range(NUM_CALLS)]
    inputs = [watch(torch.ones(2, 3, requires_grad=True) * 2) for _ in calls]
    outputs = parallel_apply(calls, inputs)
    del inputs
    loss = torch.stack(outputs).sum()
    loss.backward(retain_graph=True)
    assert watch.alive == NUM_CALLS
    loss.backward()
    assert watch.alive == 0
    assert len(outputs) == NUM_CALLS


def test_recompute_keeps_only_the_inputs() -> None:
    watch = Watch()

    def call(x: Tensor) -> Tensor:
        return watch(watch(x.sin()) * watch(x.cos())).sum()

    x = torch.ones(3, requires_grad=True)
    outputs = parallel_apply([call] * NUM_CALLS, [(x,)] * NUM_CALLS, recompute=True)
    assert watch.alive == 0
    torch.stack(outputs).sum().backward()
    assert watch.alive == 0


def test_an_isolated_call_keeps_its_tensors_as_long_as_its_context() -> None:
    watch = Watch()
    ctx, result = run_isolated_forward(Keeps, watch(torch.ones(3, requires_grad=True)), watch)
    run_isolated_backward(Keeps, ctx, torch.ones(3))
    watch(result)
    del ctx, result
    assert watch.alive == 0


def test_an_isolated_call_holds_nothing_that_hooks_have_put_elsewhere() -> None:
    watch = Watch()
    with saved_tensors_hooks(lambda tensor: tensor.tolist(), torch.tensor):
        ctx, _ = run_isolated_forward(Keeps, torch.ones(3, requires_grad=True), watch)
    assert watch.alive == 1  # the context
    assert torch.equal(run_isolated_backward(Keeps, ctx, torch.ones(3))[0], torch.ones(3).cos())  # type: ignore[arg-type]


def test_idle_workers_hold_nothing() -> None:
    watch = Watch()
    barrier = threading.Barrier(NUM_CALLS)

    class MeetsWithPayload(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, payload: Tensor) -> Tensor:
            barrier.wait(PATIENCE_S)
            return x + payload

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            barrier.wait(PATIENCE_S)
            return grad, None

    inputs = [watch(torch.ones(3, requires_grad=True)) for _ in range(NUM_CALLS)]
    results = map_with_parallel_backward(MeetsWithPayload, *[(x, watch(torch.ones(3))) for x in inputs])
    torch.stack(results).sum().backward()
    del inputs, results
    assert watch.alive == 0


@pytest.mark.parametrize("is_apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("kind", ["functions", "modules"])
def test_passes_leave_nothing_for_the_collector(kind: str, is_apart: bool) -> None:
    """Neither do backwards through some results, and those that fail."""

    def one_pass() -> None:
        xs = [leaf(i) for i in range(3)]
        inputs = [(copied(x) if is_apart else x,) for x in xs]
        if kind == "functions":
            results = list(map_with_parallel_backward(SavesInput, *inputs))
        else:
            results = parallel_apply([lambda x: x.sin() * x] * 3, inputs)
        results[0].sum().backward(retain_graph=True)
        handle = results[1].register_hook(lambda grad: grad[5])
        with pytest.raises(IndexError):
            sum(result.sum() for result in results).backward(retain_graph=True)
        handle.remove()
        sum(result.sum() for result in results).backward()
        Copies.ran.clear()

    def num_objects() -> int:
        for _ in range(20):
            one_pass()
        return len(gc.get_objects())

    counts = [num_objects() for _ in range(4)]  # what others of the process do counts too, but not each time
    growth = min(after - before for before, after in itertools.pairwise(counts))
    assert growth < 20, f"something is left by each pass: {counts}"
