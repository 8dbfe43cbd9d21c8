"""Offloaded experts among hooks, threads, closures and other maps behave as the plain modules."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, assert_same_weights, both, ffn


def test_tensor_hooks_inside_fire() -> None:
    fired = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.linear.weight.register_hook(lambda grad: (fired.append("weight"), grad * 2)[1])

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda grad: (fired.append("result"), grad * 3)[1])
            return y

    torch.manual_seed(0)
    plain = Hooked()
    experts = OffloadedExperts([Hooked()], OPTIMIZERS["sgd"], max_resident_bytes=5000)
    for module in (plain, experts[0]):
        fired.clear()
        module(torch.ones(4, 8)).sum().backward()
        assert fired == ["result", "weight"]
    torch.testing.assert_close(experts.gradients(0)["linear.weight"], plain.linear.weight.grad)


def test_the_callers_saved_tensor_hooks_see_all_but_the_weights() -> None:
    experts, plain = both(ffn)
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = experts[0](x)
    assert torch.Size([4, 16]) in seen
    assert torch.Size([8, 16]) not in seen
    assert torch.Size([16, 8]) not in seen
    y.sum().backward()
    plain[0](x).sum().backward()
    assert_same_gradients(experts, plain)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("in_folders", [False, True])
def test_layers_with_memory_of_their_own_read_ahead(
    in_folders: bool, update: Literal["on_step", "on_backward"], tmp_path: Path
) -> None:
    """None takes the parts of its neighbour in, which have the same names in another store."""
    pairs = []
    for i in range(3):
        store = tmp_path / str(i) if in_folders else "ram"
        pairs.append(both(lambda: nn.Linear(8, 8), 4, max_resident_bytes=2000, store=store, update=update))
    layers, plain = [experts for experts, _ in pairs], [modules for _, modules in pairs]
    optimizers = [OPTIMIZERS["adam"](module.parameters()) for modules in plain for module in modules]
    read_ahead(*layers)
    for _ in range(3):
        x = torch.randn(4, 8)
        for own in (layers, plain):
            h = x
            for experts in own:
                h = torch.stack(parallel_apply(list(experts), [(h,)] * 4)).sum(0)
            h.square().mean().backward()
        for one in [*optimizers, *(layers if update == "on_step" else [])]:
            one.step()
            one.zero_grad()
    for experts, modules in pairs:
        assert_same_weights(experts, modules)
        experts.close()


def test_many_threads_call_experts_at_once() -> None:
    experts, plain = both(ffn, max_resident_bytes=9000)
    xs = [torch.randn(4, 8) for _ in range(16)]
    barrier = threading.Barrier(8)

    def work(k: int) -> None:
        barrier.wait()
        for i in range(k, 16, 8):
            sum(experts[(i + j) % 5](xs[i]) for j in range(3)).sum().backward()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(xs):
        sum(plain[(i + j) % 5](x) for j in range(3)).sum().backward()
    assert_same_gradients(experts, plain)
    assert experts.residency.peak_bytes <= 9000


def test_a_mixture_of_offloaded_experts_trains_as_one_of_plain_experts(store: str | Path) -> None:
    experts, plain = both(ffn, store=store, max_resident_bytes=9000)
    torch.manual_seed(1)
    layers = [MixtureOfExperts(TopKRouter(8, 5, top_k=2), list(modules)) for modules in (experts, plain)]
    layers[0].router.load_state_dict(layers[1].router.state_dict())
    optimizers = [
        [torch.optim.Adam(layers[0].parameters(), lr=0.01)],
        [torch.optim.Adam(layers[1].parameters(), lr=0.01)],
    ]
    for _ in range(5):
        x = torch.randn(16, 8)
        losses = []
        for layer, (optimizer,) in zip(layers, optimizers, strict=True):
            loss = layer(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        experts.step()
        experts.zero_grad()
        torch.testing.assert_close(*losses)
    assert_same_weights(experts, plain)
    experts.close()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("place", ["beside", "in a closure", "in one call"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_gradients_asked_for_of_others_are_gathered_by_none_offloaded(
    how: str, place: str, options: dict[str, Any]
) -> None:
    """They were, and updated with: a join wanted the gradients of all leaves or of none."""
    experts, _ = both(ffn, num=1)
    expert, other = experts[0], ffn()
    x = torch.randn(4, 8)
    calls = {
        "beside": [expert, other],
        "in a closure": [lambda x: expert(x), other],
        "in one call": [lambda x: other(expert(x))],
    }[place]
    asked = list(other.parameters())[:2]

    def loss_by(calls: Any, **how: Any) -> Tensor:
        return torch.stack(parallel_apply(calls, [(x,)] * len(calls), **how)).square().sum()

    def grads_of(loss: Tensor) -> Any:
        if how == "grad":
            return torch.autograd.grad(loss, asked)
        loss.backward(inputs=asked)
        assert [p.grad is None for p in other.parameters()] == [False, False, True, True, True, True]
        return [p.grad for p in asked]

    grads = [grad.clone() for grad in grads_of(loss_by(calls, **options))]
    assert set(experts.gradients(0).values()) == {None}
    other.zero_grad()
    torch.testing.assert_close(grads, [*torch.autograd.grad(loss_by(calls), asked)])


def test_an_expert_that_two_calls_of_a_map_reach_is_updated_once_though_weights_are_deferred() -> None:
    """The second part of one call was taken for the end of the backward, and the expert updated before the other's."""
    experts, (plain,) = both(ffn, num=1, update="on_backward")
    expert, optimizer = experts[0], OPTIMIZERS["adam"](plain.parameters())
    for _ in range(10):
        x = torch.randn(4, 8)
        calls = [[one, lambda x, one=one: 2 * one(x)] for one in (expert, plain)]
        outputs = parallel_apply(calls[0], [(x,), (x.sin(),)], defer_weight_grads=True)
        torch.stack(outputs).square().sum().backward()
        torch.stack([calls[1][0](x), calls[1][1](x.sin())]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(experts, [plain])


@pytest.mark.parametrize("keeps_statistics", [True, None])
@pytest.mark.parametrize("first", ["it", "a closure"])
def test_an_expert_that_a_closure_holds_as_well_changes_its_buffers_in_turn_or_is_refused(
    first: str, keeps_statistics: bool | None
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeps_statistics = keeps_statistics
            self.linear = nn.Linear(8, 8)
            self.count = nn.Buffer(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) * self.count
            self.count *= 3
            return y + self.count

    (expert,), (plain,) = both(Counting, num=1)
    xs = torch.randn(50_000, 8), torch.randn(2, 8)  # the first call is by far the longer one

    def calls(one: nn.Module) -> list[Any]:
        both_ways = [one, lambda x: one(x)]
        return both_ways if first == "it" else both_ways[::-1]

    if keeps_statistics is None:
        # Or PyTorch is the first to see it, in the hook that packs the buffer, and its error has this note.
        with pytest.raises(RuntimeError, match=r"calls that share a .*Counting to leave its buffers"):
            parallel_apply(calls(expert), [(x,) for x in xs])
    else:
        outputs = parallel_apply(calls(expert), [(x,) for x in xs])
        wanted = [call(x) for call, x in zip(calls(plain), xs, strict=True)]
        torch.testing.assert_close(outputs, wanted)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_backward_through_several_calls() -> None:
    """Its graph adds up what each returns for the weights, which are elsewhere."""
    experts = OffloadedExperts([ffn(), ffn()], OPTIMIZERS["sgd"], max_resident_bytes=5000)

    def grads(enabled: Any) -> list[Tensor]:
        experts.zero_grad()
        x = torch.ones(4, 8, requires_grad=True)
        with enabled:
            (experts[0](x) * experts[1](x * 2)).sum().backward()
        return [x.grad, *experts.gradients(0).values(), *experts.gradients(1).values()]

    torch.testing.assert_close(grads(compiled_autograd._enable(lambda graph: graph)), grads(nullcontext()))
