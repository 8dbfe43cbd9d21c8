"""docs/limits.md, point by point: what it says is what happens. A limit that has gone leaves the page as well."""

from __future__ import annotations

import contextvars
import gc
import os
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import UnsupportedTransformError
from tests.support.limits_page import in_call, in_loop, leaf, of
from tests.support.offloading import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("nothing_is_small")


@of("inside `torch.func` transforms, forward-mode differentiation, `torch.jit.trace` or `torch.export`")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_transforms() -> None:
    def total(x: Tensor) -> Tensor:
        return in_call(torch.sin, x).sum()

    for transform in (torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.jit.trace(f, x)):
        with pytest.raises(UnsupportedTransformError):
            transform(total)(torch.ones(2))
    assert in_call(torch.func.grad(lambda x: x.sin().sum()), torch.zeros(2)).tolist() == [1.0, 1.0]


@of("forked on another thread than the map's own, it prints that and exits with 1")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_goes_on_behind_its_call(capfd: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    both_run, caller = threading.Barrier(2), threading.current_thread()

    def forks(x: Tensor) -> Tensor:
        both_run.wait(60)
        if threading.current_thread() is not caller and (child := os.fork()):
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return x

    parallel_apply([forks, forks], [(leaf(),)] * 2)
    assert codes == [1]
    assert "expected to end in the call that it was forked in" in capfd.readouterr().err


@of(
    "where modules have them otherwise: in a list, an object, a hook, a `partial`, or by `object.__setattr__`"
)
@pytest.mark.parametrize(("is_hidden", "expected"), [(False, 2.0), (True, 1.0)])
def test_a_part_that_calls_share_in_a_list(is_hidden: bool, expected: float) -> None:
    norm, is_through = nn.BatchNorm1d(1, momentum=1.0), threading.Event()

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [norm] if is_hidden else nn.ModuleList([norm])

        def forward(self, x: Tensor) -> Tensor:
            if is_hidden and x[0, 0] == 1:
                assert is_through.wait(60)
            y: Tensor = self.held[0](x)
            is_through.set()
            return y

    parallel_apply([Expert(), Expert()], [(torch.full((2, 1), value),) for value in (1.0, 2.0)])
    assert norm.running_mean is not None
    assert norm.running_mean.item() == expected


@of("and where the backward of a module's call, or a hook there, draws from it")
@of("where functions of `map_with_parallel_backward` reach it otherwise than as an argument")
def test_generators_that_calls_share_unseen() -> None:
    generator, both_are_here = torch.Generator(), threading.Barrier(2)

    def draws(x: Tensor) -> Tensor:
        both_are_here.wait(60)
        return x * torch.rand(x.shape, generator=generator)

    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return draws(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def draws_in_backward(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(draws)
        return y

    map_with_parallel_backward(Draws, (leaf(),), (leaf(),))
    first, second = parallel_apply([draws_in_backward] * 2, [(leaf(),), (leaf(),)])
    (first + second).sum().backward()


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


@of(
    "Under autocast it is cast for each use; a loop casts a leaf once and adds up its gradients in the lower precision"
)
def test_inputs_under_autocast() -> None:
    def twice(x: Tensor) -> Tensor:
        return x @ torch.ones(2, 1) + x @ torch.full((2, 1), 2.0**-9)  # in bfloat16 the sum of both is 1

    grads = []
    for call in (twice, lambda x: in_call(twice, x)):
        x = leaf()
        with torch.autocast("cpu"):
            y = call(x)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        grads.append(x.grad[0].item())
    assert grads == [1.0, 1.0 + 2.0**-9]


@of("(`unsqueeze_`, `t_`), **no history** (`detach_`) **or other memory** (`.data = `) raises")
def test_other_shapes_no_history_and_other_memory() -> None:
    def sets_data(x: Tensor) -> Tensor:
        x.data = torch.zeros(3)
        return x * 2

    for change in (lambda x: x.unsqueeze_(0) * 2, lambda x: x.detach_() * 2, sets_data):
        with pytest.raises(RuntimeError, match="parallel_apply: expected calls to leave the"):
            in_call(change, leaf())


@of("**An argument that holds itself**, or that is lists in lists a thousand deep, raises a `RecursionError`")
def test_arguments_that_hold_themselves() -> None:
    x = leaf()
    own: dict[str, Any] = {"x": x}
    own["own"] = own
    with pytest.raises(RecursionError):
        parallel_apply([lambda given: given["x"] * 3] * 2, [(own,)] * 2)
    box = types.SimpleNamespace(own=own)
    outputs = parallel_apply([lambda given: given.own["x"] * 3] * 2, [(box,)] * 2)
    torch.stack(outputs).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


@of("**Nested tensors** of layout `torch.strided` that require a gradient are refused")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.strided, requires_grad=True)
    with pytest.raises(TypeError, match=r"layout=torch.jagged"):
        in_call(torch.sin, nested)
    assert torch.equal(in_call(torch.sin, nested.detach()).to_padded_tensor(0.0), torch.ones(1, 2, 2).sin())


def _offloaded_expert_says_that_a_weight_has_another_use() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(super().forward(x))
            return kept[0] * 2

    kept: list[Tensor] = []
    (expert,) = OffloadedExperts([Keeps(2, 2)], OPTIMIZERS["sgd"], max_resident_bytes=1000, store="ram")
    y = expert(leaf())
    with pytest.raises(RuntimeError, match="got a gradient of another use"):
        (y + kept[0]).sum().backward()


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
    del kept[:]
    (y,) = parallel_apply([lambda x: (kept.append(x * 2), kept[0].exp())[1]], [(x,)])
    assert torch.equal(torch.autograd.grad(kept[0].sum() + x.sum(), x)[0], torch.ones(2))  # a loop has 3
    assert torch.equal(torch.autograd.grad(y.sum() + kept[0].sum(), kept)[0], torch.ones(2))
    with pytest.raises(RuntimeError, match="to leave a call as its result"):
        torch.autograd.grad(y.sum() + 0 * kept[0].sum(), x)
    _offloaded_expert_says_that_a_weight_has_another_use()
    in_object = in_call(lambda x: types.SimpleNamespace(y=[(x * 2, {"z": deque([x.exp()])})]), x)
    found, (deeper,) = in_object.y[0][0], in_object.y[0][1]["z"]
    assert all(torch.autograd.grad(result.sum(), x)[0] is not None for result in (found, deeper))


@of("**Attributes that you put on a tensor whose class has a `__torch_dispatch__`** (a `DTensor`")
def test_attributes_of_wrappers() -> None:
    def call(x: Any) -> Any:
        y = x.sin()
        y.note = "from the call"
        return y, hasattr(x, "note")

    x: Any = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
    x.note = "for the call"
    y, is_seen = in_call(call, x)
    assert type(y) is TwoTensor
    assert (hasattr(y, "note"), is_seen) == (False, False)
