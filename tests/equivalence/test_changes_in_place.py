"""What calls change in place while others, or they themselves, take the same memory by another way.

Natively the later use sees the change, in its value and in its gradient. Calls that are cut apart cannot know of each
other's changes: such a map is refused. None gives a wrong gradient in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same, attempt, loss_of, one_after_another
from tests.support.module_programs import finish, leaves


def in_order(*args: Any) -> Any:
    return parallel_apply(*args, max_concurrency=1)


def one_changes_what_another_takes(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t.mul_(3) * 1, torch.sin], [(y,), (y,)]), y], x)


def one_takes_what_a_later_one_changes(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t + 1, lambda t: t.mul_(3) * 1], [(y,), (y,)]), y], x)


def both_change_the_same(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t.mul_(3) * 1, lambda t: t.mul_(5) * 1], [(y,), (y,)]), y], x)


def one_changes_a_part_of_what_another_takes(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t.mul_(3) * 1, lambda t: t + 1], [(y[0],), (y,)]), y], x)


def a_call_takes_a_part_that_it_changes_and_the_whole(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t, whole: t.mul_(3).sum() + whole.sin()] * 1, [(y[0], y)]), y], x)


def a_call_takes_the_whole_that_it_changes_and_a_part(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t, part: t.mul_(3).sum() + part.sin()] * 1, [(y, y[0])]), y], x)


def a_call_takes_overlapping_parts(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t, part: t.mul_(3).sum() + part.sin()] * 1, [(y[:2], y[1:])]), y], x)


def a_call_changes_what_its_closure_holds(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t.mul_(3) * y] * 1, [(y,)]), y], x)


def a_call_changes_a_part_of_what_its_closure_holds(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t: t.mul_(3) * y] * 1, [(y[0],)]), y], x)


REFUSED = [one_changes_what_another_takes, one_takes_what_a_later_one_changes, both_change_the_same]
REFUSED += [one_changes_a_part_of_what_another_takes, a_call_takes_a_part_that_it_changes_and_the_whole]
REFUSED += [a_call_takes_the_whole_that_it_changes_and_a_part, a_call_takes_overlapping_parts]
REFUSED += [a_call_changes_what_its_closure_holds, a_call_changes_a_part_of_what_its_closure_holds]


def one_changes_its_closure_and_another_takes_it(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish(apply([lambda t: y.mul_(3) * t, torch.sin], [(x,), (y,)]), x)


def one_changes_its_closure_for_nothing_and_another_takes_it(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2

    def call(t: Tensor) -> Tensor:
        y.mul_(3)
        return t * 2

    return finish(apply([call, torch.sin], [(x,), (y,)]), x)


def two_hold_what_one_changes(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish(apply([lambda t: y.mul_(3) * 1, lambda t: y + 1], [(x,), (x,)]), x)


def one_changes_a_part_of_what_another_holds(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    part = y[:2]
    return finish(apply([lambda t: part.mul_(3) * 1, lambda t: y * 5], [(x,), (x,)]), x)


REFUSED += [one_changes_its_closure_and_another_takes_it, two_hold_what_one_changes]
REFUSED += [
    one_changes_its_closure_for_nothing_and_another_takes_it,
    one_changes_a_part_of_what_another_holds,
]


def one_uses_a_view_of_what_an_earlier_one_has_changed(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x + 1  # whose backward needs nothing saved, and may run twice
    view = y.t()
    return finish(apply([lambda t: t.mul_(3) * 1, lambda t: view + 1], [(y,), (x,)]), x)


def a_call_uses_a_view_of_what_it_has_changed(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x + 1
    view = y.t()
    return finish(apply([lambda t: (t.mul_(3), view + 1)[1]] * 1, [(y,)]), x)


ELSEWHERE: list[Callable[[], Tensor]] = []  # where nobody looks for what a call holds


def one_finds_what_an_earlier_one_has_changed(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x + 1
    ELSEWHERE[:] = [lambda: y[0]]
    return finish(apply([lambda t: t.mul_(3) * 1, lambda t: found() + 1], [(y,), (x,)]), x)


def found() -> Tensor:
    return ELSEWHERE[0]()


def one_changes_what_an_earlier_one_has_filled_and_returned(apply: MapFunction) -> Any:
    x, weight = leaves(2)
    room = torch.zeros(3, 4, dtype=torch.float64)
    return finish(apply([lambda t: t.add_(weight), lambda t: room.mul_(3) * t], [(room,), (x,)]), weight)


REFUSED += [one_uses_a_view_of_what_an_earlier_one_has_changed, a_call_uses_a_view_of_what_it_has_changed]
IN_ORDER = [one_changes_what_an_earlier_one_has_filled_and_returned]
IN_ORDER += [one_finds_what_an_earlier_one_has_changed]


def parts_that_do_not_overlap(apply: MapFunction) -> Any:
    """Columns of one tensor, as of a projection for queries, keys and values: only their rows' ends meet."""
    (x,) = leaves(1, 3, 8)
    y = x * 2
    calls = [lambda t: t.mul_(3) * 1, lambda t, other: t.mul_(5) + other]
    return finish([*apply(calls, [(y[:, :3],), (y[:, 3:5], y[:, 5:7])]), y], x)


def changes_that_nobody_differentiates(apply: MapFunction) -> Any:
    """As of a cache: under `no_grad`, and of a tensor that needs no gradient."""
    (x,), cache = leaves(1), torch.zeros(3, 4, dtype=torch.float64)

    def fill(t: Tensor, cache: Tensor) -> Tensor:
        with torch.no_grad():
            cache.copy_(t)
            t.mul_(2)
        return t + 1

    y = x * 2
    return finish([*apply([fill], [(y, cache)]), y, cache], x)


def what_is_taken_twice_and_changed_by_nobody(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    return finish([*apply([lambda t, whole: t.clone().mul_(3) + whole] * 2, [(y[0], y)] * 2), y], x)


def a_view_that_a_closure_holds_and_no_call_uses(apply: MapFunction) -> Any:
    """It has the history of what it is a view of, which the map changes."""
    (x,) = leaves(1)
    y = x.sin()
    view = y.t()
    return finish(
        [*apply([lambda t: (view, t.tanh_())[1], lambda t: (view, t * 1)[1]], [(y,), (x,)]), view, y], x
    )


def views_that_calls_use_for_nothing_after_a_change(apply: MapFunction) -> Any:
    """PyTorch gives them their history there and then, before the map gives one to what they show."""
    (x,) = leaves(1)
    y = x + 1
    z = y[:2]
    views = y.t(), z[1:], z.view(-1)

    def later(t: Tensor) -> Tensor:
        apply([lambda t: views[0] * t.sum(), torch.sin], [(views[1],), (views[2],)])
        return t * 1

    return finish([*apply([lambda t: t.mul_(3), later], [(z,), (x,)]), *views, y], x)


def a_part_that_one_uses_after_another_has_changed_another_part(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x + 1
    part, changed = y[2:], threading.Event()
    calls = [lambda t: (t.mul_(3), changed.set())[0], lambda t: part * t.sum() if changed.wait(60) else None]
    return finish([*apply(calls, [(y[:2],), (x,)]), part, y], x)


def a_view_that_a_call_changes_before_its_whole_is_changed(apply: MapFunction) -> Any:
    (x,) = leaves(1)
    y = x * 2
    view = y[:2]
    apply([lambda t: t.mul_(3)], [(view,)])
    y.mul_(5)
    return finish([view, y], x)


@pytest.mark.parametrize(
    ("program", "max_concurrency"),
    [*[(program, n) for program in REFUSED for n in (None, 1)], *[(program, 1) for program in IN_ORDER]],
)
def test_a_change_that_others_would_have_to_see_is_refused(
    program: Callable[[MapFunction], Any], max_concurrency: int | None
) -> None:
    program(one_after_another)  # which PyTorch allows

    def apply(*args: Any) -> Any:
        return parallel_apply(*args, max_concurrency=max_concurrency)

    with pytest.raises(RuntimeError, match=r"parallel_apply: expected .* changed in place .* call \d"):
        program(apply)


@pytest.mark.parametrize(
    "program",
    [
        parts_that_do_not_overlap,
        changes_that_nobody_differentiates,
        what_is_taken_twice_and_changed_by_nobody,
        a_view_that_a_closure_holds_and_no_call_uses,
        views_that_calls_use_for_nothing_after_a_change,
        a_part_that_one_uses_after_another_has_changed_another_part,
        a_view_that_a_call_changes_before_its_whole_is_changed,
    ],
    ids=lambda program: program.__name__,
)
def test_a_change_that_nobody_else_sees_is_differentiated_as_natively(
    program: Callable[[MapFunction], Any],
) -> None:
    for apply in (parallel_apply, in_order):
        assert_same(program(one_after_another), program(apply), tolerance=1e-12)


@pytest.mark.parametrize(
    "turn", [lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.as_strided_((2,), (1,))]
)
def test_an_input_that_is_given_another_shape_in_place_is_refused(turn: Callable[[Tensor], Tensor]) -> None:
    """The caller's tensor would keep its own, and the result is that tensor."""
    (x,) = leaves(1, 3, 3)
    with pytest.raises(RuntimeError, match=r"(?s)expected calls to leave the shape .* call 0"):
        parallel_apply([turn], [(x * 2,)])

    def there_and_back(t: Tensor) -> Tensor:
        size, stride = t.size(), t.stride()
        return (turn(t) * 3).sum() * t.as_strided_(size, stride)

    def program(apply: MapFunction) -> Any:
        return finish(apply([there_and_back], [(x * 2,)]), x)

    assert_same(attempt(program, one_after_another), attempt(program, parallel_apply), tolerance=1e-12)


def test_what_autograd_does_not_see_written_to_a_view_that_is_changed_stays() -> None:
    def program(apply: MapFunction) -> Any:
        (x,) = leaves(1)
        y = x + 1
        data = y.data
        return finish([*apply([lambda t: t.mul_(3), lambda t: (data.add_(1), t)[1]], [(y[:2],), (x,)]), y], x)

    assert_same(program(one_after_another), program(in_order), tolerance=1e-12)


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.mul_(0.3).tanh(),
    lambda t: t.tanh_(),
    lambda t: t.tanh() * t.mul_(2).tanh(),
]


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: (x * 2)[:2]])
@pytest.mark.parametrize("call", CHANGES)
def test_gradients_of_gradients_through_a_change_in_place_are_exact(
    call: Callable[[Tensor], Tensor], make: Callable[[Tensor], Tensor]
) -> None:
    """The second derivative goes to what the input was before, and not once more through the call."""

    def program(apply: MapFunction) -> Any:
        (x,) = leaves(1)
        outputs = apply([call, torch.sin], [(make(x),), (x,)])
        (grad,) = torch.autograd.grad(loss_of([y**3 for y in outputs]), x, create_graph=True)
        (twice,) = torch.autograd.grad((grad**2).sum(), x, create_graph=True)
        return grad, twice, torch.autograd.grad((twice**2).sum(), x)

    native, mapped = program(one_after_another), program(parallel_apply)
    for one, other in zip(native, mapped, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: (x * 2)[:2]])
def test_an_input_that_was_changed_since_has_no_second_derivative(make: Callable[[Tensor], Tensor]) -> None:
    (x,) = leaves(1)
    y = make(x)
    outputs = parallel_apply([lambda t: t.tanh(), torch.sin], [(y,), (x,)])
    y.mul_(3)
    loss = loss_of(outputs)
    with pytest.raises(RuntimeError, match=r"changed in place since \(call 0"):
        torch.autograd.grad(loss, x, create_graph=True)


def views_of_what_a_closure_holds(
    apply: MapFunction, view: Callable[[Tensor], Tensor], is_part: bool, changes_result: bool
) -> Any:
    (x,) = leaves(1)
    whole = x * 2
    held = whole[:2] if is_part else whole
    (y, _) = apply([lambda t: view(held), torch.sin], [(x,), (x,)])
    (y if changes_result else whole).mul_(3)
    return finish([y, held, whole], x)


@pytest.mark.parametrize("changes_result", [True, False])
@pytest.mark.parametrize("is_part", [True, False])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t.view(-1)])
def test_a_result_that_shares_memory_with_a_closure_and_is_changed_is_differentiated_right_or_refused(
    view: Callable[[Tensor], Tensor], is_part: bool, changes_result: bool
) -> None:
    native = views_of_what_a_closure_holds(one_after_another, view, is_part, changes_result)
    mapped = attempt(views_of_what_a_closure_holds, parallel_apply, view, is_part, changes_result)
    if isinstance(mapped, Raised):
        assert mapped.type is RuntimeError
        assert "inplace" in mapped.text
    else:
        assert_same(native, mapped, tolerance=1e-12)


@pytest.mark.parametrize("changes_result", [True, False])
def test_a_tensor_without_history_that_a_call_fills_and_returns_is_not_changed_behind_its_back(
    changes_result: bool,
) -> None:
    x, weight = leaves(2)
    room = torch.zeros(3, 4, dtype=torch.float64)
    y, _ = parallel_apply([lambda t: t.add_(weight), torch.sin], [(room,), (x,)])

    def change() -> None:
        (y if changes_result else room).mul_(3)
        loss_of([y]).backward()

    with pytest.raises(RuntimeError, match="inplace"):
        change()


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:]])
def test_a_parameter_that_a_call_returns_is_not_changed_behind_its_back(
    view: Callable[[Tensor], Tensor],
) -> None:
    (weight,) = leaves(1)
    before = weight.detach().clone()
    (y, _) = parallel_apply([lambda t: view(weight), torch.sin], [(weight,)] * 2)
    with pytest.raises(RuntimeError, match=r"leaf Variable|modified inplace"):
        y.mul_(3)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_an_input_that_a_call_changes_unknown_to_autograd_keeps_its_history(is_leaf: bool) -> None:
    def call(t: Tensor) -> Tensor:
        t.detach().mul_(3)
        return t.sin()

    def run(apply: MapFunction) -> Any:
        leaf, other = leaves(2)
        x = leaf if is_leaf else leaf * 2
        loss = loss_of([*apply([call, torch.cos], [(x,), (other,)]), x])
        return x.detach(), torch.autograd.grad(loss, [leaf, x])

    assert_same(run(one_after_another), run(parallel_apply))
