"""An expert that nobody hosts for a while: whatever is asked of it next looks for it, and finds it again."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ExpertNotFoundError, GradientsLostError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import make_modules, sgd
from tests.support.naming import NameServer, move, named, serve
from tests.support.servers import wait_until

HASTY = RetryPolicy(patience_s=0.2)
NOWHERE = ["127.0.0.250"]
OTHER = {"ffn.9": nn.Linear(4, 4)}
WEIGHTS = {"ffn.0.weight": torch.eye(4), "ffn.0.bias": torch.zeros(4)}


@pytest.fixture
def name_server(monkeypatch) -> NameServer:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    return server


@pytest.fixture
def modules() -> dict[str, nn.Module]:
    return make_modules(0)


def step(experts: RemoteExperts) -> None:
    with pytest.raises(GradientsLostError):  # its server has answered
        RemoteOptimizer(experts).step()


ASKING: dict[str, Callable[[RemoteExperts, torch.Tensor], object]] = {
    "forward": lambda experts, y: experts["ffn.0"](torch.ones(1, 4)),
    "backward": lambda experts, y: y.sum().backward(),
    "state_dict": lambda experts, y: experts["ffn.0"].state_dict(),
    "load_state_dict": lambda experts, y: experts.load_state_dict(WEIGHTS),
    "step": lambda experts, y: step(experts),
    "zero_grad": lambda experts, y: RemoteOptimizer(experts).zero_grad(),
}


@pytest.fixture(params=ASKING)
def ask(request) -> Callable[[RemoteExperts, torch.Tensor], object]:
    return ASKING[request.param]


def begin(experts: RemoteExperts) -> torch.Tensor:
    """Return the result of a forward that has had no backward; another one's gradients are left to be applied."""
    experts["ffn.0"](torch.ones(1, 4)).sum().backward()
    return experts["ffn.0"](torch.ones(1, 4))


class TestBehindAName:
    @pytest.fixture
    def server(self, name_server, modules) -> Iterator[ExpertsServer]:
        name_server.hosts = ["127.0.0.1"]
        server = serve(modules, "127.0.0.1:0")
        yield server
        server.stop()

    def test_it_is_found_where_the_name_had_changed_before_its_server_was_there(
        self, name_server, modules, server, ask
    ):
        with connect(named(server), retry=HASTY) as experts:
            y = begin(experts)
            server.stop()
            name_server.hosts = NOWHERE
            with pytest.raises(ServerUnavailableError):
                experts.info()
            with move(modules, server, name_server):
                ask(experts, y)

    def test_it_is_found_where_the_name_stood_for_the_other_servers_only(
        self, name_server, modules, server, ask
    ):
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(move(OTHER, server, name_server))
            others = list(name_server.hosts)
            name_server.hosts = ["127.0.0.1", *others]
            experts = stack.enter_context(connect(named(server), retry=HASTY))
            y = begin(experts)
            server.stop()
            name_server.hosts = others
            experts.info()
            assert other.address in experts.connection.addresses
            stack.enter_context(move(modules, server, name_server))
            name_server.hosts += others
            ask(experts, y)

    def test_its_server_is_waited_for(self, name_server, modules, server, ask):
        """A client that begins while nobody is there waits, as one does that began before."""
        patient = RetryPolicy(patience_s=100.0)
        with connect(named(server), retry=patient, timeout_s=200.0) as experts:
            y = begin(experts)
            server.stop()
            name_server.hosts = NOWHERE
            with pytest.raises(ServerUnavailableError):
                experts.info()
            with contextlib.ExitStack() as stack:
                name_server.at_question(
                    name_server.num_questions + 3,
                    lambda: stack.enter_context(move(modules, server, name_server)),
                )
                ask(experts, y)

    def test_as_long_as_nobody_is_there_it_says_so(self, name_server, server):
        with connect(named(server), retry=HASTY) as experts:
            server.stop()
            name_server.hosts = NOWHERE
            for _ in range(3):
                for ask in (ASKING["forward"], ASKING["state_dict"], ASKING["load_state_dict"]):
                    with pytest.raises(ServerUnavailableError):
                        ask(experts, torch.ones(1))


class TestWhereAnotherServerHasItsAddress:
    """Both servers were stopped, and the other one is the first to be there again."""

    @contextlib.contextmanager
    def connected(self, modules, **options) -> Iterator[tuple[RemoteExperts, torch.Tensor, str]]:
        """Yield experts, a result of theirs, and the address that is free."""
        with contextlib.ExitStack() as stack:
            own, other = ExpertsServer(modules, optimizer=sgd).start(), ExpertsServer(OTHER).start()
            experts = stack.enter_context(connect([own.address, other.address], timeout_s=200.0, **options))
            y = begin(experts)
            own.stop()
            other.stop()
            stack.enter_context(ExpertsServer(OTHER, listen=own.address))
            yield experts, y, other.address

    def test_its_own_is_waited_for(self, modules, ask):
        patient = RetryPolicy(patience_s=100.0)
        with self.connected(modules, retry=patient) as (experts, y, free), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, experts, y)
            wait_until(lambda: not experts.connection._finding.placement.hosts_of("ffn.0"))
            with ExpertsServer(modules, optimizer=sgd, listen=free):
                asked.result(60)

    @pytest.mark.parametrize("asking", ["forward", "backward", "state_dict", "load_state_dict"])
    def test_after_patience_it_says_so(self, modules, asking):
        with self.connected(modules, retry=HASTY) as (experts, y, _):
            with pytest.raises(
                ServerUnavailableError, match=r"'ffn\.0'.* its own may be one of them"
            ) as raised:
                ASKING[asking](experts, y)
            assert "is waited for 0.2 s" in raised.value.__notes__[0]

    def test_its_own_is_waited_for_that_was_seen_elsewhere_and_is_away_again(self, modules):
        with self.connected(modules, retry=HASTY) as (experts, y, free):
            with ExpertsServer(modules, optimizer=sgd, listen=free):
                experts.info()
            with pytest.raises(ServerUnavailableError, match="its own may be one of them"):
                y.sum().backward()

    def test_it_is_not_waited_for_by_an_optimizer_that_goes_on(self, modules):
        patient = RetryPolicy(patience_s=1e6)
        with self.connected(modules, retry=patient) as (experts, _, _):
            optimizer = RemoteOptimizer(experts, on_failure="drop")
            optimizer.step()
            assert [type(error) for error in optimizer.failures] == [ServerUnavailableError]


def test_it_is_found_where_its_server_had_dropped_it(modules, ask):
    with ExpertsServer(modules, optimizer=sgd) as server, connect(server.address, retry=HASTY) as experts:
        y = begin(experts)
        server.stop()
        with ExpertsServer(OTHER, listen=server.address):
            experts.info()
        with ExpertsServer(modules, optimizer=sgd, listen=server.address):
            ask(experts, y)


@pytest.mark.parametrize("asking", ["forward", "state_dict"])
def test_many_that_failed_ask_the_resolver_seldom_and_it_is_found_nevertheless(name_server, modules, asking):
    """It is dropped by one server, and much later hosted by another."""

    def is_found() -> bool:
        with contextlib.suppress(ExpertNotFoundError):
            ASKING[asking](experts, torch.ones(1))
            return True
        return False

    name_server.hosts = ["127.0.0.1"]
    with (
        ExpertsServer(modules) as server,
        ExpertsServer(OTHER) as spare,
        connect([server.address, named(spare)], retry=RetryPolicy(budget=1.0)) as experts,
    ):
        server.stop()
        with ExpertsServer(OTHER, listen=server.address):
            experts.info()
            num_questions, began_at = name_server.num_questions, time.monotonic()
            assert not any(is_found() for _ in range(100))
            assert name_server.num_questions - num_questions <= 1 + (time.monotonic() - began_at) / 1.0
            spare.stop()
            with ExpertsServer(modules, listen=spare.address):
                wait_until(is_found)
