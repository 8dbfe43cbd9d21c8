"""Results of one call that were computed from each other: how often calls go backward, and in whose company."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_modules_program
from tests.support.comparison import MapFunction, Raised
from tests.support.module_programs import leaves


def loss_of(returned: list[Any]) -> Tensor:
    return torch.stack([t.sin().sum() * i for own in returned for i, t in enumerate(own, 1)]).sum()


def count_backwards_between(
    watch: Callable[[list[Any]], None] = lambda returned: None, by_name: Sequence[int] = ()
) -> list[int]:
    """Return how often each of two calls went backward between its results.

    Args:
        watch: does something to what they returned.
        by_name: the places of what is asked for: the inputs, and the results of the first call.
    """
    counts = [0, 0]

    def call(x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        def count(_: Tensor) -> None:
            counts[index] += 1

        hidden = x.sin()
        between = hidden * 2
        between.register_hook(count)
        return hidden, between.cos()

    xs = leaves(2)
    returned = parallel_apply([call, call], [(x, i) for i, x in enumerate(xs)])
    watch(returned)
    loss = torch.stack([last.sum() + first.sum() for first, last in returned]).sum()
    if by_name:
        torch.autograd.grad(loss, [[*xs, *returned[0]][place] for place in by_name], allow_unused=True)
    else:
        loss.backward()
    return counts


def test_where_nobody_looks_a_call_goes_backward_once() -> None:
    assert count_backwards_between() == [1, 1]
    assert count_backwards_between(lambda returned: returned[0][1].retain_grad()) == [1, 1]
    assert count_backwards_between(by_name=[0, 1]) == [1, 1]
    assert count_backwards_between(by_name=[0, 2]) == [2, 0]
    assert count_backwards_between(by_name=[2]) == [1, 0]
    assert count_backwards_between(lambda returned: returned[1][0].retain_grad()) == [1, 2]


def test_a_map_within_a_call_that_nobody_looks_at_goes_backward_once() -> None:
    """The inner backward asks for where the call ends, by name."""
    counts: list[int] = []

    def outer(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = y.sin()
            between = hidden * 2
            between.register_hook(lambda _: counts.append(1))
            return hidden, between.cos()

        (first, last), _ = parallel_apply([inner, torch.sin], [(x,), (x,)])
        return first + last

    torch.stack(parallel_apply([outer, torch.sin], [(x,) for x in leaves(2)])).sum().backward()
    assert len(counts) == 1


def test_a_second_backward_raises_as_in_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        returned = apply([lambda x: (h := x.sin(), h.exp())] * 2, [(x,) for x in leaves(2)])
        loss_of(returned).backward()
        return torch.autograd.grad(returned[0][1].sum(), returned[0][0])

    said = assert_same_modules_program(program)
    assert isinstance(said, Raised)
    assert "second time" in said.text


def test_what_raises_between_results_is_named() -> None:
    def refuse(grad: Tensor) -> None:
        raise ValueError("refused")

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        between = hidden * 2
        between.register_hook(refuse)
        return hidden, between.cos()

    returned = parallel_apply([torch.sin, call], [(x,) for x in leaves(2)], names=["good", "guilty"])
    with pytest.raises(ValueError, match="refused") as caught:
        torch.autograd.grad(returned[1][1].sum(), returned[1][0])
    (note,) = caught.value.__notes__
    assert note.startswith("parallel_apply, backward: raised by guilty ")


def test_inputs_that_were_changed_since_are_refused_in_second_derivatives() -> None:
    x = leaves(1)[0] * 2
    ((hidden, last), _) = parallel_apply([lambda x: (y := x + 1, y.sin()), lambda x: x + 2], [(x,), (x,)])
    x.mul_(2)
    with pytest.raises(RuntimeError, match="Give the call a clone of it"):
        torch.autograd.grad(last.sum(), hidden, create_graph=True)


def test_graphs_are_freed_with_the_results() -> None:
    class Mark:
        """Lives as long as the graph of a call."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        hidden.grad_fn.metadata["mark"] = mark = Mark()  # type: ignore[union-attr]
        marks.append(weakref.ref(mark))
        return hidden, hidden.cos()

    marks: list[weakref.ref[Mark]] = []
    gc.collect()
    gc.disable()
    try:
        for watch in (lambda t: None, lambda t: t.retain_grad(), lambda t: t.register_hook(torch.sin)):
            returned = parallel_apply([call, call], [(x,) for x in leaves(2)])
            watch(returned[0][0])
            torch.stack([last.sum() for _, last in returned]).sum().backward()
            del returned
            assert [mark() for mark in marks] == [None] * len(marks)
            returned = parallel_apply([call, call], [(x,) for x in leaves(2)])
            watch(returned[0][0])
            del returned
            assert [mark() for mark in marks] == [None] * len(marks)
    finally:
        gc.enable()


def test_a_call_that_retains_what_it_returns_lets_its_caller_see_it() -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        hidden.retain_grad()
        return hidden, hidden.exp()

    def program(apply: MapFunction) -> Any:
        returned = apply([call, call], [(x,) for x in leaves(2)])
        loss_of(returned).backward()
        return [(hidden.retains_grad, hidden.grad, last.grad_fn is not None) for hidden, last in returned]

    assert assert_same_modules_program(program)[0][0]


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def test_hooks_of_a_call_on_results_of_a_map_within() -> None:
    """They were passed over where the call's own results were computed from these."""

    def program(apply: MapFunction) -> Any:
        def outer(x: Tensor) -> tuple[Tensor, Tensor]:
            first, _ = apply([torch.sin, torch.sin], [(x,), (x,)])
            return hooked(first), first.cos()

        xs = leaves(2)
        returned = apply([outer, outer], [(x,) for x in xs])
        returned[0][0].retain_grad()
        return torch.autograd.grad(loss_of(returned), [*xs, returned[1][1]])

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_gradients_that_results_with_hooks_of_the_call_retain() -> None:
    """The part that these hooks made was added twice."""

    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = x.sin()
            return hidden, hooked(hidden * 2)

        (x, y) = leaves(2)
        (hidden, last), other = apply([call, torch.cos], [(x,), (y,)])
        for result in (hidden, last):
            result.retain_grad()
        (last.sum() + hidden.exp().sum() + other.sum()).backward()
        return hidden.grad, last.grad, x.grad

    assert not isinstance(assert_same_modules_program(program), Raised)


@pytest.mark.parametrize("by_name", [False, True])
def test_backwards_of_several_threads_through_one_graph(by_name: bool) -> None:
    """One thread's backward let the other's sleep, or took over what it had of whole gradients."""
    xs = leaves(2, 5)
    returned = parallel_apply([lambda x: (h := x.sin(), (h * 2).exp())] * 2, [(x,) for x in xs])
    if not by_name:
        returned[0][0].register_hook(lambda grad: None)
    asked = [*xs, *(own[0] for own in returned)]
    loss = loss_of(returned)
    expected = torch.autograd.grad(loss, asked, retain_graph=True)
    wrong: list[bool] = []

    def differentiate(asked: Sequence[Tensor]) -> None:
        for _ in range(50):
            grads = torch.autograd.grad(loss, asked, retain_graph=True)
            wrong.extend(not torch.equal(*pair) for pair in zip(grads, expected, strict=False))

    threads = [threading.Thread(target=differentiate, args=(asked[:end],)) for end in (2, 4, 2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(wrong) == 50 * 8
    assert not any(wrong)


def test_what_was_saved_and_may_be_fetched_once_is() -> None:
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        saved[len(saved)] = tensor
        return len(saved) - 1

    def program(apply: MapFunction) -> Any:
        saved.clear()
        xs = leaves(2)
        with torch.autograd.graph.saved_tensors_hooks(pack, saved.pop):
            returned = apply([lambda x: (h := x.sin(), h.exp().cos())] * 2, [(x,) for x in xs])
        for hidden, _ in returned:
            hidden.register_hook(lambda grad: None)
        return torch.autograd.grad(torch.stack([last.sum() for _, last in returned]).sum(), xs)

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_a_checkpoint_around_a_map_calls_it_once_more() -> None:
    num_calls = []

    def call(x: Tensor) -> list[Tensor]:
        num_calls.append(1)
        return [hidden := x.sin(), hidden := hidden.cos(), hidden.exp()]

    xs = leaves(2)
    returned = checkpoint(
        lambda *xs: parallel_apply([call, call], [(x,) for x in xs]), *xs, use_reentrant=False
    )
    returned[0][0].retain_grad()
    torch.autograd.grad(loss_of(returned), xs)
    assert len(num_calls) == 4


def test_hooks_of_the_call_that_wait_for_several_of_its_results() -> None:
    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = x.sin()
            last = hidden.cos()
            torch.autograd.graph.register_multi_grad_hook(
                [hidden, last], lambda grads: seen.append([grad.clone() for grad in grads])
            )
            return hidden, last

        seen: list[Any] = []
        xs = leaves(2)
        returned = apply([call, torch.cos], [(x,) for x in xs])
        returned[0][0].register_hook(lambda grad: None)
        return torch.autograd.grad(returned[0][1].sum(), xs, allow_unused=True), seen

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_a_backward_in_the_midst_of_another_through_the_same_call() -> None:
    """It took the other's whole gradients for its own."""

    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            between = (hidden := x.sin()) * 2
            between.register_hook(go_back)
            return hidden, between.exp()

        def go_back(grad: Tensor) -> None:
            if not is_within:
                is_within.append(True)
                within[:] = torch.autograd.grad(parts[1], asked, retain_graph=True)
                is_within.clear()

        is_within: list[bool] = []
        within: list[Any] = []
        xs = leaves(2)
        returned = apply([call, call], [(x,) for x in xs])
        asked = [*xs[1:], returned[1][0]]
        parts = [loss_of([own]) for own in returned]
        return torch.autograd.grad(parts[1] * 3, asked, retain_graph=True), within

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_a_result_of_all_others_is_gone_back_from_once_for_each_that_is_looked_at() -> None:
    """As of a mixture of all states: it was once for each state."""
    count: list[Tensor] = []

    def call(x: Tensor) -> list[Tensor]:
        states = [x := x.sin() for _ in range(8)]
        for state in states:
            between = state * 2
            between.register_hook(count.append)
            states[-1] = states[-1] + between
        return states

    (x,) = leaves(1)
    returned = parallel_apply([call, torch.sin], [(x,), (x,)])
    returned[0][3].retain_grad()
    returned[0][-1].sum().backward()
    assert len(count) <= 2 * 8


def test_who_is_asked_by_keyword_is_seen_as_well() -> None:
    (hidden, last), _ = parallel_apply([lambda x: (h := x.sin(), h * 3)] * 2, [(x,) for x in leaves(2)])
    loss = (hidden + last).sum()
    (grad,) = torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        inputs=(hidden,),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    assert torch.equal(grad, torch.full_like(hidden, 4))
