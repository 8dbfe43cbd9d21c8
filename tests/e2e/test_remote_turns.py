"""Updates beside backwards of other threads: a step is of whole backwards, nothing is lost and no restart is blamed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.autograd.grouping import CallFailure
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import DeadlineExceededError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import LR, sgd
from tests.support.servers import START_S, wait_until


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.module.begun.release()
        assert ctx.module.may_go.wait(START_S)
        return grad, None


class Gated(nn.Module):
    """Its weight's gradient is the sum of its inputs; a backward waits while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.begun, self.may_go = threading.Semaphore(0), threading.Event()
        self.may_go.set()

    def forward(self, x: Tensor) -> Tensor:
        return Gate.apply(self.weight * x, self)


@contextlib.contextmanager
def hosting(**options: float) -> Iterator[tuple[dict[str, Gated], RemoteExperts, ThreadPoolExecutor]]:
    modules = {name: Gated() for name in ("a", "b")}
    with (
        ExpertsServer(dict(modules), optimizer=sgd) as server,
        connect(server.address, **options) as experts,
        ThreadPoolExecutor() as threads,
    ):
        try:
            yield modules, experts, threads
        finally:
            for module in modules.values():
                module.may_go.set()


def forward(experts: RemoteExperts, name: str, gradient: float) -> Tensor:
    return experts[name](torch.tensor([gradient])).sum()


def backward(experts: RemoteExperts, name: str, gradient: float) -> None:
    forward(experts, name, gradient).backward()


def begun(
    threads: ThreadPoolExecutor, module: Gated, experts: RemoteExperts, name: str, g: float
) -> Future[None]:
    """Begin a backward that waits on its server."""
    while module.begun.acquire(blocking=False):
        pass
    module.may_go.clear()
    future = threads.submit(backward, experts, name, g)
    assert module.begun.acquire(timeout=START_S)
    return future


def num_waiting(experts: RemoteExperts) -> int:
    return len(experts.connection._updates.turns._waiting)


def weight(experts: RemoteExperts, name: str = "a") -> float:
    return float(experts[name].state_dict()["weight"])


def between_backwards(
    update: Callable[[], None], module: Gated, experts: RemoteExperts, threads: ThreadPoolExecutor
) -> None:
    """Let an update of "a" wait for a backward of 10, and one of 100 for the update; return when all are over."""
    after = forward(experts, "a", 100.0)
    under_way = begun(threads, module, experts, "a", 10.0)
    updating = threads.submit(update)
    wait_until(lambda: num_waiting(experts) == 1)
    later = threads.submit(after.backward)
    wait_until(lambda: num_waiting(experts) == 2)
    module.may_go.set()
    for future in (under_way, updating, later):
        future.result(START_S)


def test_a_step_waits_for_a_backward_of_another_thread_and_counts_it() -> None:
    with hosting() as (modules, experts, threads):
        optimizer = RemoteOptimizer(experts)
        backward(experts, "a", 1.0)
        between_backwards(optimizer.step, modules["a"], experts, threads)
        assert weight(experts) == pytest.approx(-LR * 11)
        optimizer.step()
        assert weight(experts) == pytest.approx(-LR * (11 + 111))
        optimizer.zero_grad()
        optimizer.step()
        assert weight(experts) == pytest.approx(-LR * (11 + 111))


def test_zero_grad_forgets_a_backward_that_was_under_way_and_keeps_those_after_it() -> None:
    with hosting() as (modules, experts, threads):
        optimizer = RemoteOptimizer(experts)
        between_backwards(optimizer.zero_grad, modules["a"], experts, threads)
        optimizer.step()
        assert weight(experts) == pytest.approx(-LR * 100)


def test_who_waits_is_not_overtaken_when_something_else_ends() -> None:
    with hosting() as (modules, experts, threads):
        optimizer = RemoteOptimizer([experts["a"]])
        after, elsewhere = forward(experts, "a", 100.0), forward(experts, "b", 1.0)
        under_way = begun(threads, modules["a"], experts, "a", 10.0)
        step = threads.submit(optimizer.step)
        wait_until(lambda: num_waiting(experts) == 1)
        later = threads.submit(after.backward)
        wait_until(lambda: num_waiting(experts) == 2)
        elsewhere.backward()
        assert num_waiting(experts) == 2
        modules["a"].may_go.set()
        for future in (under_way, step, later):
            future.result(START_S)
        assert weight(experts) == pytest.approx(-LR * 10)


def test_those_of_other_experts_are_not_waited_for() -> None:
    with hosting() as (modules, experts, threads):
        backward(experts, "a", 1.0)
        after = forward(experts, "b", 10.0)
        other = begun(threads, modules["b"], experts, "b", 10.0)
        RemoteOptimizer([experts["a"]]).step()
        assert weight(experts) == pytest.approx(-LR)
        more = threads.submit(after.backward)  # nor do backwards wait for each other
        wait_until(lambda: len(experts.connection._updates.turns._under_way) == 2)
        modules["b"].may_go.set()
        other.result(START_S), more.result(START_S)


def test_a_step_that_waits_ends_with_its_deadline_and_changes_nothing() -> None:
    with hosting() as (modules, experts, threads):
        backward(experts, "a", 1.0)
        other = begun(threads, modules["a"], experts, "a", 10.0)
        experts.connection._delivery.operations._timeout_s = 0.2
        with pytest.raises(
            DeadlineExceededError, match=r"'a', 'b', step, .*deadline 200.*another thread's backward"
        ):
            RemoteOptimizer(experts).step()
        experts.connection._delivery.operations._timeout_s = START_S
        modules["a"].may_go.set()
        other.result(START_S)
        RemoteOptimizer(experts).step()
        assert weight(experts) == pytest.approx(-LR * 11)


def test_close_ends_the_wait_at_once() -> None:
    with hosting(timeout_s=START_S) as (modules, experts, threads):
        backward(experts, "a", 1.0)
        other = begun(threads, modules["a"], experts, "a", 10.0)
        step = threads.submit(RemoteOptimizer(experts).step)
        wait_until(lambda: num_waiting(experts) == 1)
        experts.close()
        for future in (other, step):
            with pytest.raises(ServerUnavailableError):
                future.result(START_S)


def test_so_does_ctrl_c_and_a_later_step_applies_all() -> None:
    with hosting() as (modules, experts, threads):
        backward(experts, "a", 1.0)
        other = begun(threads, modules["a"], experts, "a", 10.0)

        def interrupt() -> None:
            wait_until(lambda: num_waiting(experts) == 1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        interrupting = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            RemoteOptimizer(experts).step()
        interrupting.result()
        assert num_waiting(experts) == 0
        modules["a"].may_go.set()
        other.result(START_S)
        RemoteOptimizer(experts).step()
        assert weight(experts) == pytest.approx(-LR * 11)


def test_threads_that_train_side_by_side_lose_no_update_and_count_none_twice() -> None:
    """Steps without `zero_grad` in between: each applies all backwards before it, so the weight tells what it saw."""
    with hosting() as (_, experts, threads):
        optimizer, num_each = RemoteOptimizer(experts), 25

        def give() -> None:
            for _ in range(num_each):
                ys = parallel_apply([experts["a"], experts["b"]], [(torch.ones(1),)] * 2)
                torch.stack(ys).sum().backward()

        givers = [threads.submit(give) for _ in range(3)]
        while not all(giver.done() for giver in givers):
            optimizer.step()
        for giver in givers:
            giver.result()
        before = weight(experts, "a"), weight(experts, "b")
        assert before[0] == pytest.approx(before[1])  # a pass of both was applied to both or to none
        optimizer.step()
        assert weight(experts) - before[0] == pytest.approx(-LR * 3 * num_each, rel=1e-4)


def test_who_drops_failures_goes_on_without_what_waited_in_vain() -> None:
    with hosting() as (_, experts, _):
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        backward(experts, "a", 1.0)
        failures: list[CallFailure] = []
        x = torch.ones(1, requires_grad=True)
        connection = experts.connection
        pair = [experts["a"], experts["b"]]
        ys = connection.call_together(pair, [(x,)] * 2, [{}] * 2, failures=failures)
        with (
            connection._delivery.operations.begin() as operation,
            connection._updates.turns.turn("Step", ["a"], operation),
        ):
            connection._delivery.operations._timeout_s = 0.2
            torch.stack([*ys]).sum().backward()
            optimizer.step()
        assert [(failure.expert, failure.phase) for failure in failures] == [
            ("a", "backward"),
            ("b", "backward"),
        ]
        assert x.grad is None or not x.grad.any()
        (late,) = optimizer.failures
        assert isinstance(late, DeadlineExceededError)
        connection._delivery.operations._timeout_s = START_S
        optimizer.step()
        assert (optimizer.failures, weight(experts)) == ([], pytest.approx(-LR))


@pytest.mark.parametrize("gives_before", [True, False])
def test_a_backward_under_way_that_a_dropped_zero_grad_did_not_wait_for_is_never_applied(
    gives_before: bool,
) -> None:
    with hosting() as (modules, experts, threads):
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        if gives_before:
            backward(experts, "a", 1.0)
        other = begun(threads, modules["a"], experts, "a", 10.0)
        operations = experts.connection._delivery.operations
        operations._timeout_s = 0.2
        optimizer.zero_grad()
        assert [type(failure) for failure in optimizer.failures] == [DeadlineExceededError]
        operations._timeout_s = START_S
        modules["a"].may_go.set()
        other.result(START_S)
        optimizer.step()
        assert weight(experts) == 0
        optimizer.zero_grad()
        backward(experts, "a", 1.0)
        optimizer.step()
        assert (optimizer.failures, weight(experts)) == ([], pytest.approx(-LR))
