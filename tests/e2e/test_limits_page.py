"""docs/limits.md, point by point: what it says is what happens. A limit that has gone leaves the page as well."""

from __future__ import annotations

import contextvars
import copy
import gc
import io
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter, map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import InvalidCallError, UnsupportedTransformError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import sgd

PAGE = " ".join((Path(__file__).parents[2] / "docs/limits.md").read_text(encoding="utf-8").split())


def of(text: str) -> Callable[[Any], Any]:
    """Say which point of the page a test is about."""
    assert text in PAGE
    return lambda test: test


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class ReturnsNone(Doubles):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


def in_loop(functions: Sequence[Callable[..., Any]], inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for function, args in zip(functions, inputs, strict=True)]


def in_call(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return what one of two calls returns."""
    return parallel_apply([function] * 2, [(x,), (leaf(),)])[0]


@of("inside `torch.func` transforms, forward-mode differentiation, `torch.jit.trace` or `torch.export`")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_transforms() -> None:
    def total(x: Tensor) -> Tensor:
        return in_call(torch.sin, x).sum()

    for transform in (torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.jit.trace(f, x)):
        with pytest.raises(UnsupportedTransformError):
            transform(total)(torch.ones(2))
    assert in_call(torch.func.grad(lambda x: x.sin().sum()), torch.zeros(2)).tolist() == [1.0, 1.0]


@of("a lock which the caller holds waits for ever, also for an `RLock`")
@of("What a call sets in a context variable, and does not reset, its caller may see or not")
@of("`max_concurrency=1` makes all calls and their backwards on the calling thread")
def test_what_belongs_to_a_thread() -> None:
    lock, own = threading.RLock(), contextvars.ContextVar("own", default="")
    has_lock: dict[str, bool] = {}

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, meet: Callable[[], object]) -> Tensor:
            meet()
            own.set(name)
            has_lock[name] = lock.acquire(blocking=False)
            ctx.name = name
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            has_lock[f"{ctx.name}, backward"] = lock.acquire(blocking=False)
            return 2 * grad, None, None

    with lock:
        meet = threading.Barrier(2, timeout=60).wait
        map_with_parallel_backward(Looks, (leaf(), "a", meet), (leaf(), "b", meet))
        assert sorted(has_lock.values()) == [False, True]
        assert has_lock.get(own.get())  # the caller sees what was set on its thread alone
        results = map_with_parallel_backward(Looks, (leaf(), "c", int), (leaf(), "d", int), max_concurrency=1)
        torch.stack(results).sum().backward()
        assert list(has_lock.values())[2:] == [True] * 4


@of("**Random numbers of Python's `random` and of numpy**")
def test_random_numbers_that_are_not_torchs() -> None:
    def draws(has_drawn: threading.Event) -> float:
        number = random.random()
        has_drawn.set()
        return number

    def draws_later(has_drawn: threading.Event) -> float:
        assert has_drawn.wait(60)
        return random.random()

    numbers = []
    for calls in ([draws, draws_later], [draws_later, draws]):
        random.seed(0)
        numbers += parallel_apply(calls, [(threading.Event(),)] * 2)
    assert numbers[:2] == numbers[:1:-1]  # the same ones, of each other's calls


@of("must be taken by nobody else")
def test_changes_in_place() -> None:
    shared = leaf() * 1
    with pytest.raises(RuntimeError, match="expected nobody to take what a call changes in place"):
        parallel_apply([lambda x: x.add_(1), lambda x: x * 2], [(shared,), (shared,)])


@of("but the graph is never freed, where another input was computed from it by an operator that saved it")
def test_changes_of_what_an_input_has_saved() -> None:
    for call, is_kept in ((parallel_apply, True), (in_loop, False)):
        changed = leaf() * 1
        saves_it, reference = changed * changed, weakref.ref(changed)
        results = call([torch.sin, lambda x: x.mul_(2)], [(saves_it,), (changed,)])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()
        del changed, saves_it, results
        gc.collect()
        assert (reference() is not None) == is_kept


@of("(a `chunk` of a weight that was stepped since) raises, used there or not")
def test_views_that_pytorch_refuses() -> None:
    weight = leaf()
    part, _ = weight.chunk(2)
    with torch.no_grad():
        weight.sub_(1)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        parallel_apply([lambda x, part: x * 2], [(leaf(), part)])


@of(
    "not a leaf, without a `.grad`, and no longer a `Parameter`. A list or dict that holds one is a copy there."
)
def test_inputs_are_other_tensors() -> None:
    inputs = [nn.Parameter(torch.ones(2))]
    (returned,) = parallel_apply(
        [lambda xs: (xs[0] * 1, xs[0].is_leaf, type(xs[0]), xs is inputs)], [(inputs,)]
    )
    assert returned[1:] == (False, Tensor, False)


@of("(`unsqueeze_`, `t_`), **no history** (`detach_`) **or other memory** (`.data = `) raises")
def test_other_shapes_no_history_and_other_memory() -> None:
    def sets_data(x: Tensor) -> Tensor:
        x.data = torch.zeros(3)
        return x * 2

    for change in (lambda x: x.unsqueeze_(0) * 2, lambda x: x.detach_() * 2, sets_data):
        with pytest.raises(RuntimeError, match="parallel_apply: expected calls to leave the"):
            in_call(change, leaf())


@of("**Nested tensors** of layout `torch.strided` that require a gradient are refused")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.strided, requires_grad=True)
    with pytest.raises(TypeError, match=r"layout=torch.jagged"):
        in_call(torch.sin, nested)
    assert torch.equal(in_call(torch.sin, nested.detach()).to_padded_tensor(0.0), torch.ones(1, 2, 2).sin())


@of("**A tensor with history that leaves a call otherwise than as its result**")
def test_tensors_that_leave() -> None:
    kept: list[Tensor] = []

    def holds(x: Tensor) -> Any:
        y = x * 2
        return lambda: y

    x = leaf()
    parallel_apply([lambda x: kept.append(x * 2)], [(x,)])
    assert torch.autograd.grad(kept[0].sum(), x, allow_unused=True) == (None,)
    (in_set,), function = in_call(lambda x: {x * 2}, x), in_call(holds, x)
    for tensor in (*kept, in_set, function()):
        with pytest.raises(RuntimeError, match="to leave a call as its result"):
            tensor.sum().backward()
    in_object = in_call(lambda x: types.SimpleNamespace(y=[(x * 2, {"z": deque([x.exp()])})]), x)
    found, (deeper,) = in_object.y[0][0], in_object.y[0][1]["z"]
    assert all(torch.autograd.grad(result.sum(), x)[0] is not None for result in (found, deeper))


@of("**Two backwards, each through some results of one map**")
def test_two_backwards() -> None:
    for make, retain_graph in ((leaf, False), (lambda: leaf() * 2, True), (lambda: leaf().exp(), False)):
        a, b = map_with_parallel_backward(Doubles, (make(),), (make(),))
        assert a.grad_fn is b.grad_fn
        a.sum().backward(retain_graph=retain_graph)
        if make is leaf or retain_graph:
            b.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="a second time"):
            b.sum().backward()


class AppliesWaiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.save_for_backward(x)
        ctx.barrier = barrier
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Waits.apply(grad * ctx.saved_tensors[0], ctx.barrier), None


class Waits(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.barrier = barrier
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.barrier.wait()
        return 2 * grad, None


@of("run one after the other in the backward that comes next, and cannot wait for each other there")
def test_functions_that_a_backward_applies() -> None:
    xs = [leaf(), leaf()]

    def differentiate(timeout_s: float, call: Callable[[Any], Any]) -> None:
        barrier = threading.Barrier(2, timeout=timeout_s)
        results = call([(x, barrier) for x in xs])
        grads = torch.autograd.grad(sum(results).sum(), xs, create_graph=True)
        torch.autograd.grad(sum(grads).sum(), xs)

    with pytest.raises(threading.BrokenBarrierError):
        differentiate(0.1, lambda calls: map_with_parallel_backward(AppliesWaiting, *calls))
    differentiate(60, lambda calls: parallel_apply([AppliesWaiting.apply] * 2, calls))


class Clears(Doubles):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]


@of("which has the tensors again; PyTorch allows one access in all")
def test_saved_tensors_that_are_cleared() -> None:
    x = leaf()
    for y in (Clears.apply(x), *map_with_parallel_backward(Clears, (x,), (x,))):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        if isinstance(y.grad_fn, Clears._backward_cls):
            with pytest.raises(RuntimeError, match="only be accessed once"):
                torch.autograd.grad(y.sum(), x)
        else:
            assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 2 * x)


@of("nor do hooks on its results, which PyTorch calls with `None`")
def test_gradients_that_are_none() -> None:
    for call, expected in ((parallel_apply, []), (in_loop, [None])):
        seen: list[Any] = []
        (result,) = call([torch.sin], [(leaf(),)])
        result.register_hook(seen.append)
        ReturnsNone.apply(result).sum().backward()
        assert seen == expected


@of("or on what it is a view of, put there after the map, or `retain_grad` at any time: **no error**")
def test_what_a_changed_view_is_a_view_of() -> None:
    for call, expected in ((parallel_apply, [0.0, 1.0]), (in_loop, [3.0, 1.0])):
        base = leaf() * 1
        base.retain_grad()
        (result,) = call([lambda t: t.mul_(2) * 3], [(base[:1],)])
        (result.sum() + base[1:].sum()).backward()
        assert base.grad is not None
        assert base.grad.tolist() == expected


@of("an autograd function of yours, a module's full backward hook, compiled code or an expert")
def test_results_of_each_other() -> None:
    a, b = in_call(lambda x: (y := x * 2, Doubles.apply(y)), leaf())
    assert torch.autograd.grad(b.sum(), a, allow_unused=True) == (None,)


@of("in one that is asked by name otherwise than by torch's functions in Python")
def test_results_of_each_other_that_the_engine_itself_is_asked_for() -> None:
    for call, expected in ((parallel_apply, 1.0), (in_loop, 4.0)):
        ((a, b), _) = call([lambda x: (y := x * 2, y * 3)] * 2, [(leaf(),), (leaf(),)])
        arguments = ((a + b).sum(),), (torch.tensor(1.0),), False, False, (a,)
        (grad,) = torch.autograd.Variable._execution_engine.run_backward(
            *arguments, allow_unreachable=True, accumulate_grad=False
        )
        assert grad.tolist() == [expected] * 2


@of("hooks of the call run twice there (**no error** if they do something else the second time)")
def test_between_results_of_each_other() -> None:
    for call, expected in ((parallel_apply, 2), (in_loop, 1)):
        seen: list[Tensor] = []

        def compute(x: Tensor, seen: list[Tensor] = seen) -> tuple[Tensor, Tensor]:
            y = x * 2
            z = y * 3
            z.register_hook(seen.append)
            return y, z * 4

        ((a, b),) = call([compute], [(x := leaf(),)])
        a.retain_grad()
        b.sum().backward()
        assert a.grad is not None
        assert x.grad is not None
        assert (a.grad.tolist(), x.grad.tolist()) == ([12.0, 12.0], [24.0, 24.0])
        assert len(seen) == expected


@of(
    "as does `torch.autograd.grad` for that result: **no error**, where a plain loop has what they made of it"
)
def test_hooks_of_the_call_on_its_result() -> None:
    for call, expected in ((parallel_apply, 1.0), (in_loop, 3.0)):

        def hooked(x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda grad: grad * 3)
            return y

        seen: list[Tensor] = []
        y, _ = call([hooked, hooked], [(leaf(),), (leaf(),)])
        y.register_hook(seen.append)
        assert torch.autograd.grad(y.sum(), y)[0].tolist() == [expected] * 2
        assert seen[0].tolist() == [expected] * 2


@of("**A backward that a call starts itself** ends at the call's inputs")
def test_backwards_within() -> None:
    weight = leaf()
    assert in_call(lambda x: torch.autograd.grad(x.sum(), weight, allow_unused=True)[0], weight * 2) is None


@of("inputs together with what was computed from them raise")
def test_hooks_on_several() -> None:
    def hooks(x: Tensor) -> Tensor:
        y = x * 2
        register_multi_grad_hook((x, y), lambda grads: None, mode="all")
        return y

    with pytest.raises(RuntimeError, match="Register one hook on the inputs and another on the rest"):
        in_call(hooks, leaf())


@of("**`torch.utils.checkpoint(use_reentrant=True)` inside a call of `parallel_apply`** raises")
def test_reentrant_checkpoints() -> None:
    output = in_call(lambda x: checkpoint(torch.sin, x, use_reentrant=True), leaf())
    with pytest.raises(RuntimeError, match="you can either set use_reentrant=False"):
        output.sum().backward()


@pytest.fixture(scope="module")
def experts() -> Iterator[RemoteExperts]:
    with ExpertsServer({"e": nn.Linear(2, 2)}) as server, connect(server.address) as experts:
        yield experts


class Named(Tensor):
    """A subclass, as of who gives dimensions names."""


@of("**Inputs** are positional, dense tensors with finite values")
def test_remote_inputs(experts: RemoteExperts) -> None:
    with pytest.raises(InvalidCallError, match="expected finite values"):
        experts["e"](torch.full((1, 2), -torch.inf))
    with pytest.raises(TypeError, match="expected a dense tensor"):
        experts["e"](torch.ones(1, 2).to_sparse())
    with pytest.raises(TypeError, match="Only positional tensors travel"):
        experts["e"](input=torch.ones(1, 2))
    x = torch.ones(1, 2).as_subclass(Named)
    assert [type(nn.Linear(2, 2)(x)), type(experts["e"](x))] == [Named, Tensor]


@of("**An output without history** on its server (`return y, y.detach()`) requires grad here")
def test_remote_outputs_without_history() -> None:
    class Detaches(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach(), y.argmax(-1)

    with ExpertsServer({"e": Detaches(2, 2)}, optimizer=sgd) as server, connect(server.address) as experts:
        x = torch.ones(3, 2, requires_grad=True)
        _, detached, chosen = experts["e"](x)
        assert (detached.requires_grad, chosen.requires_grad) == (True, False)
        detached.sum().backward()
        assert x.grad is None
        RemoteOptimizer(experts).step()
        assert server.num_updates == {"e": 0}


@of("**A second derivative** raises")
def test_remote_second_derivatives(experts: RemoteExperts) -> None:
    x = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(experts["e"](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad.sum().backward()


@of("**`torch.save(model)`**, or any other pickling of remote experts, raises")
def test_remote_pickling(experts: RemoteExperts) -> None:
    model = nn.Sequential(experts["e"])
    with pytest.raises(TypeError, match=re.escape("`experts.state_dict()` has the weights")):
        torch.save(model, io.BytesIO())
    assert copy.deepcopy(model)[0].hosted.name == "e"
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@of("**Weights** are not in `layer.parameters()` or `layer.state_dict()`")
def test_offloaded_weights() -> None:
    modules = (nn.Linear(2, 2) for _ in range(2))
    with OffloadedExperts(modules, torch.optim.SGD, max_resident_bytes=1000) as experts:
        layer = MixtureOfExperts(TopKRouter(2, 2, top_k=1), list(experts))
        assert [name for name, _ in layer.named_parameters()] == list(layer.state_dict()) == ["router.weight"]
