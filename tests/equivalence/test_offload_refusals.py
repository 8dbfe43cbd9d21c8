"""Where an offloaded expert cannot do what the plain module does, it says so: no gradient is lost in silence."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import CheckpointError
from tests.support.offloading import OPTIMIZERS, Make

sgd = OPTIMIZERS["sgd"]
WITH_HISTORY = torch.ones(4, requires_grad=True) * 2


def offloaded(*modules: nn.Module, **options: Any) -> OffloadedExperts:
    return OffloadedExperts(modules, sgd, max_resident_bytes=10_000, **options)


class Hidden(nn.Module):
    """Computes with a weight that PyTorch does not know to be its own."""

    def __init__(self, hidden: nn.Module | Tensor) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.hidden = [hidden]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden[0]
        return self.own(hidden * x if isinstance(hidden, Tensor) else hidden(x))


def add_a_weight(module: nn.Module) -> None:
    module.scale = nn.Parameter(torch.ones(4))
    module.register_forward_hook(lambda module, _, y: y * module.scale)


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize(
    ("module", "change"),
    [
        (lambda: Hidden(nn.Linear(4, 4)), None),
        (lambda: Hidden(WITH_HISTORY), None),
        (lambda: Hidden(offloaded(nn.Linear(4, 4))[0]), None),
        (lambda: nn.Linear(4, 4), add_a_weight),
    ],
    ids=["a hidden module", "a tensor with history", "an offloaded expert", "a weight that was added"],
)
def test_a_weight_that_is_not_the_experts_own_is_refused(
    module: Callable[[], nn.Module], change: Callable[[nn.Module], None] | None, num_microbatches: int | None
) -> None:
    own = module()
    experts = offloaded(own, num_microbatches=num_microbatches)
    if change is not None:
        change(own)
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected a call to compute with its inputs and its own "
    ):
        experts[0](torch.ones(2, 4))
    with torch.no_grad():
        assert experts[0](torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("optimizer", [sgd, None], ids=["frozen", "never trained"])
def test_so_it_is_by_an_expert_that_is_not_trained_where_no_input_requires_a_gradient(
    optimizer: Make | None, num_microbatches: int | None
) -> None:
    hidden = nn.Linear(4, 4)
    options: Any = {"max_resident_bytes": 10_000, "num_microbatches": num_microbatches}
    expert = OffloadedExperts([Hidden(hidden)], optimizer, **options)[0]
    if optimizer is not None:
        expert.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"expert-00000: expected .* inputs and its own weights, got a te"):
        expert(torch.ones(2, 4))
    with torch.no_grad():
        assert expert(torch.ones(2, 4)).shape == (2, 4)
    hidden.requires_grad_(False)
    assert not expert(torch.ones(2, 4)).requires_grad


def test_what_another_computes_with_is_fine_where_it_needs_no_gradient() -> None:
    experts = offloaded(Hidden(nn.Linear(4, 4).requires_grad_(False)))
    experts[0](torch.ones(2, 4)).sum().backward()
    assert experts.gradients(0)["own.weight"] is not None


class Force(nn.Linear):
    """The gradient of an energy by its input."""

    def __init__(self, leaf_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(4, 1)
        self.leaf_of = leaf_of

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaf_of(x)
        return torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)[0]


def test_a_call_that_makes_a_leaf_of_an_input_is_told_to_take_the_input() -> None:
    refused, taken = Force(lambda x: x.detach().requires_grad_()), Force(Tensor.requires_grad_)
    with pytest.raises(RuntimeError, match=r"take the input itself \(x\.requires_grad_\(\)\)"):
        offloaded(refused)[0](torch.ones(2, 4))
    plain = copy.deepcopy(taken)
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        experts = offloaded(copy.deepcopy(taken))
        plain.zero_grad()
        for module in (plain, experts[0]):
            module(x).square().sum().backward()
        torch.testing.assert_close(experts.gradients(0)["weight"], plain.weight.grad)
    never_trained = OffloadedExperts([copy.deepcopy(taken)], max_resident_bytes=10_000)
    torch.testing.assert_close(never_trained[0](torch.ones(2, 4)), plain(torch.ones(2, 4)).detach())


def test_a_weight_that_was_frozen_and_is_trained_later_is_told_before_anything_is_computed() -> None:
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    experts = offloaded(module)
    module.weight.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected weight to stay frozen, as it was when it was ta"
    ):
        experts[0](torch.ones(2, 4))
    module.weight.requires_grad_(False)
    module.bias.requires_grad_(False)  # the other way it is fine
    x = torch.ones(2, 4, requires_grad=True)
    experts[0](x).sum().backward()
    assert experts.gradients(0) == {"weight": None, "bias": None}
    assert x.grad is not None


def test_load_state_dict_says_how_weights_of_an_offloaded_expert_are_set() -> None:
    expert, state = offloaded(nn.Linear(4, 4))[0], nn.Linear(4, 4).state_dict()
    with pytest.raises(
        RuntimeError,
        match=r"expert 'expert-00000': expected no weights, got weight, bias\. Load them into the",
    ):
        expert.load_state_dict(state)
    assert expert.load_state_dict(state, strict=False).unexpected_keys == ["weight", "bias"]
    model = nn.Sequential(nn.Linear(4, 4), expert)
    model.load_state_dict(model.state_dict())
    expert.load_state_dict(expert.state_dict())


def test_a_hook_that_waits_for_grad_is_refused_though_it_comes_later() -> None:
    module = nn.Linear(4, 4)
    experts = offloaded(module)
    handle = module.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(
        ValueError, match="expected no post-accumulate-grad hooks, got 1 on weight of expert-00000"
    ):
        experts[0](torch.ones(2, 4))
    handle.remove()
    experts[0](torch.ones(2, 4)).sum().backward()


# ---- weights that are used outside, too


def tied(weight: nn.Parameter) -> Tensor:
    outside = nn.Linear(4, 4, bias=False)
    outside.weight = weight
    return outside(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def penalty(weight: nn.Parameter) -> Tensor:
    return weight.square().sum()


def in_a_map(weight: nn.Parameter) -> Tensor:
    return torch.stack(parallel_apply([penalty, penalty], [(weight,), (weight,)])).sum()


@pytest.mark.parametrize("use", [tied, penalty, in_a_map])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_the_gradient_of_another_use_of_a_weight_is_refused_and_not_lost(
    use: Callable[[nn.Parameter], Tensor], update: str
) -> None:
    module = nn.Linear(4, 4)
    experts, weight, x = offloaded(module, update=update), module.weight, torch.ones(2, 4)
    with pytest.raises(
        RuntimeError, match="expert-00000: expected weight to be used in calls of the expert alone"
    ):
        (experts[0](x).sum() + use(weight)).backward()
    assert weight.grad is None
    experts.zero_grad()
    before = experts.state_dict(0)["weight"]
    experts[0](x).sum().backward()
    experts.step()
    torch.testing.assert_close(experts.state_dict(0)["weight"], before - 0.2)
    with torch.no_grad():
        assert use(weight).isfinite()


# ---- results that share memory


class Sharing(nn.Module):
    """Returns what shares memory with its input, or with another of its results."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.result = nn.Parameter(torch.ones(4)), result

    def forward(self, x: Tensor) -> Any:
        return self.result(x), x * self.weight


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[1:]


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "the input": lambda x: (x,),
    "a view of it": lambda x: (x[1:],),
    "two that share": twice,
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_that_share_memory_have_the_gradients_of_the_plain_module(kind: str) -> None:
    def gradient(module: Any) -> Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        shared, other = module(x * 1)
        (sum(y.square().sum() for y in shared) + other.sum()).backward()
        assert x.grad is not None
        return x.grad

    plain = Sharing(RESULTS[kind])
    torch.testing.assert_close(gradient(offloaded(copy.deepcopy(plain))[0]), gradient(plain))


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_that_shares_memory_cannot_be_changed_in_place(kind: str) -> None:
    """In a plain module PyTorch would give the others a new history."""
    (y, *_), _ = offloaded(Sharing(RESULTS[kind]))[0](torch.ones(3, 4, requires_grad=True) * 1)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(2)


@pytest.mark.parametrize("kind", ["the input", "a view of it"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_after_a_change_of_an_input_a_result_that_shares_its_memory_cannot_be_used(
    kind: str, is_alone: bool
) -> None:
    class Alone(Sharing):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)[0][0]

    x = torch.ones(3, 4, requires_grad=True) * 1
    y = offloaded((Alone if is_alone else Sharing)(RESULTS[kind]))[0](x)
    x.mul_(2)
    with pytest.raises(
        RuntimeError, match="is a view and its base or another view of its base has been modified"
    ):
        (y if is_alone else y[0][0]).sum().backward()


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_objects_that_hold_results_are_refused_where_these_would_be_wrong(
    num_microbatches: int | None,
) -> None:
    class Boxes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"box": types.SimpleNamespace(y=[super().forward(x)]), "size": x.shape}

    experts = offloaded(Boxes(4, 4), num_microbatches=num_microbatches)
    expected = (
        r"expert-00000: expected tensors, also in tuples, lists and dicts, from a call, got SimpleNamespace"
    )
    with pytest.raises(TypeError, match=expected):
        experts[0](torch.ones(2, 4))
    with torch.no_grad():
        if num_microbatches is None:
            assert experts[0](torch.ones(2, 4))["box"].y[0].shape == (2, 4)
        else:
            with pytest.raises(TypeError, match=expected):
                experts[0](torch.ones(2, 4))


def test_a_result_of_its_own_may_be_changed_in_place() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    y = offloaded(nn.Linear(4, 4))[0](x * 1)
    y.mul_(2)
    y.sum().backward()


# ---- what is made of others, or holds some


def two_of(tensor: Tensor) -> TwoTensor:
    return TwoTensor(tensor.clone(), tensor.clone())


def test_weights_that_are_made_of_other_tensors_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(two_of(module.weight.detach()))
    with pytest.raises(TypeError, match=r"got TwoTensor, which is made of other tensors \(name='weight'\)"):
        offloaded(module)


class Remembers(torch.optim.SGD):
    """Keeps what a function makes of the first gradient."""

    remembered: Callable[[Tensor], Any]

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("kept", type(self).remembered(parameter.grad))
        super().step()


def test_optimizer_state_that_is_made_of_other_tensors_is_refused_and_not_turned_into_plain_numbers() -> None:
    class Optimizer(Remembers):
        remembered = two_of

    experts = OffloadedExperts([nn.Linear(4, 4)], Optimizer, max_resident_bytes=10_000)
    experts[0](torch.ones(3, 4)).sum().backward()
    with pytest.raises(TypeError, match=r"got TwoTensor, .* \(name='kept.weight'\)"):
        experts.step()


def test_optimizer_state_that_holds_tensors_in_a_list_trains_and_cannot_be_saved(tmp_path: Path) -> None:
    class Optimizer(Remembers):
        @staticmethod
        def remembered(gradient: Tensor) -> list[Tensor]:
            return [gradient.clone()]

    with OffloadedExperts([nn.Linear(4, 4)], Optimizer, max_resident_bytes=10_000, store=tmp_path) as experts:
        experts[0](torch.ones(3, 4)).sum().backward()
        experts.step()
        with pytest.raises(CheckpointError, match=r"got list with tensors in it \(key='kept'\)"):
            experts.checkpoint()


def test_the_step_of_an_experts_own_optimizer_which_would_do_nothing_is_refused() -> None:
    experts = offloaded(nn.Linear(4, 4))
    experts[0](torch.ones(1, 4)).sum().backward()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"SGD of an offloaded expert.*Call step\(\) of the OffloadedExperts"
        ):
            experts.optimizers[0].step()
        before = experts.state_dict(0)["weight"]
        experts.step()
        experts[0](torch.ones(1, 4)).sum().backward()
        assert not torch.equal(experts.state_dict(0)["weight"], before)


def test_beside_something_else_is_refused() -> None:
    with pytest.raises(
        TypeError, match="expected beside to be the OffloadedExperts of another layer, got Linear"
    ):
        OffloadedExperts([nn.Linear(4, 4)], beside=nn.Linear(4, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_they_cannot_be_copied_or_pickled(way: Callable[[Any], Any]) -> None:
    experts = offloaded(nn.Linear(4, 4))
    for one in (experts[0], experts):
        with pytest.raises(
            TypeError, match=r"expected to stay where (it is|they are), got copied or pickled"
        ):
            way(one)
