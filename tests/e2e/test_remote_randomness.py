"""Random numbers of experts on servers follow the caller's stream, as those of the same modules here do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, ServingConfig
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.errors import RemoteError
from moe_autograd.remote import HedgePolicy, RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import sgd
from tests.support.servers import WireClient

NUM_EXPERTS = 4
NAMES = [f"dropout.{index}" for index in range(NUM_EXPERTS)]


class Noisy(nn.Module):
    """Draws in training alone, by itself and through its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x))
        return y + torch.rand_like(y) if self.training else y


class Quiet(nn.Module):
    """Draws nothing, which its server cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def make(kind: Callable[[], nn.Module] = Noisy) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: kind() for name in NAMES}


@contextlib.contextmanager
def hosting(*servers: dict[str, nn.Module], **options: Any) -> Iterator[RemoteExperts]:
    with contextlib.ExitStack() as stack:
        config = options.pop("config", ServingConfig())
        addresses = [
            stack.enter_context(ExpertsServer(modules, optimizer=sgd, config=config)).address
            for modules in servers
        ]
        yield stack.enter_context(connect(addresses, **options))


def layer_of(experts: Any, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(TopKRouter(4, NUM_EXPERTS, top_k=2), experts, **options)


def trained(layer: nn.Module, optimizer: Any = None, *, seed: int = 7) -> list[Tensor]:
    """Return all that some steps give, and where the caller's stream is after them."""
    torch.manual_seed(seed)
    seen = []
    for _ in range(3):
        x = torch.randn(16, 4, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        seen += [y.detach(), x.grad]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, torch.rand(3)]


def check_same(one: list[Tensor], other: list[Tensor], *, up_to: float | None = None) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=up_to or 0.0, atol=up_to or 0.0)


def test_a_training_is_the_same_again_whatever_its_server_did_before_and_on_another_server() -> None:
    runs = []
    for num_calls_before in (0, 3):
        with hosting(make()) as experts:
            for _ in range(num_calls_before):
                experts[NAMES[0]](torch.ones(2, 4))
            runs.append(trained(layer_of(experts), RemoteOptimizer(experts)))
            runs[-1] += experts.state_dict().values()
    check_same(*runs)
    with hosting(make()) as experts:
        assert not torch.equal(trained(layer_of(experts), seed=8)[0], runs[0][0])


@pytest.mark.parametrize("max_concurrency", [1, 2, 16])
@pytest.mark.parametrize("saving", [MemoryConfig(), MemoryConfig(recompute=True, split_backward=True)])
def test_a_layer_draws_what_it_would_draw_with_the_same_experts_here(
    max_concurrency: int, saving: MemoryConfig
) -> None:
    here = list(make().values())
    local_parameters = [parameter for expert in here for parameter in expert.parameters()]
    expected = trained(layer_of(here), sgd(local_parameters))
    with hosting(make(), config=ServingConfig(memory=saving)) as experts:
        layer = layer_of(experts, max_concurrency=max_concurrency)
        check_same(trained(layer, RemoteOptimizer(experts)), expected, up_to=1e-5)


def test_also_where_some_of_its_experts_are_here_and_others_on_two_servers() -> None:
    here = list(make().values())
    expected = trained(layer_of(here))
    one, other = make(), make()
    with (
        hosting({NAMES[1]: one[NAMES[1]]}) as first,
        hosting({name: other[name] for name in NAMES[2:]}) as second,
    ):
        mixed = [make()[NAMES[0]], first[NAMES[1]], second[NAMES[2]], second[NAMES[3]]]
        for options in ({}, {"on_failure": "drop"}, {"max_concurrency": 1}):
            check_same(trained(layer_of(mixed, **options)), expected, up_to=1e-5)


def test_a_call_alone_draws_what_it_draws_in_a_map_of_one() -> None:
    with hosting(make()) as experts:
        expert, x = experts[NAMES[0]], torch.ones(8, 4)
        torch.manual_seed(3)
        alone = [expert(x), expert(x), torch.rand(2)]
        torch.manual_seed(3)
        in_maps = [*parallel_apply([expert], [(x,)]), *parallel_apply([expert], [(x,)]), torch.rand(2)]
        check_same(alone, in_maps)
        assert not torch.equal(alone[0], alone[1])


def test_calls_that_a_call_of_a_map_makes_one_after_the_other_draw_others_and_the_same_each_time() -> None:
    with hosting(make()) as experts:
        names = [NAMES[0], NAMES[0], NAMES[1]]

        def in_turn(x: Tensor) -> Tensor:
            return torch.stack([experts[name](x) for name in names])

        runs = []
        for max_concurrency in (1, None):
            torch.manual_seed(3)
            calls = [in_turn] * 5
            outputs = parallel_apply(calls, [(torch.ones(8, 4),)] * 5, max_concurrency=max_concurrency)
            runs.append([*outputs, torch.rand(2)])
        check_same(*runs)
        masks = [y for output in outputs for y in output[:2]]
        assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("is_in_a_layer", [False, True])
@pytest.mark.parametrize("kind", [nn.Identity, Quiet])
def test_experts_that_draw_nothing_advance_nothing(kind: type[nn.Module], is_in_a_layer: bool) -> None:
    with hosting(make(kind)) as experts:
        called = layer_of(experts) if is_in_a_layer else experts[NAMES[0]]
        x = torch.randn(8, 4, requires_grad=True)
        before = torch.get_rng_state()
        called(x).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_they_advance_it_by_one_draw_in_training_and_not_after_eval(grad_mode: Any) -> None:
    with hosting(make()) as experts, grad_mode():
        layer, x = layer_of(experts), torch.randn(8, 4)
        torch.manual_seed(3)
        layer.eval()(x)
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state())
        layer.train()(x)
        torch.empty((), dtype=torch.int64).random_(generator=(expected := torch.manual_seed(3).clone_state()))
        layer(x)
        assert torch.equal(torch.get_rng_state(), expected.get_state())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_in_a_layer", [False, True])
def test_a_checkpoint_around_them_sees_the_same_masks(use_reentrant: bool, is_in_a_layer: bool) -> None:
    with hosting(make()) as experts:
        inner: nn.Module = layer_of(experts) if is_in_a_layer else experts[NAMES[0]]
        around = nn.Sequential(nn.Linear(4, 4), inner, nn.Tanh(), nn.Dropout(0.2))

        def checkpointed(x: Tensor) -> Any:
            return checkpoint(around, x, use_reentrant=use_reentrant)

        runs = []
        for call in (around, checkpointed):
            around.zero_grad()
            runs.append([*trained(call), *(p.grad.clone() for p in around.parameters())])
        check_same(*runs)


def test_a_checkpoint_within_a_map_too() -> None:
    with hosting(make()) as experts:

        def twice(x: Tensor) -> Tensor:
            return experts[NAMES[0]](experts[NAMES[1]](x)).tanh()

        runs = []
        for call in (twice, lambda x: checkpoint(twice, x, use_reentrant=False)):
            torch.manual_seed(3)
            xs = [torch.ones(8, 4, requires_grad=True) for _ in range(3)]
            ys = parallel_apply([call] * 3, [(x,) for x in xs])
            sum(y.square().sum() for y in ys).backward()
            runs.append([*(y.detach() for y in ys), *(x.grad for x in xs), torch.rand(2)])
        check_same(*runs)


def test_a_pass_that_fails_leaves_the_stream_where_it_is() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    with hosting({**make(), "failing": Failing()}) as experts:
        x = torch.ones(8, 4)
        torch.manual_seed(3)
        expected = [experts[NAMES[0]](x), torch.rand(2)]
        torch.manual_seed(3)
        with pytest.raises(RemoteError, match="on purpose"):
            parallel_apply([experts[NAMES[0]], experts["failing"]], [(x,), (x,)])
        check_same([experts[NAMES[0]](x), torch.rand(2)], expected)


def test_a_hedged_forward_has_the_masks_of_the_first_one() -> None:
    gate, num_waiting = threading.Event(), threading.Semaphore(0)

    class Slow(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            if num_waiting.acquire(blocking=False):
                assert gate.wait(60)
            return super().forward(x)

    with hosting(make(Slow), make(Slow), hedge=HedgePolicy(first_after_s=0.05)) as experts:
        expected = trained(experts[NAMES[0]])
        num_waiting.release()
        got = trained(experts[NAMES[0]])
        gate.set()
        check_same(got, expected)


def test_so_has_one_that_is_made_again_on_a_replica() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ExpertsServer(make())) for _ in range(2)]
        experts = stack.enter_context(connect([server.address for server in servers]))
        expected = trained(experts[NAMES[0]])
        asked_first = experts.connection._finding.hosts_of(NAMES[0])[0]
        next(server for server in servers if server.address == asked_first).stop()
        check_same(trained(experts[NAMES[0]]), expected)


def test_calls_of_several_threads_draw_different_numbers() -> None:
    """Each begins before another's server has said that it drew."""
    together = threading.Barrier(4)

    class Waiting(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            together.wait(60)
            return super().forward(x)

    with hosting(make(Waiting)) as experts:
        for name in NAMES[1:]:
            experts[name].load_state_dict(experts[NAMES[0]].state_dict())
        layers = [MixtureOfExperts(TopKRouter(4, 1, top_k=1), [experts[name]]) for name in NAMES]
        with ThreadPoolExecutor(4) as threads, torch.no_grad():
            for called in (layers, [experts[name] for name in NAMES]):
                ys = list(threads.map(lambda call: call(torch.ones(8, 4)).detach(), called))
                assert not any(torch.equal(a, b) for i, a in enumerate(ys) for b in ys[:i])


def test_a_client_that_sends_no_seed_gets_numbers_of_the_server_and_is_told_where_these_are_lost() -> None:
    config = ServingConfig()
    with ExpertsServer(make(), optimizer=sgd, config=config) as server, WireClient(server.address) as client:
        one, other = (client.forward(NAMES[0], torch.ones(2, 4), call_id=index) for index in (1, 2))
        assert not torch.equal(one.tensors[0], other.tensors[0])
        answer = client.backward(NAMES[0], torch.ones(2, 4), call_id=99, inputs=(torch.ones(2, 4),))
        assert answer.code == "INVALID_CALL"
        assert "expected the random seed of a forward that is computed again, got none" in answer.text
