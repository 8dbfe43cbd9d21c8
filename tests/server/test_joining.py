"""Calls that are computed as one give each client what it would have got alone: outputs, gradients, updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from experts_server.budget import Budget
from experts_server.configuration.config import MemoryConfig, UpdateMode
from experts_server.hosting.calls import BackwardCall, ForwardCall, UpdateCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.training import Training
from moe_autograd.errors import ExpertFailedError, InputsNeededError, InvalidCallError, ServerBusyError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.hosting import ShowsItsMask
from tests.support.servers import tokens

D = 4
SEPARABLE: dict[str, Callable[[], nn.Module]] = {
    "ffn": lambda: FeedForwardExpert(D, dtype=torch.float64),
    "swiglu": lambda: SwiGLUExpert(D, 6, dtype=torch.float64),
    "linear": lambda: nn.Linear(D, 3, dtype=torch.float64),
    "sequential": lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D, bias=False)).double(),
    "one layer twice": lambda: nn.Sequential(layer := nn.Linear(D, D), nn.SiLU(), layer).double(),
    "a frozen layer": lambda: nn.Sequential(nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)).double(),
    "complex": lambda: nn.Linear(D, 3, dtype=torch.complex128),
}


class Scaled(nn.Module):
    """Treats rows one by one, in a way nobody here knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full((D,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def hosted(
    module: nn.Module,
    update: UpdateMode | None = "on_step",
    *,
    gathered_bytes: int = 1 << 20,
    can_join: bool = True,
    split: bool = False,
    weights: list[nn.Parameter] | None = None,
) -> HostedExpert:
    memory = SharedMemory(
        KeptForwards(1 << 20, 60), Budget(gathered_bytes, "gathered"), Budget(1 << 20, "replies")
    )
    trained = weights or [p for p in module.parameters() if p.requires_grad]
    training = None if update is None else Training(torch.optim.SGD(trained, lr=0.1), update)
    saving = MemoryConfig(split_backward=split)
    return HostedExpert("e", module, training, memory, can_join=can_join, saving=saving)


class Features(Scaled):
    """Returns what it computed on the way as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = x.sin()
        return self.linear(features) * self.scale, features


def _ignore(*_: Any) -> None: ...


def rows(num: int, width: int = D, *, seed: int, like: nn.Module | None = None) -> Tensor:
    dtype = torch.float64 if like is None else next(like.parameters()).dtype
    return torch.randn(num, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def forward_call(client: int, x: Tensor, **settings: Any) -> ForwardCall:
    settings = {"keep_graph": True, **settings}
    return ForwardCall(bytes([client]), _ignore, 1, (x.clone(),), (True,), **settings)


def backward_call(client: int, grad: Tensor, **settings: Any) -> BackwardCall:
    settings = {"wants_input_grads": (True,), "sequence": 1, **settings}
    return BackwardCall(
        bytes([client]),
        _ignore,
        1,
        settings.pop("sequence"),
        0,
        (grad,),
        settings.pop("wants_input_grads"),
        **settings,
    )


def step(expert: HostedExpert, client: int) -> int:
    return expert.update(UpdateCall(bytes([client]), _ignore, "step", 2, 0))


# ---- which


class Counting(nn.Module):
    """Counts its calls in training; in a buffer that takes the place of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls = self.num_calls + 1
        return x


@pytest.mark.parametrize(
    "make",
    [
        Counting,
        lambda: nn.Sequential(*[Counting()] * 4),  # the last may lie where the first was
        lambda: spectral_norm(nn.Linear(D, D, dtype=torch.float64)),
    ],
)
def test_a_module_that_changes_its_buffers_is_computed_call_by_call(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expert = hosted(nn.Sequential(nn.Linear(D, D, dtype=torch.float64), make()))
    assert expert.spec.width == D
    reference = copy.deepcopy(expert.module)
    for evaluate, is_joined in ((True, True), (False, False)):
        for seed in range(2):
            call = forward_call(1, rows(2, seed=seed), evaluate=evaluate)
            assert (expert.join_key(call) is not None) == (is_joined and seed > 0)
            reference.train(not evaluate)
            torch.testing.assert_close(expert.forward([call])[0].tensors[0], reference(call.inputs[0]))
    torch.testing.assert_close(expert.module.state_dict(), reference.state_dict())


@pytest.mark.parametrize("module", [nn.Linear(D, D, dtype=torch.float64), Scaled()], ids=str)
def test_an_expert_that_is_not_to_be_joined_is_computed_call_by_call(module: nn.Module) -> None:
    for can_join in (True, False):
        expert = hosted(module, can_join=can_join)
        for evaluate in (True, False):
            call = forward_call(0, rows(2, seed=0), evaluate=evaluate)
            assert (expert.join_key(call) is not None) == can_join
        grad = backward_call(0, rows(2, seed=1), inputs=(rows(2, seed=0),), evaluate=True)
        assert (expert.join_key(grad) is not None) <= can_join


# ---- shares


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", SEPARABLE)
def test_joined_backwards_give_each_client_its_input_gradient_and_its_own_update(
    name: str, split: bool
) -> None:
    torch.manual_seed(0)
    expert = hosted(SEPARABLE[name](), split=split)
    reference = copy.deepcopy(expert.module)
    xs = [rows(num, seed=num, like=reference) for num in (2, 3, 0, 1)]
    forwards = [forward_call(client, x) for client, x in enumerate(xs)]
    assert len({expert.join_key(call) for call in forwards}) == 1
    outputs = [output.tensors[0] for output in expert.forward(forwards)]
    grads = [rows(len(x), outputs[0].shape[1], seed=7 + i, like=reference) for i, x in enumerate(xs)]
    backwards = [backward_call(client, grad) for client, grad in enumerate(grads)]
    keys = {expert.join_key(call) for call in backwards}
    assert len(keys) == 1
    assert None not in keys
    answers = expert.backward_joined(backwards)
    assert expert.has_left is split  # the answers leave first
    expert.finish()
    wanted = [p for p in reference.parameters() if p.requires_grad]
    by_client = []
    for x, grad, output, answer in zip(xs, grads, outputs, answers, strict=True):
        assert isinstance(answer, tuple), answer
        leaf = x.clone().requires_grad_()
        expected_output = reference(leaf)
        expected, *weight_grads = torch.autograd.grad(expected_output, [leaf, *wanted], grad)
        torch.testing.assert_close(output, expected_output.detach())
        torch.testing.assert_close(answer[0], expected)
        by_client.append(weight_grads)
    optimizer = torch.optim.SGD(wanted, lr=0.1)
    for client in (1, 3, 0, 2):
        step(expert, client)
        for parameter, gradient in zip(wanted, by_client[client], strict=True):
            parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(expert.module.state_dict(), reference.state_dict())
    assert expert.num_updates == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans()), min_size=2, max_size=6
    ),
    st.booleans(),
)
def test_whatever_is_joined_is_as_if_computed_one_by_one(
    calls: list[tuple[int, int, bool, bool]], split: bool
) -> None:
    """Any number of rows, clients and copies of calls; with and without input gradients and graphs that stay."""
    torch.manual_seed(0)
    module = FeedForwardExpert(D, dtype=torch.float64)
    together, apart = hosted(module, split=split), hosted(copy.deepcopy(module))
    for expert in (together, apart):
        backwards = []
        for index, (num, client, wants, keeps) in enumerate(calls):
            x, grad = rows(num, seed=index), rows(num, seed=50 + index)
            forward = forward_call(client, x)
            forward.call_id = index
            backward = backward_call(
                client, grad, wants_input_grads=(wants,), keep_graph=keeps, sequence=num + 1
            )
            backward.call_id = index
            backward.inputs = (x.clone(),)
            backwards.append(backward)
            if index % 2:
                expert.forward([forward, copy.copy(forward)])  # joined with itself: it keeps no graph
        if expert is together:
            answers: list[Any] = expert.backward_joined(backwards)
            expert.finish()
        else:
            expected = [expert.backward(call) for call in backwards]
    for answer, one_by_one in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, one_by_one)
    for client in range(3):
        call = UpdateCall(bytes([client]), _ignore, "step", 99, 0)
        assert together.update(call) == apart.update(call)
        torch.testing.assert_close(together.module.state_dict(), apart.module.state_dict())


def test_a_module_found_to_draw_draws_then_what_it_would_have_call_by_call() -> None:
    def made() -> HostedExpert:
        torch.manual_seed(3)
        return hosted(ShowsItsMask(D))

    def drawn(expert: HostedExpert) -> list[Any]:
        calls = [forward_call(client, torch.ones(2, D)) for client in range(3)]
        return [expert.forward([call])[0].tensors for call in calls]

    together = made()
    with pytest.raises(ExpertFailedError, match="Nothing is lost: its calls are computed one by one"):
        together.forward([forward_call(client, torch.ones(2, D)) for client in range(3)])
    torch.testing.assert_close(drawn(together), drawn(made()), rtol=0, atol=0)


@pytest.mark.parametrize(("num_alone", "num_others"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("split", [False, True])
def test_copies_of_one_backward_count_once_in_a_batch_and_before_it(
    split: bool, num_alone: int, num_others: int
) -> None:
    expert = hosted(FeedForwardExpert(D, dtype=torch.float64), split=split)
    reference = copy.deepcopy(expert.module)
    x, grad = rows(2, seed=1), rows(2, seed=2)
    clients = [0, 0, 0, *range(1, 1 + num_others)]
    calls = [backward_call(client, grad, inputs=(x.clone(),)) for client in clients]
    answers: list[Any] = [expert.backward(call) for call in calls[:num_alone]]
    expert.finish()
    answers += expert.backward_joined(calls[num_alone:])
    torch.testing.assert_close(answers[1:], answers[:1] * (len(calls) - 1))
    expert.finish()
    reference(x).backward(grad)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for client in range(1 + num_others):
        step(expert, client)
        optimizer.step()
    torch.testing.assert_close(expert.module.state_dict(), reference.state_dict())


def test_what_is_refused_in_a_batch_is_refused_alone_and_changes_nothing() -> None:
    module = FeedForwardExpert(D, dtype=torch.float64)
    room = 2 * sum(p.nbytes for p in module.parameters())
    expert = hosted(module, gathered_bytes=room)
    xs = [rows(2, seed=n) for n in range(5)]
    expert.forward([forward_call(client, x) for client, x in enumerate(xs)])
    grads = [
        rows(2, seed=9),
        torch.full((2, D), float("nan")).double(),
        rows(3, seed=9),
        rows(2, seed=9),
        rows(2, seed=9),
    ]
    answers = expert.backward_joined([backward_call(client, grad) for client, grad in enumerate(grads)])
    assert [type(answer) for answer in answers] == [
        tuple,
        InvalidCallError,  # not finite
        InvalidCallError,  # three rows for two
        tuple,
        ServerBusyError,  # there is room for the gradients of two
    ]
    assert [step(expert, client) for client in (1, 2, 4)] == [0, 0, 0]
    assert [step(expert, client) for client in (0, 3)] == [1, 2]
    gone = expert.backward_joined(
        [backward_call(0, grads[0], sequence=9), backward_call(1, grads[0], sequence=9)]
    )
    assert isinstance(gone[0], InputsNeededError), "its forward went with its backward"
    assert isinstance(gone[1], ServerBusyError), "its forward stayed"


def test_weight_gradients_that_overflow_in_one_call_do_not_spoil_its_neighbours() -> None:
    expert = hosted(nn.Linear(D, D))
    inputs = [torch.ones(2, D), torch.full((2, D), 3e38)]
    calls = [backward_call(n, torch.ones(2, D), inputs=(x,)) for n, x in enumerate(inputs)]
    good, bad = expert.backward_joined(calls)
    assert isinstance(good, tuple)
    assert isinstance(bad, InvalidCallError)
    assert (step(expert, 1), step(expert, 0)) == (0, 1)


# ---- which are joined


@pytest.mark.parametrize(
    ("module", "update", "settings", "joins"),
    [
        (FeedForwardExpert(D), "on_step", {}, True),
        (FeedForwardExpert(D), None, {}, True),
        (FeedForwardExpert(D), "on_backward", {}, False),
        (FeedForwardExpert(D), "on_samples", {}, False),
        (FeedForwardExpert(D), "on_backward", {"wants_weight_grads": False}, True),
        (nn.Sequential(nn.Linear(D, D), Scaled().float()), "on_step", {}, False),
        (nn.Sequential(nn.Linear(D, D), Scaled().float()), "on_step", {"wants_weight_grads": False}, True),
        (nn.Sequential(nn.Linear(D, D), Scaled().float()), None, {}, True),
        (nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), None, {}, False),
    ],
    ids=[
        *("gathering", "not trained", "an update each", "an update after some", "input gradients only"),
        *("inseparable", "inseparable, input gradients", "inseparable, not trained", "mixes rows"),
    ],
)
def test_backwards_are_joined_where_their_gradients_can_be_told_apart(
    module: nn.Module, update: UpdateMode | None, settings: dict[str, Any], joins: bool
) -> None:
    expert = hosted(module, update)
    x = tokens(2, D)
    call = backward_call(0, tokens(2, D), inputs=(x.clone(),), **settings)
    assert (expert.join_key(call) is not None) is joins
    if joins:
        answers: list[Any] = expert.backward_joined(
            [call, backward_call(1, -tokens(2, D), inputs=(x,), **settings)]
        )
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(module(leaf), leaf, tokens(2, D))[0]
        torch.testing.assert_close([a[0] for a in answers], [expected, -expected])


def test_a_backward_with_a_graph_of_its_own_is_computed_alone_until_an_update_takes_the_graph() -> None:
    expert = hosted(FeedForwardExpert(D))
    expert.forward([forward_call(0, tokens(2, D))])
    call = backward_call(0, tokens(2, D))
    assert expert.join_key(call) is None
    expert.backward(backward_call(1, tokens(2, D), inputs=(tokens(2, D),)))
    step(expert, 1)
    assert expert.join_key(call) is not None


@pytest.mark.parametrize("change", ["shape", "dtype", "evaluate", "two gradients", "no gradient", "rows"])
def test_backwards_that_differ_are_not_joined(change: str) -> None:
    expert = hosted(nn.Linear(D, D))
    call = backward_call(0, tokens(2, D), inputs=(tokens(2, D),))
    other = backward_call(1, tokens(3, D), inputs=(tokens(3, D),))
    assert expert.join_key(call) == expert.join_key(other) is not None
    match change:
        case "shape":
            other.inputs, other.grad_outputs = (tokens(3, 2, D),), (tokens(3, 2, D),)
        case "dtype":
            other.grad_outputs = (tokens(3, D).double(),)
        case "evaluate":
            other.evaluate = True
        case "two gradients":
            other.grad_outputs = (tokens(3, D), tokens(3, D))
        case "no gradient":
            other.grad_outputs = (None,)
        case "rows":
            other.grad_outputs = (tokens(4, D),)
    assert expert.join_key(call) != expert.join_key(other)


@pytest.mark.parametrize("keep_graph", [True, False])
def test_calls_that_are_joined_at_first_say_which_outputs_were_computed_from_which(keep_graph: bool) -> None:
    expert = hosted(Features())
    for _ in range(2):
        calls = [forward_call(i, rows(3, seed=i), keep_graph=keep_graph) for i in range(2)]
        assert expert.join_key(calls[0]) == expert.join_key(calls[1]) is not None
        answers = expert.forward(calls)
        assert [answer.uses for answer in answers] == [(0, 1) if keep_graph else ()] * 2
        assert not any(tensor.requires_grad for answer in answers for tensor in answer.tensors)
