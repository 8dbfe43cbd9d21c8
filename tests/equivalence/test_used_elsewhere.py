"""Experts that are offloaded or on a server, and whose results were computed from each other: right, or an error."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.module_tracker import ModuleTracker

from moe_autograd import parallel_apply
from moe_autograd.autograd.hooks import before_backward
from moe_autograd.autograd.modules.computed_from import HAVE_USES
from tests.support.several_results import (
    Chain,
    D,
    Doubled,
    Features,
    Heads,
    Passing,
    Where,
    both,
    expert_of,
    results_of,
)

everywhere = pytest.mark.parametrize(
    "where", ["offloaded", "in micro-batches", "computed again", "remote", "remote, computed again"]
)


def by_name(loss: Tensor, looked_at: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss, looked_at, allow_unused=True)[0]


def by_inputs(loss: Tensor, looked_at: Tensor) -> Tensor | None:
    loss.backward(inputs=[looked_at])
    return looked_at.grad


def by_hook(loss: Tensor, looked_at: Tensor) -> Tensor | None:
    seen = []
    looked_at.register_hook(seen.append)
    loss.backward()
    return seen[0]


def by_hook_of_several(loss: Tensor, looked_at: Tensor) -> Tensor | None:
    seen: list[Tensor | None] = []
    register_multi_grad_hook([looked_at], seen.extend)
    loss.backward()
    return seen[0]


def by_retaining(loss: Tensor, looked_at: Tensor) -> Tensor | None:
    looked_at.retain_grad()
    loss.backward()
    return looked_at.grad


LOOKS = [by_name, by_inputs, by_hook, by_hook_of_several, by_retaining]


@everywhere
@pytest.mark.parametrize("in_a_map", [False, True])
def test_a_result_that_others_were_computed_from_may_not_be_looked_at_with_these(
    where: Where, in_a_map: bool
) -> None:
    with expert_of(both(Features)[0], where) as expert:
        for look, weight in itertools.product(LOOKS, (0.0, 1.0)):
            _, (features, classes) = results_of(expert, where, in_a_map=in_a_map)
            loss = classes.square().sum() + (weight * features.sum() if weight else 0)
            with pytest.raises(
                RuntimeError, match=r"expected (nobody to look|a result that is asked for by name)"
            ):
                look(loss, features)


@everywhere
@pytest.mark.parametrize("in_a_map", [False, True])
def test_what_is_looked_at_alone_gets_what_it_gets_in_plain_pytorch(where: Where, in_a_map: bool) -> None:
    module, plain = both(Features)
    with expert_of(module, where) as expert:
        for look, place in itertools.product(LOOKS, (0, 1)):
            found = []
            for each in (expert, plain):
                _, results = results_of(each, where if each is expert else "offloaded", in_a_map=in_a_map)
                loss = results[place].square().sum() + (results[0].sum() if place else 0)
                found.append(look(loss, results[place]))
            torch.testing.assert_close(*found)


@everywhere
def test_where_nobody_looks_gradients_are_those_of_plain_pytorch(where: Where) -> None:
    module, plain = both(Chain)
    with expert_of(module, where) as expert:
        grads = []
        for each in (expert, plain):
            x, results = results_of(each, where if each is expert else "offloaded")
            loss = torch.stack([result.square().sum() for result in results]).sum()
            grads.append(torch.autograd.grad(loss, x)[0])
        torch.testing.assert_close(*grads)


@everywhere
def test_results_that_were_not_computed_from_each_other_may_be_looked_at(
    where: Where,
) -> None:
    module, plain = both(Heads)
    with expert_of(module, where) as expert:
        for look in LOOKS:
            found = []
            for each in (expert, plain):
                _, (one, other) = results_of(each, where if each is expert else "offloaded")
                found.append(look(one.square().sum() + other.sin().sum(), one))
            torch.testing.assert_close(*found)


@everywhere
def test_of_a_chain_each_refuses_for_all_below_it(where: Where) -> None:
    with expert_of(both(Chain)[0], where) as expert:
        for looked_at, with_gradient in ((0, 1), (0, 2), (1, 2)):
            _, results = results_of(expert, where)
            with pytest.raises(RuntimeError, match="expected nobody to look"):
                by_hook(results[with_gradient].sum(), results[looked_at])
        for looked_at, with_gradient in ((1, 0), (2, 0), (2, 1)):
            _, results = results_of(expert, where)
            assert by_name(results[with_gradient].sum(), results[looked_at]) is None


@pytest.mark.parametrize("where", ["offloaded", "remote"])
@pytest.mark.parametrize("place", [0, 1])
def test_one_tensor_that_is_returned_twice_was_computed_from_itself(where: Where, place: int) -> None:
    with expert_of(both(Doubled)[0], where) as expert:
        _, results = results_of(expert)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            by_hook(results[1 - place].sum(), results[place])


def test_an_input_that_is_returned_was_used_as_well() -> None:
    with expert_of(both(Passing)[0], "offloaded") as expert:
        _, results = results_of(expert)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            by_hook(results[1].sum(), results[0])


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_hooks_of_users_are_not_called_before_the_error(where: Where) -> None:
    with expert_of(both(Features)[0], where) as expert:
        _, (features, classes) = results_of(expert)
        called: list[Any] = []
        features.register_hook(called.append)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            classes.sum().backward()
        assert not called


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_who_looks_may_have_let_go_of_the_result(where: Where) -> None:
    with expert_of(both(Features)[0], where) as expert:
        _, (features, classes) = results_of(expert)
        features.register_hook(lambda grad: None)
        loss = classes.sum() + features.sum()
        del features
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            loss.backward()


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_a_hook_that_was_removed_does_not_look(where: Where) -> None:
    with expert_of(both(Features)[0], where) as expert:
        x, (features, classes) = results_of(expert)
        features.register_hook(lambda grad: None).remove()
        (classes.sum() + features.sum()).backward()
        assert x.grad is not None


def test_who_looks_at_what_a_result_was_changed_into_looks_at_another_tensor() -> None:
    with expert_of(both(Features)[0], "remote") as expert:
        _, (features, classes) = results_of(expert)
        features.mul_(2)
        features.retain_grad()
        (features.sum() + classes.sum()).backward()
        assert torch.equal(features.grad, torch.ones_like(features))


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_a_hook_on_the_node_looks_at_no_result(where: Where) -> None:
    with expert_of(both(Features)[0], where) as expert:
        x, (features, classes) = results_of(expert)
        seen = []
        features.grad_fn.register_prehook(seen.append)
        (features.sum() + classes.sum()).backward()
        assert len(seen[0]) == 2
        assert x.grad is not None


def test_the_error_names_the_expert() -> None:
    with expert_of(both(Features)[0], "remote") as expert:
        _, (features, classes) = results_of(expert)
        with pytest.raises(RuntimeError, match=r"^expert 'e\.0': expected nobody to look"):
            by_name(classes.sum(), features)


def test_what_a_caller_computes_further_leads_to_the_results_of_a_call_around() -> None:
    """The features are a result of the map's call, and so is what that computes from the classes."""

    class Around(nn.Module):
        def __init__(self, expert: nn.Module) -> None:
            super().__init__()
            self.expert = expert

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            time.sleep(0)  # so that it is not made in turn
            features, classes = self.expert(x)
            return features, classes.sin(), features.cos()

    module, plain = both(Features)
    with expert_of(module, "offloaded") as expert:
        x, (features, further, _) = results_of(Around(expert), in_a_map=True)
        with pytest.raises(RuntimeError, match="expected a result that is asked for by name"):
            by_name(further.sum(), features)
        _, (features, further, _) = results_of(Around(expert), in_a_map=True)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            by_hook(further.sum(), features)
        x, (features, further, _) = results_of(Around(expert), in_a_map=True)
        expected_x, (_, expected, _) = results_of(Around(plain))
        further.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, expected_x.grad)


def test_a_map_within_an_expert_whose_call_changes_an_input_is_seen_through() -> None:
    """Results of such a call do not lead to each other in the map's graph."""

    class Maps(Features):
        def call(self, x: Tensor) -> tuple[Tensor, Tensor]:
            time.sleep(0)
            return super().forward(x.mul_(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return parallel_apply([self.call, torch.sin], [(x * 1,), (x,)])[0]

    class MapsTwo(Maps):
        """Its last result was computed from both of the others."""

        def call(self, x: Tensor) -> tuple[Tensor, ...]:
            one, other = super().call(x)[0], x.cos()
            return one, other, one * other

    with expert_of(both(Maps)[0], "offloaded") as expert:
        for look in LOOKS:
            _, (features, classes) = results_of(expert)
            with pytest.raises(RuntimeError, match="expected nobody to look"):
                look(classes.sum(), features)
    with expert_of(both(MapsTwo)[0], "offloaded") as expert:
        for look, place in itertools.product(LOOKS, (0, 1)):
            _, results = results_of(expert)
            with pytest.raises(RuntimeError, match="expected nobody to look"):
                look(results[2].sum(), results[place])


def test_a_result_can_be_saved_without_a_warning_of_hooks(
    recwarn: pytest.WarningsRecorder, tmp_path: Any
) -> None:
    with expert_of(both(Features)[0], "offloaded") as expert:
        torch.save(results_of(expert)[1], tmp_path / "results.pt")
    assert not [each for each in recwarn if "hook" in str(each.message)]


def test_nothing_is_kept_of_a_graph_that_is_gone() -> None:
    with expert_of(both(Features)[0], "offloaded") as expert:
        _, (features, classes) = results_of(expert)
        node = weakref.ref(features.grad_fn)
        assert node() in HAVE_USES
        (features.sum() + classes.sum()).backward()
        del features, classes
        assert node() is None or (gc.collect() and node() is None)


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_a_result_that_is_returned_twice_goes_without_garbage_collection(where: Where, no_gc: None) -> None:
    """Each of the two was computed from the other; what a user's hook holds goes with them."""

    class Held: ...

    with expert_of(both(Doubled)[0], where) as expert:
        _, (one, other) = results_of(expert)
        held = Held()
        one.register_hook(lambda grad, held=held: None)
        reference = weakref.ref(held)
        one.sum().backward()
        del one, other, held
        assert reference() is None


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_a_gradient_of_zeros_is_not_missed(where: Where) -> None:
    """So `torch.stack` has it for all that it has stacked."""
    with expert_of(both(Features)[0], where) as expert:
        _, results = results_of(expert)
        results[0].retain_grad()
        torch.stack(results)[0].sum().backward()
        assert torch.equal(results[0].grad, torch.ones_like(results[0]))


def test_gradients_of_many_backwards_at_once_are_refused_by_the_same_words() -> None:
    with expert_of(both(Features)[0], "offloaded") as expert:
        x, (features, classes) = results_of(expert)
        features.register_hook(lambda grad: None)
        many = torch.eye(classes.numel()).reshape(-1, *classes.shape)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            torch.autograd.grad(classes, x, many, is_grads_batched=True, retain_graph=True)
        (grads,) = torch.autograd.grad(features, x, many, is_grads_batched=True)
        assert grads.shape == (len(many), *x.shape)


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_zeros_that_a_hook_may_change_are_not_let_pass(where: Where) -> None:
    with expert_of(both(Features)[0], where) as expert:
        _, (features, classes) = results_of(expert)
        features.retain_grad()
        classes.register_hook(lambda grad: grad + 1)
        with pytest.raises(RuntimeError, match="expected nobody to look"):
            (features.sum() + 0 * classes.sum()).backward()


@everywhere
def test_results_that_calls_on_threads_take_are_looked_at_by_none(where: Where) -> None:
    """What refuses at one sleeps while these calls may have it."""

    def doubled(result: Tensor) -> Tensor:
        time.sleep(0)  # so that it is not made in turn
        return 2 * result

    module, plain = both(Chain)
    with expert_of(module, where) as expert:
        x, results = results_of(expert, where)
        torch.stack(parallel_apply([doubled] * 3, [(result,) for result in results])).sum().backward()
        expected, results = results_of(plain)
        torch.stack([2 * result for result in results]).sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)


@everywhere
def test_who_wants_to_know_that_a_backward_comes_looks_at_no_gradient(where: Where) -> None:
    """A user's `before_backward`, as prefetching has it, and counters as `FlopCounterMode`."""
    module, plain = both(Features)
    begun: list[str] = []
    with expert_of(module, where) as expert:
        grads = []
        for each in (expert, plain):
            x, (features, classes) = results_of(each, where if each is expert else "offloaded")
            before_backward((features, classes), lambda: begun.append("backward"))
            with ModuleTracker():
                after = plain.classes(features)
            (after + classes).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)
    assert begun == ["backward"] * 2


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_hooks_of_fsdp_look_at_no_gradient(where: Where) -> None:
    """It puts them on all results of a module, to be told that a backward has come so far."""

    class Model(nn.Module):
        def __init__(self, expert: nn.Module) -> None:
            super().__init__()
            self.trunk, self.expert = nn.Linear(D, D), expert

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.expert(self.trunk(x))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with expert_of(both(Features)[0], where) as expert:
            model = Model(expert)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            _, (features, classes) = results_of(model)
            (features.sum() + classes.sum()).backward()
            assert model.trunk.weight.grad is not None
    finally:
        dist.destroy_process_group()
