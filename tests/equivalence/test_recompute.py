"""Recompute among concurrent calls gives what plain PyTorch gives, keeps what it promises, and forgets the rest.

Both ways: `parallel_apply(..., recompute=True)`, and `torch.utils.checkpoint.checkpoint` used by the user's own
modules inside concurrent calls.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.split_backward import split_backward

WORKERS = [1, 2, 16]


def experts_of(make: Callable[[], nn.Module], num: int = 8) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(num)]


def ffn(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4))


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def assert_same(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def one_after_another_checkpointed(calls: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[Any]:
    return [checkpoint(call, *x, use_reentrant=False) for call, x in zip(calls, inputs, strict=True)]


class Checkpointed(nn.Module):
    """What a user writes: a module that checkpoints its inside."""

    def __init__(self, inside: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inside, self.options = inside, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False, **self.options)


class CountOperators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# the same gradients


@pytest.mark.parametrize("workers", WORKERS)
def test_gradients_are_those_of_a_plain_loop(workers: int) -> None:
    experts = experts_of(ffn)
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4, requires_grad=True)
    want = torch.stack([module(x * i) for i, module in enumerate(plain)])
    got = torch.stack(
        parallel_apply(experts, [(x * i,) for i in range(8)], max_concurrency=workers, recompute=True)
    )
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sin().sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad(want.sin().sum(), x, retain_graph=True)
    torch.testing.assert_close(grad, wanted)
    got.sin().sum().backward()
    want.sin().sum().backward()
    assert_same(gradients(experts), gradients(plain))


def test_dropout_masks_are_the_same_with_any_number_of_workers_and_without_recompute() -> None:
    runs = []
    for workers in WORKERS:
        for recompute in (False, True):
            experts = experts_of(lambda: ffn(0.5))
            x = torch.ones(5, 4, requires_grad=True)
            torch.manual_seed(7)
            outputs = parallel_apply(experts, [(x,)] * 8, max_concurrency=workers, recompute=recompute)
            torch.stack(outputs).sum().backward()
            runs.append([*outputs, x.grad, *gradients(experts), torch.rand(3)])
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert not torch.equal(runs[0][0], runs[0][1])


@pytest.mark.stress
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_users_own_checkpoint_with_dropout_inside_concurrent_experts(
    workers: int, recompute: bool
) -> None:
    """With ones as inputs and weights the gradient of the input is the mask, which is the result."""

    for repetition in range(10):
        torch.manual_seed(repetition)
        xs = [torch.ones(50, requires_grad=True) for _ in range(8)]
        outputs = parallel_apply(
            [Checkpointed(OneMask()) for _ in range(8)],
            [(x,) for x in xs],
            max_concurrency=workers,
            recompute=recompute,
        )
        torch.stack(outputs).sum().backward()
        for x, output in zip(xs, outputs, strict=True):
            assert torch.equal(x.grad, output)
        assert len({tuple(output.tolist()) for output in outputs}) == 8


class OneMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x * x.detach(), 0.3) * 1.0, 0.3)


@pytest.mark.parametrize("workers", WORKERS)
def test_autocast_is_the_same_in_the_recomputation(workers: int) -> None:
    experts = experts_of(lambda: Checkpointed(ffn()))
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = parallel_apply(experts, [(x,)] * 8, max_concurrency=workers, recompute=True)
        want = [module(x) for module in plain]
    assert {output.dtype for output in got} == {torch.bfloat16}
    torch.stack(got).float().sum().backward()
    torch.stack(want).float().sum().backward()
    assert_same(gradients(experts), gradients(plain))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, pair: tuple[Tensor, dict[str, Any]], *, scale: Tensor, name: str) -> dict[str, Any]:
        x, rest = pair
        y = (x * self.weight * scale + rest["bias"]).tanh()
        return {"y": y, "seen": [y.detach(), name], "z": y * rest["detached"]}


def test_keyword_arguments_nested_inputs_and_detached_tensors() -> None:
    experts = experts_of(Nested)
    plain = copy.deepcopy(experts)
    x, bias, scale = (torch.randn(4, requires_grad=True) for _ in range(3))
    inputs = [((x * i, {"bias": bias, "detached": bias.detach()}),) for i in range(8)]
    kwargs = [{"scale": scale, "name": f"ffn.{i}"} for i in range(8)]
    got = parallel_apply(experts, inputs, kwargs, recompute=True)
    want = [m(*i, **k) for m, i, k in zip(plain, inputs, kwargs, strict=True)]
    totals = [sum(result["y"].sum() + result["z"].sum() for result in results) for results in (got, want)]
    found = [torch.autograd.grad(total, [x, bias, scale], retain_graph=True) for total in totals]
    assert_same(*found)
    for total in totals:
        total.backward(retain_graph=True)  # both share the graph of the inputs
    assert_same(gradients(experts), gradients(plain))
    assert [result["seen"][1] for result in got] == [f"ffn.{i}" for i in range(8)]
    assert not got[0]["seen"][0].requires_grad


def test_partial_backwards_and_inputs_without_gradients() -> None:
    experts = experts_of(lambda: Checkpointed(ffn()))
    plain = copy.deepcopy(experts)
    x = torch.randn(5, 4)
    for modules, recompute in ((experts, True), (plain, False)):
        outputs = parallel_apply(modules, [(x,)] * 8, recompute=recompute)
        outputs[3].sum().backward(retain_graph=True)
        first = next(iter(modules[5].parameters()))
        (outputs[5].sum() + outputs[6].sum()).backward(inputs=[first], retain_graph=True)
        torch.stack(outputs[:2]).sum().backward()
    assert_same(gradients(experts), gradients(plain))
    assert experts[6].inside[0].weight.grad is None


@pytest.mark.parametrize("workers", WORKERS)
def test_nested_three_deep(workers: int) -> None:
    experts = experts_of(
        lambda: Checkpointed(nn.Sequential(Checkpointed(ffn(0.5)), nn.Tanh(), Checkpointed(ffn())))
    )
    runs = []
    for recompute in (False, True):
        modules, x = copy.deepcopy(experts), torch.ones(5, 4, requires_grad=True)
        torch.manual_seed(3)
        outputs = parallel_apply(modules, [(x,)] * 8, max_concurrency=workers, recompute=recompute)
        torch.stack(outputs).sum().backward()
        runs.append([*outputs, x.grad, *gradients(modules)])
    assert_same(*runs)


# what checkpointing promises


def test_context_fn_is_entered_once_for_the_forward_and_once_for_the_recomputation() -> None:
    lock, entered = threading.Lock(), Counter[str]()

    class Enter:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            with lock:
                entered[self.name] += 1

        def __exit__(self, *_: object) -> None:
            pass

    experts = experts_of(lambda: Checkpointed(ffn(), context_fn=lambda: (Enter("forward"), Enter("again"))))
    outputs = parallel_apply(experts, [(torch.ones(2, 4),)] * 8)
    assert entered == {"forward": 8}
    torch.stack(outputs).sum().backward()
    assert entered == {"forward": 8, "again": 8}


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_policies_are_followed(policy: CheckpointPolicy) -> None:
    counts: Counter[str] = Counter()

    def choose(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    experts = experts_of(lambda: Checkpointed(ffn(), context_fn=contexts))
    plain = copy.deepcopy(experts)
    x = torch.randn(2, 4)
    outputs = parallel_apply(experts, [(x,)] * 8)
    with CountOperators(counts):
        torch.stack(outputs).sum().backward()
    torch.stack([module.inside(x) for module in plain]).sum().backward()
    assert_same(gradients(experts), gradients(plain))
    if policy is CheckpointPolicy.MUST_SAVE:
        assert counts["addmm"] == 0
    else:
        assert counts["addmm"] >= 8


@pytest.mark.parametrize("early_stop", [True, False])
def test_it_stops_as_soon_as_all_that_is_needed_has_been_computed(early_stop: bool) -> None:
    lock, tails = threading.Lock(), Counter[int]()

    class WithTail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp() * 2.0
            with lock:
                tails["reached"] += 1
            return y + 1

    with set_checkpoint_early_stop(early_stop):
        x = torch.ones(4, requires_grad=True)
        outputs = parallel_apply([WithTail()] * 8, [(x,)] * 8, recompute=True)
        torch.stack(outputs).sum().backward()
    torch.testing.assert_close(x.grad, 16 * torch.ones(4).exp())
    assert tails["reached"] == (8 if early_stop else 16)


def test_a_recomputation_that_differs_raises_and_lists_both_sides() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return (x[:2] if self.num_calls > 1 else x).exp().sum()

    experts: list[nn.Module] = [Fickle() if i == 3 else nn.Identity() for i in range(8)]
    x = torch.ones(4, requires_grad=True)
    outputs = parallel_apply(experts, [(x,)] * 8, recompute=True)
    with pytest.raises(CheckpointError, match="different metadata") as raised:
        sum(output.sum() for output in outputs).backward()
    assert "torch.Size([4])" in str(raised.value)
    assert "torch.Size([2])" in str(raised.value)
    assert any("call 3" in note for note in raised.value.__notes__)


# the same, where the map is told how


class Options:
    """A layer and a map, called with the same options."""

    @staticmethod
    def map(experts: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
        return torch.stack(parallel_apply(experts, [(x,)] * len(experts), **options)).sum(0)

    @staticmethod
    def layer(experts: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
        router = TopKRouter(4, len(experts), top_k=len(experts))
        torch.nn.init.zeros_(router.weight)  # each expert with the same weight
        return MixtureOfExperts(router, experts, **options)(x) * len(experts)  # type: ignore[no-any-return, operator]

    @staticmethod
    def lenient_layer(experts: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
        return Options.layer(experts, x, on_failure="drop", **options)


CALLERS = [Options.map, Options.layer, Options.lenient_layer]


@pytest.mark.parametrize("call", CALLERS)
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_policy_chooses_what_is_saved_in_each_of_the_calls(
    policy: CheckpointPolicy, call: Callable[..., Tensor]
) -> None:
    counts: Counter[str] = Counter()

    def choose(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is torch.ops.aten.gelu.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    experts = experts_of(ffn)
    plain, x = copy.deepcopy(experts), torch.randn(5, 4)
    loss = call(experts, x, recompute=Recompute(context_fn=contexts)).sum()
    with CountOperators(counts):
        loss.backward()
    sum(module(x) for module in plain).sum().backward()
    assert_same(gradients(experts), gradients(plain))
    assert counts["gelu"] == (0 if policy is CheckpointPolicy.MUST_SAVE else 8)


@pytest.mark.parametrize("call", CALLERS)
def test_early_stop_and_the_determinism_check_can_be_turned_off(call: Callable[..., Tensor]) -> None:
    lock, tails = threading.Lock(), Counter[str]()

    class Fickle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with lock:
                tails["begun"] += 1
                is_again = tails["begun"] > 4
            y = (x.double() if is_again else x).exp().to(x.dtype)
            with lock:
                tails["reached"] += 1
            return y

    x = torch.zeros(2, 4, requires_grad=True)
    how = Recompute(early_stop=False, determinism_check="none")
    experts: list[nn.Module] = [Fickle() for _ in range(4)]
    call(experts, x, recompute=how).sum().backward()
    assert tails == {"begun": 8, "reached": 8}
    torch.testing.assert_close(x.grad, torch.full((2, 4), 4.0))


def test_keyword_arguments_may_have_any_name() -> None:
    def product(x: Tensor, **factors: float) -> Tensor:
        return x * torch.tensor(list(factors.values())).prod()

    x = torch.ones(3, requires_grad=True)
    factors = {
        "call": 2.0,
        "self": 3.0,
        "function": 5.0,
        "context_fn": 7.0,
        "use_reentrant": 1.0,
        "position": 1.0,
    }
    for recompute in (False, True):
        torch.stack(
            parallel_apply([product] * 2, [(x,)] * 2, [factors] * 2, recompute=recompute)
        ).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 4 * 210.0))


def test_hooks_run_as_often_as_under_checkpoint_in_a_plain_loop() -> None:
    def run(apply: Callable[..., Any]) -> Counter[tuple[str, int]]:
        lock, seen = threading.Lock(), Counter[tuple[str, int]]()

        def note(kind: str, i: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                with lock:
                    seen[kind, i] += 1

            return hook

        experts = experts_of(ffn, 4)
        for i, expert in enumerate(experts):
            expert.register_forward_pre_hook(note("before forward", i))
            expert.register_forward_hook(note("forward", i))
            expert.register_full_backward_hook(note("backward", i))
            expert[0].register_full_backward_pre_hook(note("before backward", i))
            expert[0].weight.register_hook(note("weight", i))
            expert[0].weight.register_post_accumulate_grad_hook(note("accumulated", i))
        x = torch.ones(2, 4, requires_grad=True)
        torch.stack(apply(experts, [(x,)] * 4)).sum().backward()
        return seen

    in_a_loop = run(
        lambda experts, inputs: [Checkpointed(e)(*x) for e, x in zip(experts, inputs, strict=True)]
    )
    assert run(functools.partial(parallel_apply, recompute=True)) == in_a_loop
    assert in_a_loop["weight", 0] == in_a_loop["accumulated", 3] == 1


@pytest.mark.parametrize("is_shared", [False, True], ids=["own_inputs", "one_input"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["bare", "in a dict"])
def test_hooks_on_an_input_see_the_whole_gradient_once_for_each_run_as_under_checkpoint(
    is_shared: bool, is_nested: bool
) -> None:
    def run(apply: Callable[..., Any]) -> Any:
        seen: list[float] = []

        def call(x: Any, factor: float) -> Tensor:
            x = x["x"] if is_nested else x
            x.register_hook(lambda grad: seen.append(round(grad.sum().item(), 5)))
            x.register_hook(lambda grad: grad * factor)
            x.register_hook(lambda grad: grad * 100).remove()
            return (x.sin() * x).exp()

        xs = [torch.full((3,), 0.1 * i, requires_grad=True) for i in range(4)]
        middles = [xs[0] * 2] * 4 if is_shared else [x * 2 for x in xs]
        inputs = [({"x": m} if is_nested else m, i + 0.5) for i, m in enumerate(middles)]
        outputs = torch.stack(apply([call] * 4, inputs))
        del middles, inputs  # so that the graph alone holds them
        outputs.sum().backward()
        return sorted(seen), [x.grad for x in xs]

    in_a_loop = run(one_after_another_checkpointed)
    recomputed = run(functools.partial(parallel_apply, recompute=True))
    assert recomputed[0] == pytest.approx(in_a_loop[0])
    assert len(recomputed[0]) == 8
    assert_same(recomputed[1], in_a_loop[1])


@pytest.mark.usefixtures("no_gc")
def test_only_inputs_are_kept_and_nothing_after_the_backward() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.exp()
            alive.append(weakref.ref(h))
            return h * h

    x = torch.ones(4, requires_grad=True)
    for recompute in (False, True):
        alive.clear()
        outputs = parallel_apply([Watched()] * 8, [(x,)] * 8, recompute=recompute)
        assert sum(one() is not None for one in alive) == (0 if recompute else 8)
        torch.stack(outputs).sum().backward()
        assert sum(one() is not None for one in alive) == 0
        assert len(alive) == (16 if recompute else 8)


# with the other ways to save memory


@pytest.mark.parametrize("workers", WORKERS)
def test_offloaded_and_recomputed_experts(workers: int) -> None:
    plain = experts_of(lambda: ffn(0.5))
    offloaded = OffloadedExperts(
        copy.deepcopy(plain), lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200
    )
    found = []
    for recompute in (False, True):
        x = torch.ones(5, 4, requires_grad=True)
        torch.manual_seed(5)
        outputs = parallel_apply(list(offloaded), [(x,)] * 8, max_concurrency=workers, recompute=recompute)
        torch.stack(outputs).sum().backward()
        found.append(
            [x.grad, *(offloaded.gradients(i)[name] for i in range(8) for name in offloaded.gradients(i))]
        )
        offloaded.zero_grad()
    assert_same(*found)
    assert offloaded.residency.peak_bytes <= 1200


class Counted(nn.Module):
    """Notes how many activations are alive, of all experts of one list."""

    def __init__(self, alive: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.weight, self.alive, self.most = nn.Parameter(torch.ones(4)), alive, 0

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.weight).exp()
        self.alive.append(weakref.ref(h))
        self.most = max(self.most, sum(one() is not None for one in self.alive))
        return h * h


@pytest.mark.usefixtures("no_gc")
def test_of_a_recomputed_layer_of_offloaded_experts_one_has_its_activations_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    modules = [Counted(alive) for _ in range(8)]
    offloaded = OffloadedExperts(modules, lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=64)
    x = torch.ones(5, 4, requires_grad=True)
    torch.stack(parallel_apply(list(offloaded), [(x,)] * 8, recompute=True)).sum().backward()
    assert len(alive) == 16
    assert [module.most for module in modules] == [1] * 8


def test_an_update_before_the_backward_of_a_recomputed_offloaded_expert_raises() -> None:
    offloaded = OffloadedExperts([ffn()], lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200)
    x = torch.ones(5, 4)
    first, second = (parallel_apply(list(offloaded), [(x,)], recompute=True)[0].sum() for _ in range(2))
    first.backward()
    offloaded.step()
    with pytest.raises(RuntimeError, match="updated 1 times since"):
        second.backward()


def test_recomputed_and_offloaded_experts_with_split_backward() -> None:
    plain = experts_of(ffn, num=3)
    offloaded = OffloadedExperts(
        copy.deepcopy(plain[:1]), lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200
    )
    recomputed = copy.deepcopy(plain)
    x = torch.randn(5, 4, requires_grad=True)
    h = offloaded[0](checkpoint(recomputed[1], x, use_reentrant=False))
    y = checkpoint(recomputed[2], h, use_reentrant=False)
    weights = [p for module in recomputed[1:] for p in module.parameters()]
    input_grads, pending = split_backward(y.sum(), None, x, weights)
    got = [*input_grads, *pending.run()]
    wanted_of = [p for module in plain[1:] for p in module.parameters()]
    total = plain[2](plain[0](plain[1](x))).sum()
    assert_same(got, torch.autograd.grad(total, [x, *wanted_of]))


def test_checkpoint_around_the_map() -> None:
    experts = experts_of(lambda: Checkpointed(ffn(0.5)), num=4)
    runs = []
    for around in (True, False):
        modules, x = copy.deepcopy(experts), torch.ones(5, 4, requires_grad=True)

        def layer(x: Tensor, modules: list[nn.Module] = modules) -> Tensor:
            return torch.stack(parallel_apply(modules, [(x,)] * 4)).sum(0)

        torch.manual_seed(2)
        y = checkpoint(layer, x, use_reentrant=False) if around else layer(x)
        y.sum().backward()
        runs.append([y, x.grad, *gradients(modules)])
    assert_same(*runs)
