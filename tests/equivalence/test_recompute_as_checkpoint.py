"""Recompute keeps what `torch.utils.checkpoint` promises: contexts, policies, early stop, hooks, only inputs kept."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.autograd.recompute import Recompute
from tests.support.operators import CountOperators
from tests.support.recomputing import (
    Checkpointed,
    assert_same,
    experts_of,
    ffn,
    gradients,
    one_after_another_checkpointed,
)


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


@pytest.mark.parametrize("is_leaf", [True, False])
def test_under_saved_tensor_hooks_too_hooks_on_an_input_run_once_for_each_run(is_leaf: bool) -> None:
    """`checkpoint` loses what its second run puts on a leaf: it has a copy."""

    def call(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad / 2)
        return x.sin()

    halved = []
    for apply in (one_after_another_checkpointed, functools.partial(parallel_apply, recompute=True)):
        x = torch.zeros(3, requires_grad=True)
        with save_on_cpu():
            (result,) = apply([call], [(x if is_leaf else x * 1,)])
        halved.append(torch.autograd.grad(result.sum(), x)[0].tolist())
    assert halved == [[0.5 if is_leaf else 0.25] * 3, [0.25] * 3]


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


@pytest.mark.parametrize("option", ["none", {"early_stop": False}, 1, None])
def test_another_option_is_refused_by_maps_and_layers(option: Any) -> None:
    expected = "recompute: expected True, False or a Recompute, got "
    with pytest.raises(TypeError, match=expected):
        parallel_apply([nn.Identity()], [(torch.ones(3),)], recompute=option)
    with pytest.raises(TypeError, match=expected):
        MixtureOfExperts(TopKRouter(4, 1, top_k=1), [nn.Identity()], recompute=option)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("is_inplace", [True, False])
def test_rrelu_draws_its_noise_again_though_torch_saves_that_before(
    is_inplace: bool, early_stop: bool
) -> None:
    """Where nothing is saved after it, the second run stopped before noise was drawn, and gradients were garbage."""
    x = torch.randn(5, 4).double().requires_grad_()

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rrelu(x.clone(), 0.0, 1.0, training=True, inplace=is_inplace)

    def gradient(module: nn.Module, recompute: bool | Recompute) -> Tensor:
        torch.manual_seed(0)
        outputs = parallel_apply([module] * 3, [(x,), (2 * x,), (3 * x,)], recompute=recompute)
        return torch.autograd.grad(torch.stack(outputs).prod(0).sum(), x)[0]

    expected = gradient(Noisy(), recompute=False)
    assert torch.equal(gradient(Noisy(), Recompute(early_stop=early_stop)), expected)
    assert torch.equal(gradient(Checkpointed(Noisy(), early_stop=early_stop), recompute=False), expected)
