"""Tensors with history that leave a call otherwise than as its result: an error, never a sum with a part missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.comparison import one_after_another

NUM_CALLS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"defer_weight_grads": True},
    {"max_concurrency": 1},
]
ESCAPED = "expected tensors with history to leave a call as its result, got one that left by another way"


class KeepsLoss(nn.Module):
    """A body that keeps a loss on itself, for the trainer to add."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x).tanh()
        self.kept = y.square().mean()
        return y


def loss_of(experts: list[KeepsLoss], xs: list[Tensor], **options: Any) -> Tensor:
    outputs = parallel_apply(experts, [(x,) for x in xs], **options)
    return torch.stack([y.sum() for y in outputs]).sum() + sum(expert.kept for expert in experts)


def made() -> tuple[list[KeepsLoss], Tensor, list[Tensor]]:
    """Return experts, a weight of a trunk, and what comes of it for each expert."""
    weight = torch.randn(4, 4, requires_grad=True)
    trunk = torch.randn(5, 4) @ weight
    return [KeepsLoss() for _ in range(NUM_CALLS)], weight, [trunk * i for i in range(1, NUM_CALLS + 1)]


BACKWARDS: list[Callable[[Tensor, list[Tensor]], object]] = [
    lambda loss, asked: loss.backward(),
    lambda loss, asked: loss.backward(inputs=asked),
    lambda loss, asked: torch.autograd.grad(loss, asked),
    lambda loss, asked: torch.autograd.grad(loss, asked, retain_graph=True),
    lambda loss, asked: torch.autograd.grad(loss, asked, create_graph=True),
    lambda loss, asked: torch.autograd.grad([loss, loss.sin()], asked),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("run", BACKWARDS, ids=range(len(BACKWARDS)))
def test_a_backward_that_would_miss_what_has_escaped_says_so(
    options: dict[str, Any], run: Callable[[Tensor, list[Tensor]], object]
) -> None:
    for asks_for_inputs in (False, True):
        experts, weight, xs = made()
        with pytest.raises(RuntimeError, match=ESCAPED):
            run(loss_of(experts, xs, **options), xs if asks_for_inputs else [weight])


def test_what_escaped_and_is_not_in_the_loss_harms_nobody() -> None:
    experts, weight, xs = made()
    args = [(x,) for x in xs]
    wanted = [weight, *xs, *nn.ModuleList(experts).parameters()]
    outputs, natively = parallel_apply(experts, args), one_after_another(experts, args)
    for asked in (wanted, wanted[:1]):
        both = [
            torch.autograd.grad([y.sum() for y in ys], asked, retain_graph=True) for ys in (outputs, natively)
        ]
        assert all(map(torch.equal, *both))
    torch.autograd.backward([y.sum() for y in outputs])
    assert weight.grad is not None


def test_what_escaped_from_calls_that_nobody_asks_about_is_not_complained_of() -> None:
    (kept, other, _), _, (x, _, _) = made()
    z = torch.randn(5, 4, requires_grad=True)
    y, of_z = parallel_apply([kept, other], [(x,), (z,)])
    loss, other.kept = y.sum() + of_z.sum() + kept.kept, torch.zeros(())
    (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad(other(z).sum(), z)[0])
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(loss, [z, x], retain_graph=True)
    torch.autograd.grad(loss, z)


def test_a_routing_that_a_hook_keeps_within_an_expert_is_not_left_out() -> None:
    def layer(*experts: nn.Module) -> MixtureOfExperts:
        return MixtureOfExperts(TopKRouter(4, num_experts=2, top_k=2), experts)

    nested = layer(layer(KeepsLoss(), KeepsLoss()), layer(KeepsLoss(), KeepsLoss()))
    routings: list[Any] = []
    for router in (module for module in nested.modules() if isinstance(module, TopKRouter)):
        router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    x = torch.randn(6, 4, requires_grad=True)
    y = nested(x)
    outer, *inner = routings
    assert len(inner) == 2
    torch.autograd.grad(y.sum() + outer.z_loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(y.sum() + sum(one.z_loss for one in routings), x)


def test_what_is_asked_for_may_lie_on_the_way_to_what_is_asked_for_as_well() -> None:
    for make in (
        lambda y, k, x: torch.autograd.grad((z := y + k).pow(2).sum(), [z, x]),
        lambda y, k, x: (z := y + k).pow(2).sum().backward(inputs=[z, x]),
        lambda y, k, x: torch.autograd.grad(y.pow(2).sum() + k.sum(), [k, x]),
    ):
        expert = KeepsFeatures()
        x = torch.randn(5, 4, requires_grad=True)
        y = torch.stack(parallel_apply([expert, KeepsFeatures()], [(x,), (x,)])).sum(0)
        with pytest.raises(RuntimeError, match=ESCAPED):
            make(y, expert.kept, x)


class KeepsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.kept = self.trunk(x).tanh()
        return self.head(self.kept)


class KeepsInput(nn.Module):
    kept = torch.zeros(())

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.kept = x
        return x * y


def test_an_input_as_a_call_knows_it_may_be_asked_for_as_well() -> None:
    x, y = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    expert, z = KeepsInput(), x * 2
    of_call, _ = parallel_apply([expert, KeepsInput()], [(z, y)] * 2)
    of_others = torch.stack(parallel_apply([KeepsFeatures()] * 2, [(x,)] * 2))
    for output, asked in ((of_call, x), (of_call, y), (of_call, z), (of_others, x)):
        with pytest.raises(RuntimeError, match=ESCAPED):
            torch.autograd.grad(
                output.sum() + expert.kept.sin().sum(), [expert.kept, asked], retain_graph=True
            )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_weight_that_an_input_was_computed_with_may_serve_maps_within_calls(
    options: dict[str, Any],
) -> None:
    layer = nn.Linear(4, 4)

    def call(apply: Callable[..., Any], x: Tensor) -> Any:
        again = checkpoint(torch.tanh, x, use_reentrant=False)
        return again + torch.stack(apply([layer, layer], [(x,), (x + 1,)])).sum(0)

    both = []
    for apply in (functools.partial(parallel_apply, **options), one_after_another):
        x = layer(torch.ones(3, 4)).tanh()
        outputs: Any = apply([functools.partial(call, apply)] * 2, [(x,), (x,)])
        both.append(torch.autograd.grad(torch.stack(outputs).pow(2).sum(), [*layer.parameters()]))
    torch.testing.assert_close(*both)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class DoublesToo(Doubles):
    pass


def test_what_escaped_is_seen_by_the_calls_that_a_backward_does_come_to() -> None:
    x, z = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    first, second = KeepsFeatures(), KeepsFeatures()
    parallel_apply([first, KeepsFeatures()], [(x,), (x,)])
    of_another_map = parallel_apply([KeepsFeatures()] * 2, [(x,), (x,)])[0]
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(of_another_map.sum() + first.kept.pow(2).sum(), x)
    # calls whose inputs have different histories are nodes of their own
    of_first, _ = parallel_apply([first, second], [(Doubles.apply(x),), (inputs := DoublesToo.apply(z),)])
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(of_first.sum() + second.kept.pow(2).sum() + z.sum(), [x, z])
    del inputs


def test_a_weight_that_calls_take_and_reach_besides_is_no_fault() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def inner(x: Tensor, own: Tensor) -> Any:
        def call(y: Tensor) -> Any:
            return torch.tanh(y @ own @ weight @ h)

        h = own * 2
        return torch.stack(parallel_apply([call] * 2, [(x,), (x * own.sum(),)])).sum(0)

    args: list[Any] = [(torch.randn(3, 4), weight), (torch.randn(3, 4), weight)]
    sums = [
        torch.stack(apply([inner] * 2, args)).pow(2).sum() for apply in (parallel_apply, one_after_another)
    ]
    both = [torch.autograd.grad(one, weight) for one in sums]
    torch.testing.assert_close(*both)


def test_what_escaped_a_map_within_a_call_that_is_made_again_is_named() -> None:
    class Loses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([KeepsFeatures(), KeepsFeatures()])

        def forward(self, x: Tensor) -> Any:
            parallel_apply(self.experts, [(x * 2,)] * 2, recompute=True)
            return self.experts[0].kept + x

    x = torch.randn(3, 4, requires_grad=True)
    outputs = parallel_apply([Loses(), Loses()], [(x,)] * 2, recompute=True)
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.stack(outputs).sum().backward()


def test_what_escaped_a_map_within_a_call_is_followed_to_what_that_call_takes() -> None:
    inner = [KeepsFeatures(), KeepsFeatures()]

    def call(x: Tensor) -> Tensor:
        return torch.stack(parallel_apply(inner, [(x * 2,)] * 2)).sum(0)

    x, z = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    y = torch.stack(parallel_apply([call, lambda y: y * z], [(x.sin(),)] * 2)).sum()
    loss = y + inner[0].kept.pow(2).sum()
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(loss, x, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, z)
    assert torch.equal(grad, x.sin())


# ---- used within a call of another map


class Uses(nn.Module):
    """Computes with what an earlier expert keeps, where no look at its attributes finds it."""

    def __init__(self, earlier: KeepsFeatures, depth: int = 0) -> None:
        super().__init__()
        self.layer, self.earlier, self.depth = nn.Linear(4, 4), [lambda: earlier], depth

    def forward(self, x: Tensor) -> Tensor:
        earlier = self.earlier[0]()
        if self.depth:
            (inner, _) = parallel_apply([Uses(earlier, self.depth - 1), nn.Tanh()], [(x,), (x,)])
            return x + inner
        return self.layer(x) + earlier.kept


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_escaped_and_serves_in_a_call_of_another_map_is_not_left_out(
    options: dict[str, Any], depth: int
) -> None:
    first = [KeepsFeatures(), KeepsFeatures()]
    second = [Uses(expert, depth) for expert in first]
    x, z, alone = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    y = torch.stack(parallel_apply(first, [(x,), (alone,)], **options)).sum(0)
    for given, asked in ((y, x), (y, [z, x]), (y * z, [z, x]), (z, [z, alone])):
        outputs = parallel_apply(second, [(given,)] * 2, **options)
        loss = torch.stack(outputs).sin().sum() + (y * z).sum()
        with pytest.raises(RuntimeError, match=ESCAPED):
            torch.autograd.grad(loss, asked, retain_graph=True)
        with pytest.raises(RuntimeError, match=ESCAPED):
            loss.backward(retain_graph=True)


def test_what_serves_in_a_call_of_another_map_is_not_complained_of_where_nobody_asks_about_it() -> None:
    first = [KeepsFeatures(), KeepsFeatures()]
    x, z = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    _, of_z = parallel_apply(first, [(x,), (z,)])
    outputs = parallel_apply([Uses(first[0]), nn.Tanh()], [(of_z,)] * 2)
    (grad,) = torch.autograd.grad(torch.stack(outputs).sum(), z, retain_graph=True)
    assert grad.any()
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(torch.stack(outputs).sum(), [z, x])


# ---- of offloaded experts


class KeepsPenalty(nn.Module):
    """Keeps what it computes of its input alone, and what it computes with its weights as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.penalty, self.kept = nn.Linear(4, 4), torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.penalty, self.kept = (3 * x).sum(), self.layer(x).tanh()
        return 2 * self.kept


def offloaded(modules: list[KeepsPenalty], *, is_trained: bool = True, **options: Any) -> OffloadedExperts:
    optimizer = (lambda parameters: torch.optim.SGD(parameters, lr=0.1)) if is_trained else None
    for module in modules:
        module.requires_grad_(is_trained)
    return OffloadedExperts(modules, optimizer, max_resident_bytes=10_000, store="ram", **options)


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("run", BACKWARDS, ids=range(len(BACKWARDS)))
def test_what_an_offloaded_expert_keeps_of_its_input_is_not_left_out(
    run: Callable[[Tensor, list[Tensor]], object], is_trained: bool, num_microbatches: int | None
) -> None:
    modules = [KeepsPenalty() for _ in range(NUM_CALLS)]
    experts = offloaded(modules, is_trained=is_trained, num_microbatches=num_microbatches)
    for apply in (parallel_apply, functools.partial(parallel_apply, recompute=True), one_after_another):
        weight = torch.randn(4, 4, requires_grad=True)
        x = torch.randn(6, 4) @ weight
        outputs: Any = apply([*experts], [(x,)] * NUM_CALLS)
        loss = torch.stack(outputs).sum() + sum(module.penalty for module in modules)
        with pytest.raises(RuntimeError, match=ESCAPED):
            run(loss, [weight])


def test_what_an_offloaded_expert_keeps_is_seen_where_its_weights_are_not_asked_for() -> None:
    modules = [KeepsPenalty() for _ in range(NUM_CALLS)]
    experts = offloaded(modules)
    for apply in (parallel_apply, one_after_another):
        x, z = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
        # tensors that nobody holds any longer
        outputs: Any = apply([*experts], [(x * z,), (x * 2,), (z * 2,)])
        loss = torch.stack(outputs).sum() + modules[1].kept.pow(2).sum()
        torch.autograd.grad(loss, z, retain_graph=True)
        with pytest.raises(RuntimeError, match=ESCAPED):
            torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="of another use|freed|" + ESCAPED):
            loss.backward()


def test_a_tensor_that_an_offloaded_expert_keeps_is_not_asked_for_beside_others() -> None:
    x, z = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    module = KeepsPenalty()
    y = offloaded([module])[0](x * z)
    for asked in ([module.kept, x], [module.kept, z]):
        with pytest.raises(RuntimeError, match=ESCAPED):
            torch.autograd.grad(y.pow(2).sum() + module.kept.sum(), asked, retain_graph=True)


def test_what_an_offloaded_expert_within_a_call_keeps_may_not_be_part_of_the_calls_result() -> None:
    module = KeepsPenalty()
    (expert,) = offloaded([module])

    def call(x: Tensor) -> Tensor:
        return expert(x) + module.penalty

    x = torch.randn(6, 4, requires_grad=True)
    outputs = parallel_apply([call, torch.sin], [(x,)] * 2)
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.stack(outputs).sum().backward()


def test_what_an_offloaded_expert_keeps_and_is_not_in_the_loss_harms_nobody() -> None:
    module, plain = KeepsPenalty(), KeepsPenalty()
    plain.load_state_dict(module.state_dict())
    (expert,) = offloaded([module])
    x = torch.randn(6, 4, requires_grad=True)
    for step in (expert, plain):
        step(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * torch.autograd.grad(plain(x).sum(), x)[0])
