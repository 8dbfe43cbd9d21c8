"""Gradients that are added to those of earlier backwards: the calls that compute them add them.

The numbers are those of a plain loop, who asked for what decides who gets it, and each weight has its gradient when its
call is done, so that those of all calls are never in memory together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from moe_autograd import parallel_apply
from moe_autograd.autograd.joining import accumulating
from tests.support import module_programs
from tests.support.accumulating import WAYS_TO_ASK, ask_for_some
from tests.support.comparing_modules import ORDER, PROGRAMS, assert_same_modules_program, name_of
from tests.support.comparison import MapFunction, assert_same, loss_of, one_after_another
from tests.support.module_programs import leaves, parameters, seeded
from tests.support.subprocesses import assert_prints


@pytest.fixture(autouse=True)
def no_leaf_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "LEAST_ADDED", 1)


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_program_says_the_same_where_there_are_gradients_before(
    program: Callable[[MapFunction], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_programs, "has_grads_before", True)
    assert_same_modules_program(program)


def train(apply: MapFunction, prepare: Callable[[list[nn.Module]], Any] | None = None) -> Any:
    """Go backward through three micro-batches; return the gradients after each, and what `prepare` returned."""
    modules, found = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))), []
    seen = None if prepare is None else prepare(modules)
    for factor in (1.0, 2.0, 3.0):
        outputs = apply(modules, [(factor * x,) for x in leaves()])
        loss_of(outputs).backward()
        found.append([p.grad.clone() for p in parameters(modules) if p.grad is not None])
    return found, seen


@pytest.mark.parametrize("max_concurrency", [1, 2, None])
def test_micro_batches_add_up_to_the_same_bits(max_concurrency: int | None) -> None:
    def mapped(*args: Any) -> Any:
        return parallel_apply(*args, max_concurrency=max_concurrency)

    assert_same(train(one_after_another), train(mapped), tolerance=0.0)


def test_the_gradient_stays_the_same_tensor() -> None:
    def prepare(modules: list[nn.Module]) -> list[Tensor]:
        for p in parameters(modules):
            p.grad = torch.zeros_like(p)
        return [p.grad for p in parameters(modules)]  # type: ignore[misc]

    found, kept = train(parallel_apply, prepare)
    assert_same(found[-1], kept)


class Looks(Function):
    """Calls `look` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return grad, None


def test_a_weight_has_its_gradient_when_its_call_is_done_and_the_new_one_is_gone() -> None:
    """With one call at a time: those of all calls are never there together."""
    modules = seeded(lambda: nn.Linear(4, 4, bias=False))
    for p in parameters(modules):
        p.grad = torch.zeros_like(p)
    new: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []
    num_done: list[int] = []

    class Remembers(Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grad = grad.clone()
            new.append(weakref.ref(grad))
            return grad

    def look() -> None:
        num_alive.append(sum(grad() is not None for grad in new))
        num_done.append(sum(bool(p.grad.any()) for p in parameters(modules) if p.grad is not None))

    def call(module: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = Looks.apply(x @ Remembers.apply(module.weight), look)  # type: ignore[no-untyped-call]
        return result

    calls = [lambda x, module=module: call(module, x) for module in modules]
    loss_of(parallel_apply(calls, [(x,) for x in leaves()], max_concurrency=1)).backward()
    assert num_done == [0, 1, 2, 3]
    assert num_alive == [0, 0, 0, 0]


def test_hooks_get_whole_gradients_once() -> None:
    def prepare(modules: list[nn.Module]) -> list[Any]:
        seen: list[Any] = []
        first, second, third, *_ = parameters(modules)
        first.register_hook(lambda grad: seen.append(("hook", grad.clone())))
        second.register_post_accumulate_grad_hook(
            lambda p: seen.append(("after", None if p.grad is None else p.grad.clone()))
        )
        third.register_hook(lambda grad: 2 * grad)
        return seen

    native, mapped = train(one_after_another, prepare), train(parallel_apply, prepare)
    assert_same(native[0], mapped[0])
    for kind in ("hook", "after"):
        assert_same([x for x in native[1] if x[0] == kind], [x for x in mapped[1] if x[0] == kind])


@pytest.mark.parametrize("kind", ["register_prehook", "register_hook"])
def test_hooks_at_the_node_of_a_weight_get_its_gradient(kind: str) -> None:
    def prepare(modules: list[nn.Module]) -> list[Any]:
        seen: list[Any] = []
        nodes = [get_gradient_edge(p).node for p in parameters(modules)]

        def halve(grads: Any) -> Any:
            return tuple(None if grad is None else grad / 2 for grad in grads)

        def note(grad_inputs: Any, grad_outputs: Any) -> None:
            seen.append([grad.clone() for grad in grad_outputs])

        for node in nodes:
            getattr(node, kind)(halve if kind == "register_prehook" else note)
        return [nodes, seen]

    native, mapped = train(one_after_another, prepare), train(parallel_apply, prepare)
    assert_same(native[0], mapped[0], tolerance=0.0)
    assert_same(sorted(map(str, native[1][1])), sorted(map(str, mapped[1][1])))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_only_who_is_asked_for_a_gradient_gets_one(way: str) -> None:
    def run(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), leaves()
        weights = parameters(modules)
        for p in weights:
            p.grad = torch.full_like(p, 0.5)
        loss = loss_of(apply(modules, [(x,) for x in xs]))
        return ask_for_some(way, loss, weights, xs)

    assert_same(run(one_after_another), run(parallel_apply), tolerance=ORDER)


def test_a_weight_of_several_calls_and_of_others_gets_the_sum_in_the_same_bits_each_time() -> None:
    def run(apply: MapFunction) -> Any:
        (shared, *own), xs = seeded(lambda: nn.Linear(4, 4)), leaves(6)
        modules = [nn.Sequential(nn.Tanh(), one) for one in (shared, own[0], shared, own[1], shared, own[2])]
        for factor in (1.0, 3.0, 0.7):
            outputs = apply(modules, [(factor * x,) for x in xs])
            loss_of([*outputs, shared(xs[0]), own[0](xs[1])]).backward()
        return [p.grad for p in parameters([shared, *own])]

    first = run(parallel_apply)
    assert_same(run(one_after_another), first, tolerance=ORDER)
    for max_concurrency in (1, 2, 16, None):
        again = run(lambda *args, bound=max_concurrency: parallel_apply(*args, max_concurrency=bound))
        assert_same(first, again, tolerance=0.0)


@pytest.mark.parametrize("num_calls", [2, 3, 5])
def test_a_weight_of_several_calls_gets_the_sum_of_a_loop_to_the_same_bits(num_calls: int) -> None:
    def run(apply: MapFunction) -> Any:
        (shared,) = seeded(lambda: nn.Linear(4, 4), 1)
        for factor in (1.0, 3.0, 0.7):
            loss_of(apply([shared] * num_calls, [(factor * x,) for x in leaves(num_calls)])).backward()
        return [p.grad for p in parameters([shared])]

    expected = run(one_after_another)
    for _ in range(5):
        assert_same(expected, run(parallel_apply), tolerance=0.0)


def test_maps_in_calls_of_maps() -> None:
    def run(apply: MapFunction) -> Any:
        layers = [seeded(lambda: nn.Linear(4, 4), 2) for _ in range(2)]

        def layer(modules: list[nn.Module], x: Tensor) -> Tensor:
            return torch.stack(tuple(apply(modules, [(x,)] * 2))).sum(0)

        for _ in range(2):
            calls = [lambda x, modules=modules: layer(modules, x) for modules in layers]
            loss_of(apply(calls, [(x,) for x in leaves(2)])).backward()
        return [p.grad for modules in layers for p in parameters(modules)]

    assert_same(run(one_after_another), run(parallel_apply), tolerance=ORDER)


def test_sparse_gradients() -> None:
    def run(apply: MapFunction) -> Any:
        modules = seeded(lambda: nn.Embedding(5, 3, sparse=True))
        modules[1].weight.grad = torch.ones_like(modules[1].weight)
        tokens = [torch.tensor([i, i, 4]) for i in range(4)]
        for _ in range(2):
            loss_of(apply(modules, [(t,) for t in tokens])).backward()
        return [p.grad.is_sparse for p in parameters(modules)], [
            p.grad.to_dense() for p in parameters(modules)
        ]

    assert_same(run(one_after_another), run(parallel_apply))


def test_after_ctrl_c_a_call_that_is_left_to_end_by_itself_adds_nothing() -> None:
    assert_prints(
        """
    import torch
    from torch import nn
    from moe_autograd import parallel_apply
    from tests.equivalence.test_accumulating import Looks
    from tests.support.accumulating import InterruptedBackward

    interrupted = InterruptedBackward()

    class Watched(nn.Linear):
        def forward(self, x):
            return Looks.apply(super().forward(x), interrupted.look)

    experts = [Watched(4, 4) for _ in range(2)]
    for expert in experts:
        for p in expert.parameters():
            p.grad = torch.zeros_like(p)
    print(interrupted.run(parallel_apply(experts, [(torch.ones(2, 4),)] * 2)))
    print(sum(p.grad.abs().sum().item() for expert in experts for p in expert.parameters()))
    """,
        "True 0.0",
    )


def test_what_is_added_to_a_dense_gradient_is_not_added_to_a_sparse_one() -> None:
    """Both are made of the gradient that came to the call."""

    def run(apply: Any) -> list[Tensor]:
        embedding = nn.Embedding.from_pretrained(torch.ones(3, 4), freeze=False, sparse=True)
        x = torch.zeros(3, 4, requires_grad=True)
        (y,) = apply([lambda t: embedding(torch.arange(3)) + t], [(x,)])
        y.exp().sum().backward()
        x.sin().sum().backward()
        assert x.grad is not None
        assert embedding.weight.grad is not None
        return [x.grad, embedding.weight.grad.to_dense()]

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))
