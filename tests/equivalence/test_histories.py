"""A backward through some results passes through nothing that only other calls' inputs were computed with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.split_backward import split_backward
from tests.support.comparing_modules import PROGRAMS
from tests.support.comparison import (
    MapFunction,
    Raised,
    aliases,
    assert_same,
    assert_same_program,
    attempt,
    loss_of,
    natively,
    one_after_another,
    tensors_in,
)
from tests.support.functions import CATALOGUE, Case, Leaves
from tests.support.functions_numbers import SavesInput
from tests.support.functions_waiting import Calls, Meets
from tests.support.histories import Copies, behind_functions, copied, leaf, modules_behind_functions
from tests.support.module_programs import leaves, parameters, seeded

NUM_CALLS = 4
ORDER = 1e-12  # sums may be added up in another order

every_case = pytest.mark.parametrize("case", CATALOGUE, ids=str)


def assert_same_behind_functions(program: Callable[[MapFunction], Any], tolerance: float = 0.0) -> Any:
    return assert_same_program(
        program,
        native_apply=behind_functions(natively),
        mapped_apply=behind_functions(map_with_parallel_backward),
        tolerance=tolerance,
    )


def call_all(apply: MapFunction, case: Case, make: Leaves) -> Any:
    return apply(case.func, *[case.args(make) for _ in range(NUM_CALLS)])


@every_case
def test_every_function_behind_functions_gives_the_same_results_and_gradients(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results = call_all(apply, case, make)
        loss = loss_of(results)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            loss.backward()
        return results, aliases(results, results), loss, [x.grad for x in make.made]

    assert_same_behind_functions(program, ORDER)


@every_case
def test_every_function_behind_functions_leaves_other_calls_alone(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        loss = loss_of(call_all(apply, case, make)[1])
        Copies.ran.clear()
        if loss.requires_grad:
            loss.backward()
        return len(Copies.ran), [x.grad for x in make.made]

    assert_same_behind_functions(program)


@every_case
def test_every_function_behind_functions_gives_the_same_second_order(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results = call_all(apply, case, make)
        loss = loss_of([tensor**2 for tensor in tensors_in(results[:2]) if tensor.requires_grad])
        wanted = [x for x in make.made if x.requires_grad]
        if not loss.requires_grad:
            return None
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        penalty = loss_of(
            [grad * grad for grad in first if grad is not None and grad.layout is torch.strided]
        )
        if penalty.requires_grad:
            penalty.backward()
        return first, [x.grad for x in wanted]

    assert_same_behind_functions(program, ORDER)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_modules_behind_functions_give_the_same(program: Any) -> None:
    native = attempt(program, modules_behind_functions(one_after_another))
    assert_same(native, attempt(program, modules_behind_functions(parallel_apply)), tolerance=ORDER)


def square(x: Tensor) -> Tensor:
    return x * x


MAPS = {
    "functions": (natively, map_with_parallel_backward, SavesInput),
    "modules": (one_after_another, parallel_apply, [square] * NUM_CALLS),
}
either_map = pytest.mark.parametrize("kind", MAPS)


def assert_same_by_either(kind: str, program: Callable[[Callable[..., Any]], Any]) -> Any:
    """Run a program with what takes inputs and returns results."""
    native, mapped, what = MAPS[kind]

    def calling(apply: Any) -> Callable[..., Any]:
        if kind == "functions":
            return lambda *xs: apply(what, *[(x,) for x in xs])
        return lambda *xs: tuple(apply(what[: len(xs)], [(x,) for x in xs]))

    return assert_same_program(
        program, native_apply=calling(native), mapped_apply=calling(mapped), tolerance=ORDER
    )


@either_map
@pytest.mark.parametrize("reached", [(0,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_functions_upstream_of_other_calls_do_not_run(kind: str, reached: tuple[int, ...]) -> None:
    def program(call: Any) -> Any:
        xs = [leaf(i) for i in range(NUM_CALLS)]
        results = call(*[copied(x, i) for i, x in enumerate(xs)])
        Copies.ran.clear()
        sum(results[i].sum() for i in reached).backward()
        return sorted(Copies.ran), [x.grad for x in xs]

    ran, _ = assert_same_by_either(kind, program)
    assert ran == list(reached)


@either_map
def test_functions_further_upstream_do_not_run(kind: str) -> None:
    def program(call: Any) -> Any:
        xs = [leaf(i) for i in range(NUM_CALLS)]
        results = call(*[(copied(x, i) * 2).sin() for i, x in enumerate(xs)])
        Copies.ran.clear()
        results[2].sum().backward()
        return Copies.ran, [x.grad for x in xs]

    assert assert_same_by_either(kind, program)[0] == [2]


@either_map
def test_what_several_calls_share_upstream_runs_for_each_of_them(kind: str) -> None:
    def program(call: Any) -> Any:
        x, y, z = leaf(1), leaf(2), leaf(3)
        shared, own = copied(x, "shared"), copied(y, "own")
        results = call(shared, shared + own, own * 2, z)
        said = []
        for reached in ([0], [1], [2], [3], [0, 3], [1, 2]):
            Copies.ran.clear()
            loss = sum(results[i].sum() for i in reached)
            grads = torch.autograd.grad(loss, [x, y, z], allow_unused=True, retain_graph=True)
            said.append((sorted(map(str, Copies.ran)), grads))
        return said

    assert not isinstance(assert_same_by_either(kind, program), Raised)


@either_map
def test_every_result_has_a_backward_of_its_own_without_retain_graph(kind: str) -> None:
    def program(call: Any) -> Any:
        xs = [leaf(i) for i in range(NUM_CALLS)]
        for result in call(*[copied(x) for x in xs]):
            result.sum().backward()
        return [x.grad for x in xs]

    assert not isinstance(assert_same_by_either(kind, program), Raised)


@either_map
def test_hooks_of_other_calls_inputs_and_of_leaves_behind_them_are_not_called(kind: str) -> None:
    def program(call: Any) -> Any:
        xs, seen = [leaf(i) for i in range(NUM_CALLS)], []
        inputs = [x * 2 for x in xs]
        inputs[0].register_hook(lambda grad: seen.append(grad.clone()))
        xs[3].register_hook(lambda grad: seen.append(grad + 1))
        results = call(*inputs)
        results[1].sum().backward(retain_graph=True)
        before = len(seen)
        results[0].sum().backward(retain_graph=True)
        results[3].sum().backward()
        return before, seen, [x.grad for x in xs]

    assert assert_same_by_either(kind, program)[0] == 0


@either_map
def test_hooks_after_the_accumulation_of_other_calls_leaves_are_not_called(kind: str) -> None:
    def program(call: Any) -> Any:
        xs, seen = [leaf(i) for i in range(NUM_CALLS)], []
        for i, x in enumerate(xs):
            x.register_post_accumulate_grad_hook(lambda x, i=i: seen.append((i, x.grad.clone())))
        results = call(*[copied(x) for x in xs])
        results[1].sum().backward()
        return seen

    assert len(assert_same_by_either(kind, program)) == 1


@either_map
def test_a_chain_of_maps_behind_functions(kind: str) -> None:
    def program(call: Any) -> Any:
        xs = [leaf(i) for i in range(NUM_CALLS)]
        first = call(*[copied(x, i) for i, x in enumerate(xs)])
        second = call(*[y + i for i, y in enumerate(first)])
        third = call(*[copied(y) for y in second])
        Copies.ran.clear()
        (third[1] + third[3]).sum().backward()
        return [x.grad for x in xs], [name for name in Copies.ran if name is not None]

    assert not isinstance(assert_same_by_either(kind, program), Raised)


@either_map
def test_an_optimizer_that_minds_zeros_moves_only_what_was_reached(kind: str) -> None:
    """AdamW decays the weights whose gradient is zero, and leaves those alone that have none."""

    def program(call: Any) -> Any:
        xs = [leaf(i + 1) for i in range(NUM_CALLS)]
        optimizer = torch.optim.AdamW(xs, lr=0.1, weight_decay=0.5)
        for step in range(6):
            optimizer.zero_grad()
            call(*[copied(x) for x in xs])[step % 3].sum().backward()
            optimizer.step()
        return xs

    assert assert_same_by_either(kind, program)[3].tolist() == [4.0] * 3


@pytest.mark.parametrize("num_calls", [2, 8, 64])
def test_all_backwards_meet_behind_functions(num_calls: int) -> None:
    barrier = threading.Barrier(num_calls)
    xs = [leaf() for _ in range(num_calls)]
    results = map_with_parallel_backward(Meets, *[(copied(x), barrier) for x in xs])
    torch.stack([(result * 2).sin() for result in results]).sum().backward()
    assert all(x.grad is not None for x in xs)


def test_all_backwards_of_each_map_of_a_chain_meet_behind_functions() -> None:
    xs = [leaf() for _ in range(8)]
    values: list[Tensor] = [copied(x) for x in xs]
    for _ in range(3):
        barrier = threading.Barrier(8)
        values = [copied(y) for y in map_with_parallel_backward(Meets, *[(y, barrier) for y in values])]
    torch.stack(values).sum().backward()
    assert all(x.grad.tolist() == [8.0] * 3 for x in xs)


def test_a_graph_that_several_threads_have_made_gives_the_same() -> None:
    """Each thread numbers its nodes by itself: the engine may run them in any order."""

    def program(apply: MapFunction) -> Any:
        xs = [leaf(i) for i in range(NUM_CALLS)]
        copies = [copied(x) for x in xs]
        results: Any = None

        def elsewhere() -> None:
            nonlocal results
            for _ in range(1000):
                copied(xs[0])  # numbers far ahead
            results = apply(SavesInput, *[(x,) for x in copies])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        loss_of([result.sin() for result in results]).backward()
        return [x.grad for x in xs]

    assert not isinstance(assert_same_program(program), Raised)


def test_a_failing_backward_is_named_and_leaves_nothing_for_the_next() -> None:
    xs = [leaf(i) for i in range(NUM_CALLS)]
    errors = [LookupError("once")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    fails: list[Any] = [None, None, fail_once, None]
    results = map_with_parallel_backward(
        Calls, *[(copied(x), None, f) for x, f in zip(xs, fails, strict=True)]
    )
    loss = torch.stack(results).sum()
    with pytest.raises(LookupError, match="once") as caught:
        loss.backward(retain_graph=True)
    assert "call 2 (Calls) of 4" in str(caught.value.__notes__)
    assert [x.grad for x in xs] == [None] * NUM_CALLS
    (results[0] + results[1]).sum().backward()
    assert [x.grad is not None for x in xs] == [True, True, False, False]


def test_a_backward_inside_the_backward_of_the_same_map_is_another_one() -> None:
    class Asks(Function):
        """Differentiates another result of its own map on the way."""

        others: list[Tensor] = []

        @staticmethod
        def forward(ctx: Any, x: Tensor, asks: bool) -> Tensor:
            ctx.asks = asks
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            if ctx.asks:
                with torch.enable_grad():
                    other = Asks.others[1].sum()
                (inner,) = torch.autograd.grad(other, Asks.others[0], retain_graph=True)
                return grad * inner, None
            return grad * 3, None

    def program(apply: MapFunction) -> Any:
        x, y = leaf(1), leaf(2)
        results = apply(Asks, (copied(x), True), (copied(y), False))
        Asks.others = [y, results[1]]
        loss_of(results).backward(retain_graph=True)
        return x.grad, y.grad

    assert not isinstance(assert_same_program(program), Raised)
    Asks.others = []


def test_a_split_backward_through_calls_with_histories_of_their_own() -> None:
    def gradients(apply: MapFunction, *, is_split: bool) -> Any:
        modules, (x, unrelated) = seeded(lambda: nn.Linear(4, 4)), leaves(2)
        weights = [unrelated, *parameters(modules)]
        inputs = [(copied(x),), (x,), (copied(unrelated),), (copied(x * unrelated),)]
        y = sum(apply(modules, inputs)).sum()
        if not is_split:
            return torch.autograd.grad(y, [x, *weights])
        first, pending = split_backward(y, None, x, weights)
        return (*first, *pending.run())

    expected = gradients(one_after_another, is_split=False)
    assert_same(expected, gradients(parallel_apply, is_split=True), tolerance=ORDER)


def test_where_tensors_are_made_by_default_does_not_matter() -> None:
    """The nodes stay on the CPU, with everything they are tied to."""
    xs = [leaf(i) for i in range(NUM_CALLS)]
    copies = [copied(x) for x in xs]
    with torch.device("meta"):
        results = map_with_parallel_backward(SavesInput, *[(x,) for x in copies])
    waiting = results[0].grad_fn.next_functions[0][0]
    assert [metadata.device.type for metadata in waiting._input_metadata] == ["cpu"]
    results[0].sum().backward()
    assert [x.grad is not None for x in xs] == [True, False, False, False]


def nodes_behind(*tensors: Tensor) -> set[str]:
    seen: set[Node] = set()
    to_visit = [tensor.grad_fn for tensor in tensors]
    while to_visit:
        node = to_visit.pop()
        if node is not None and node not in seen:
            seen.add(node)
            to_visit += [below for below, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


@pytest.mark.parametrize(
    ("make", "are_apart"),
    [
        (lambda xs: xs, False),
        (lambda xs: torch.stack(xs).unbind(), False),
        (lambda xs: [copied(torch.stack(xs))[i] for i in range(len(xs))], True),
        (lambda xs: [each[i] for i, each in enumerate([copied(torch.stack(xs))] * len(xs))], False),
        (lambda xs: [x * 2 for x in xs], False),
        (lambda xs: [copied(x) for x in xs], True),
    ],
    ids=["leaves", "parts of one", "of one each", "parts of one copy", "torch's nodes", "functions"],
)
def test_two_nodes_a_history_only_where_it_makes_a_difference(make: Any, are_apart: bool) -> None:
    xs = [leaf(i) for i in range(NUM_CALLS)]
    results = map_with_parallel_backward(SavesInput, *[(x,) for x in make(xs)])
    assert ("_DepartureBackward" in nodes_behind(*results)) is are_apart
