"""Backwards one after the other, each through other results of one map, as through the calls of a loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import natively
from tests.support.functions_context import SavesInput, SavesOutput

NUM_CALLS = 3


class Doubles(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def inputs() -> list[Tensor]:
    return [torch.arange(1.0 + i, 4.0 + i, dtype=torch.float64).requires_grad_() for i in range(NUM_CALLS)]


def outcome(run: Callable[[], object]) -> tuple[str, object]:
    try:
        return "returned", run()
    except RuntimeError as error:
        return type(error).__name__, str(error).split("(")[0]


def both(run: Callable[[Any], object]) -> tuple[tuple[str, object], tuple[str, object]]:
    return outcome(partial(run, natively)), outcome(partial(run, map_with_parallel_backward))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 0), (1, 1), (0, 1, 2, 1)])
@pytest.mark.parametrize("func", [Doubles, SavesInput, SavesOutput])
def test_one_backward_for_each_result(func: type[Function], order: Sequence[int]) -> None:
    """A call that is reached twice raises where it needs what it has saved, and nowhere else."""

    def run(apply: Any) -> list[Any]:
        xs = inputs()
        ys = apply(func, *[(x,) for x in xs])
        for i in order:
            ys[i].sum().backward()
        return [x.grad if x.grad is None else x.grad.tolist() for x in xs]

    expected, found = both(run)
    assert found == expected


@pytest.mark.parametrize("retained", [(True, False, False), (False, True, False), (True, True, False)])
@pytest.mark.parametrize("func", [SavesInput, SavesOutput])
def test_graphs_that_are_retained_in_some_of_them(func: type[Function], retained: Sequence[bool]) -> None:
    def run(apply: Any) -> list[Any]:
        xs = inputs()
        ys = apply(func, *[(x,) for x in xs])
        for i, retain_graph in zip((0, 1, 1), retained, strict=True):
            ys[i].sum().backward(retain_graph=retain_graph)
        (ys[0] + ys[2]).sum().backward()
        return [x.grad.tolist() for x in xs]

    expected, found = both(run)
    assert found == expected


@pytest.mark.parametrize("func", [Doubles, SavesInput])
def test_backwards_that_ask_for_some_inputs(func: type[Function]) -> None:
    def run(apply: Any) -> list[Any]:
        xs = inputs()
        ys = apply(func, *[(x,) for x in xs])
        return [torch.autograd.grad([y.sum() for y in ys], x)[0].tolist() for x in xs]

    expected, found = both(run)
    assert found == expected == ("returned", run(natively))


def test_a_change_in_place_between_them_raises_as_in_a_loop() -> None:
    def run(apply: Any) -> None:
        xs = inputs()
        ys = apply(SavesInput, *[(x,) for x in xs])
        ys[0].sum().backward()
        with torch.no_grad():
            xs[1].mul_(2)
        ys[2].sum().backward()
        ys[1].sum().backward()

    expected, found = both(run)
    assert found == expected
    assert "modified by an inplace operation" in str(found)


def test_second_derivatives_in_the_later_one() -> None:
    def run(apply: Any) -> list[float]:
        xs = inputs()
        ys = apply(SavesInput, *[(x,) for x in xs])
        ys[0].sum().backward()
        (grad,) = torch.autograd.grad((ys[1] ** 2).sum(), xs[1], create_graph=True)
        found: list[float] = torch.autograd.grad(grad.sum(), xs[1])[0].tolist()
        return found

    expected, found = both(run)
    assert found == expected


def test_second_derivatives_through_a_result_that_was_saved_need_the_graph() -> None:
    """Never a silently wrong one."""
    xs = inputs()
    ys = map_with_parallel_backward(SavesOutput, *[(x,) for x in xs])
    ys[0].sum().backward()
    with pytest.raises(RuntimeError, match="expected retain_graph=True in an earlier backward"):
        torch.autograd.grad(ys[1].sum(), xs[1], create_graph=True)
    assert torch.equal(torch.autograd.grad(ys[1].sum(), xs[1])[0], xs[1].exp())


class Tower(nn.Sequential):
    """Large enough for a thread."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.0


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in turn": {"max_concurrency": 1},
    "recomputed": {"recompute": True},
    "deferred": {"defer_weight_grads": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_ensemble_whose_members_have_losses_and_optimizers_of_their_own(way: str) -> None:
    def train(apply: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        members = [Tower().double() for _ in range(NUM_CALLS)]
        optimizers = [torch.optim.Adam(member.parameters(), lr=0.1) for member in members]
        x = torch.randn(16, 64, dtype=torch.float64)
        for step in range(4):
            outputs = apply(members, [x] * NUM_CALLS)
            for i in range(NUM_CALLS) if step % 2 else reversed(range(NUM_CALLS)):
                optimizers[i].zero_grad()
                (outputs[i] - i).square().mean().backward()
                optimizers[i].step()
        return [parameter.detach() for member in members for parameter in member.parameters()]

    def loop(modules: Sequence[nn.Module], xs: Sequence[Tensor]) -> list[Tensor]:
        return [module(x) for module, x in zip(modules, xs, strict=True)]

    for expected, found in zip(train(loop), train(partial(parallel_apply, **WAYS[way])), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_members_whose_gradients_are_asked_for_one_after_the_other(way: str) -> None:
    members = [Tower().double() for _ in range(NUM_CALLS)]
    x = torch.randn(16, 64, dtype=torch.float64)
    expected = [torch.autograd.grad(member(x).sum(), [*member.parameters()]) for member in members]
    outputs = parallel_apply(members, [x] * NUM_CALLS, **WAYS[way])
    for member, grads in zip(members, expected, strict=True):
        found = torch.autograd.grad([output.sum() for output in outputs], [*member.parameters()])
        torch.testing.assert_close(found, grads, rtol=1e-12, atol=1e-12)


def test_a_member_that_was_reached_raises_at_its_second_backward() -> None:
    outputs = parallel_apply([Tower() for _ in range(NUM_CALLS)], [torch.randn(16, 64)] * NUM_CALLS)
    outputs[1].sum().backward()
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        outputs[1].sum().backward()
    outputs[2].sum().backward()


def test_saved_tensor_hooks_see_each_tensor_once() -> None:
    packed, unpacked = list[int](), list[int]()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor.clone()

    xs = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        ys = map_with_parallel_backward(SavesInput, *[(x,) for x in xs])
    for y in ys:
        y.sum().backward()
    assert len(packed) == len(unpacked) == NUM_CALLS
    assert [x.grad.tolist() for x in xs] == [(3 * x**2).tolist() for x in xs]  # type: ignore[union-attr]


class Cubes(Function):
    """Saves a tensor that nobody else has."""

    saved: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        squares = x * x
        Cubes.saved.append(weakref.ref(squares))
        ctx.save_for_backward(squares)
        return squares * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0]


@pytest.mark.usefixtures("no_gc")
def test_what_is_left_goes_with_its_call_or_with_the_graph() -> None:
    Cubes.saved.clear()
    xs = inputs()
    ys = list(map_with_parallel_backward(Cubes, *[(x,) for x in xs], max_concurrency=1))
    for num_reached in (1, 2):
        ys[num_reached - 1].sum().backward()
        alive = [saved() is not None for saved in Cubes.saved]
        assert alive == [False] * num_reached + [True] * (NUM_CALLS - num_reached)
    ys.clear()
    assert [saved() for saved in Cubes.saved] == [None] * NUM_CALLS


@pytest.mark.usefixtures("no_gc")
def test_a_result_that_was_saved_and_is_left_is_in_no_cycle() -> None:
    xs = inputs()
    ys = list(map_with_parallel_backward(SavesOutput, *[(x,) for x in xs]))
    results = [weakref.ref(y) for y in ys]
    ys[0].sum().backward()
    ys.clear()
    assert [result() for result in results] == [None] * NUM_CALLS


def loop(modules: Sequence[nn.Module], xs: Sequence[Tensor]) -> list[Any]:
    return [module(x) for module, x in zip(modules, xs, strict=True)]


class Twins(nn.Module):
    """Two networks that share nothing but their input; as the two critics of TD3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tower().double(), Tower().double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_results_of_one_call_that_share_no_graph(way: str, order: Sequence[int]) -> None:
    """Either may be used first, and each once."""
    members = [Twins() for _ in range(NUM_CALLS)]
    xs = [torch.randn(4, 64, dtype=torch.float64, requires_grad=True) for _ in range(NUM_CALLS)]

    def train(apply: Callable[..., Sequence[Sequence[Tensor]]]) -> list[object]:
        leaves = [*xs, *[parameter for member in members for parameter in member.parameters()]]
        outputs = apply(members, xs)
        found: list[object] = []
        for i in order:
            found.append(outcome(sum(output[i] for output in outputs).sum().backward))  # type: ignore[union-attr]
            found += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    expected, found = train(loop), train(partial(parallel_apply, **WAYS[way]))
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
        else:
            assert one == other
    assert "a second time" in str(found)


def test_a_graph_that_was_freed_is_not_asked_for_by_those_who_do_not_need_it() -> None:
    def run(apply: Any) -> list[Tensor | None]:
        xs = inputs()
        ys = apply(SavesInput, *[(x,) for x in xs])
        torch.autograd.backward([y.sum() for y in ys])
        return list(torch.autograd.grad(ys[0].sum(), xs[1], allow_unused=True))

    expected, found = both(run)
    assert found == expected == ("returned", [None])


class Passes(nn.Module):
    """Returns its input as well, by another name."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), x.exp()


def test_second_derivatives_in_the_later_one_of_modules_that_return_views() -> None:
    """They compute with their graphs alone; views are saved to see that they are changed."""

    def run(apply: Callable[..., Sequence[Sequence[Tensor]]]) -> list[float]:
        xs = inputs()
        ys = apply([Passes() for _ in xs], xs)
        ys[0][1].sum().backward()
        (grad,) = torch.autograd.grad((ys[1][0] * ys[1][1]).sum(), xs[1], create_graph=True)
        found: list[float] = torch.autograd.grad(grad.sum(), xs[1])[0].tolist()
        return found

    assert outcome(partial(run, parallel_apply)) == outcome(partial(run, loop))


def test_two_threads_may_take_what_two_calls_have_saved() -> None:
    """One unpacks, which takes a while, and the other one lets the node forget."""
    unpacks, is_done = threading.Event(), threading.Event()

    def unpack(tensor: Tensor) -> Tensor:
        if not unpacks.is_set():
            unpacks.set()
            is_done.wait(0.2)
        return tensor.clone()

    xs = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        ys = map_with_parallel_backward(SavesInput, *[(x,) for x in xs])

    def second() -> None:
        unpacks.wait()
        ys[1].sum().backward()
        is_done.set()

    thread = threading.Thread(target=second)
    thread.start()
    ys[0].sum().backward()
    thread.join()
    ys[2].sum().backward()
    assert [x.grad.tolist() for x in xs] == [(3 * x**2).tolist() for x in xs]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_backward_after_another_one_wants_the_graph_retained() -> None:
    """Also where compiled autograd has code for a node that saved nothing, which it does not tell from a freed one."""

    def run(func: type[Function], retain_graph: bool) -> list[Tensor | None]:
        xs = inputs()
        ys = map_with_parallel_backward(func, *[(x,) for x in xs])
        for y in ys[:2]:
            with compiled_autograd._enable(lambda graph: graph):
                y.sum().backward(retain_graph=retain_graph)
        return [x.grad for x in xs]

    run(Doubles, retain_graph=True)
    assert run(SavesInput, retain_graph=True)[2] is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a second time"):
            run(SavesInput, retain_graph=False)
