"""A server that is lost is waited for by those who need it, and by nobody else.

Nothing here would return if a lost server were waited for: patience and deadlines have no end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import ServerUnavailableError, TooFewExpertsError
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.survivors import combine_survivors

ENDLESS_S = 1e6
PATIENT = RetryPolicy(patience_s=ENDLESS_S)
D_MODEL = 4
FATES = ["gone", "silent"]


class Hosted:
    """`ffn.0` and `ffn.1`, each on a server of its own behind a proxy; the second can be lost and return."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = [nn.Linear(D_MODEL, D_MODEL).double() for _ in range(2)]
        self.servers = [
            ExpertsServer({f"ffn.{index}": module}, optimizer=sgd).start()
            for index, module in enumerate(self.modules)
        ]
        self.proxy = Proxy(self.servers[1].address)
        self.addresses = [self.servers[0].address, self.proxy.address]
        self.router = TopKRouter(D_MODEL, 2, top_k=2).double()

    def lose(self, fate: str) -> None:
        """Let connections to the second server be refused, or swallowed."""
        if fate == "silent":
            self.proxy.is_black_hole = True
        else:
            self.servers.pop().stop()
            self.proxy.cut()

    def give_back(self) -> None:
        self.proxy.is_black_hole = False
        self.proxy.cut()  # what lacks the bytes that were swallowed: no network goes on with a connection without some
        if len(self.servers) == 1:
            again = ExpertsServer({"ffn.1": self.modules[1]}, optimizer=sgd, listen=self.proxy.target)
            self.servers.append(again.start())

    def layer(self, experts: RemoteExperts, **options) -> MixtureOfExperts:
        return MixtureOfExperts(self.router, experts, on_failure="drop", **options)

    def expected(self, x: Tensor, **lost) -> Tensor:
        return combine_survivors(x, self.router(x), self.modules, **lost)


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    hosted = Hosted()
    with hosted.proxy:
        yield hosted
        for server in hosted.servers:
            server.stop()


@pytest.fixture
def experts(hosted) -> Iterator[RemoteExperts]:
    with connect(hosted.addresses, timeout_s=ENDLESS_S, retry=PATIENT) as experts:
        yield experts


def tokens(num_tokens: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_()


def grads_of(y: Tensor, x: Tensor, hosted: Hosted) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), [x, hosted.router.weight])


class TestLayer:
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    @pytest.mark.parametrize("fate", FATES)
    def test_a_pass_whose_tokens_have_enough_others_goes_on(self, hosted, experts, fate, phase):
        x = tokens()
        if phase == "forward":
            hosted.lose(fate)
        y, routing = hosted.layer(experts)(x, return_routing=True)
        if phase == "backward":
            hosted.lose(fate)
        grads = grads_of(y, x, hosted)
        expected_y = hosted.expected(x, **{f"lost_in_{phase}": {1}})
        torch.testing.assert_close((y, *grads), (expected_y, *grads_of(expected_y, x, hosted)))
        (failure,) = routing.failures
        assert (failure.expert, failure.phase) == ("ffn.1", phase)
        assert failure.reason.startswith("ServerUnavailableError: expert 'ffn.1' at ")
        assert failure.reason.endswith("Not waited for: every token has enough other experts.")

    @pytest.mark.parametrize("fate", FATES)
    def test_the_next_passes_go_on_too(self, hosted, experts, fate):
        layer, x = hosted.layer(experts), tokens()
        hosted.lose(fate)
        for _ in range(3):
            layer._rests._rests.clear()  # the expert is called again, as after a while
            torch.testing.assert_close(layer(x), hosted.expected(x, lost_in_forward={1}))

    @pytest.mark.parametrize("fate", FATES)
    def test_a_server_whose_expert_a_token_needs_is_waited_for(self, hosted, experts, fate):
        x = tokens()
        hosted.lose(fate)
        became = in_thread(lambda: hosted.layer(experts, min_experts=2)(x, return_routing=True))
        hosted.give_back()
        y, routing = became()
        assert routing.failures == []
        torch.testing.assert_close(y, hosted.expected(x))

    def test_what_may_become_zeros_needs_nobody(self, hosted, experts):
        hosted.lose("gone")
        only = TopKRouter(D_MODEL, 1, top_k=1).double()
        layer = MixtureOfExperts(only, [experts["ffn.1"]], on_failure="drop", allow_zero_outputs=True)
        assert torch.equal(layer(tokens()), torch.zeros(8, D_MODEL, dtype=torch.float64))

    def test_patience_that_ends_names_those_who_were_needed(self, hosted):
        soon = RetryPolicy(patience_s=0.2)
        with connect(hosted.addresses, timeout_s=ENDLESS_S, retry=soon) as experts:
            hosted.lose("gone")
            with pytest.raises(
                TooFewExpertsError, match=r"'ffn\.1', forward: ServerUnavailableError.*Given up"
            ):
                hosted.layer(experts, min_experts=2)(tokens())


class TestOptimizer:
    @pytest.mark.parametrize("fate", FATES)
    @pytest.mark.parametrize("update", ["step", "zero_grad"])
    def test_one_that_may_drop_goes_on(self, hosted, experts, update, fate):
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        y = sum(expert(tokens()) for expert in experts.values())
        y.sum().backward()
        hosted.lose(fate)
        getattr(optimizer, update)()
        (failure,) = optimizer.failures
        assert hosted.proxy.address in str(failure)

    def test_what_was_to_be_forgotten_before_is_not_waited_for(self, hosted, experts):
        experts["ffn.1"](tokens()).sum().backward()
        hosted.lose("gone")
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        optimizer.zero_grad()
        (failure,) = failures = optimizer.failures
        optimizer.step()
        assert optimizer.failures == [], "there is nothing to apply"
        assert failures == [failure], "what was told before is left to whoever has it"
        with pytest.raises(ServerUnavailableError):
            RemoteOptimizer(experts).zero_grad()

    def test_one_that_may_not_waits(self, hosted, experts):
        optimizer = RemoteOptimizer([experts["ffn.1"]])
        experts["ffn.1"](tokens()).sum().backward()
        hosted.lose("silent")
        became = in_thread(lambda: optimizer.step())
        hosted.give_back()
        assert became() is None
        assert hosted.servers[1].num_updates == {"ffn.1": 1}


class TestWithoutALayer:
    def test_a_forward_goes_to_a_replica(self):
        module, x = nn.Linear(D_MODEL, D_MODEL).double(), tokens()
        with (
            ExpertsServer({"ffn.0": module}) as one,
            ExpertsServer({"ffn.0": module}) as other,
            Proxy(one.address) as first,
            Proxy(other.address) as second,
            connect([first.address, second.address], timeout_s=ENDLESS_S, retry=PATIENT) as experts,
        ):
            used = experts["ffn.0"](x).grad_fn.calls[0].address
            lost, stays = sorted([first, second], key=lambda proxy: proxy.address != used)
            lost.is_black_hole = True
            for _ in range(3):
                y = experts["ffn.0"](x)
                assert y.grad_fn.calls[0].address == stays.address
                torch.testing.assert_close(y, module(x))

    def test_a_call_that_only_a_silent_server_can_answer_ends_with_the_patience(self, hosted):
        with connect(hosted.addresses, timeout_s=ENDLESS_S, retry=RetryPolicy(patience_s=0.2)) as experts:
            hosted.lose("silent")
            for _ in range(2):
                with pytest.raises(ServerUnavailableError, match=r"expert 'ffn\.1' at .*, forward, after"):
                    experts["ffn.1"](tokens())
            hosted.give_back()
            hosted.proxy.cut()
            experts.info()
            assert experts["ffn.1"](tokens()).shape == (8, D_MODEL)

    def test_connect_goes_on_without_a_silent_server_that_may_be_missing(self, hosted):
        hosted.lose("silent")
        with connect(hosted.addresses, timeout_s=ENDLESS_S, allow_missing=True) as experts:
            assert list(experts) == ["ffn.0"]


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Begin a call; return a function that waits for what it returned."""
    became: list[object] = []
    thread = threading.Thread(target=lambda: became.append(call()))
    thread.start()

    def wait() -> object:
        thread.join()
        return became[0]

    return wait
