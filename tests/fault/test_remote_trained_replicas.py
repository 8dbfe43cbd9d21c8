"""Replicas that are trained are different experts: what trains one of them does not go over to the other."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import make_modules, sgd
from tests.support.naming import NameServer, move, named, serve
from tests.support.proxy import Proxy
from tests.support.survivors import combine_survivors

ENDLESS_S = 1e6
SOON = RetryPolicy(patience_s=0.2)
D_MODEL = 4


def tokens(num_tokens: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_()


class Trained:
    """`ffn.0`, trained, on two servers with weights of their own, each behind a proxy; a client trains one of them."""

    def __init__(self) -> None:
        self.modules = [nn.Linear(D_MODEL, D_MODEL).double() for _ in range(2)]
        self.servers = [ExpertsServer({"ffn.0": module}, optimizer=sgd).start() for module in self.modules]
        self.proxies = [Proxy(server.address) for server in self.servers]
        self.which = 0

    def connect(self, patience_s: float = ENDLESS_S) -> RemoteExperts:
        addresses = [proxy.address for proxy in self.proxies]
        experts = connect(addresses, timeout_s=ENDLESS_S, retry=RetryPolicy(patience_s=patience_s))
        self.which = addresses.index(experts["ffn.0"].hosted.addresses[0])
        return experts

    def lose(self) -> None:
        """Let the server of the replica that is trained say nothing."""
        self.proxies[self.which].is_black_hole = True

    def give_back(self) -> None:
        self.proxies[self.which].is_black_hole = False
        self.proxies[self.which].cut()

    def check_is_of_the_other(self, y: Tensor, x: Tensor) -> None:
        torch.testing.assert_close(y, self.modules[1 - self.which](x))


@pytest.fixture
def trained() -> Iterator[Trained]:
    trained = Trained()
    with trained.proxies[0], trained.proxies[1]:
        yield trained
        for server in trained.servers:
            server.stop()


def connect_first_to(address: str, other: str) -> RemoteExperts:
    """Connect as a client that chooses the first of two replicas."""
    while True:
        experts = connect([address, other], retry=SOON)
        if experts["ffn.0"].hosted.addresses[0] == address:
            return experts
        experts.close()


def test_weights_are_of_the_one_that_is_trained_though_the_other_answered_meanwhile(trained):
    with trained.connect() as experts:
        trained.lose()
        with torch.no_grad():
            trained.check_is_of_the_other(experts["ffn.0"](tokens()), tokens())
        trained.give_back()
        assert torch.equal(experts["ffn.0"].state_dict()["weight"], trained.modules[trained.which].weight)


def test_weights_of_replicas_that_nobody_trains_are_of_whichever_answers():
    module = nn.Linear(D_MODEL, D_MODEL)
    with ExpertsServer({"ffn.0": module}) as one, ExpertsServer({"ffn.0": module}) as other:
        first, second = Proxy(one.address), Proxy(other.address)
        with first, second, connect([first.address, second.address], timeout_s=ENDLESS_S) as experts:
            chosen = experts["ffn.0"].hosted.addresses[0]
            (first if chosen == first.address else second).is_black_hole = True
            with torch.no_grad():
                experts["ffn.0"](torch.randn(2, D_MODEL))
            assert torch.equal(experts["ffn.0"].state_dict()["weight"], module.weight)


def test_a_training_goes_on_at_its_own_as_soon_as_that_answers(trained):
    with trained.connect() as experts:
        twin = copy.deepcopy(trained.modules[trained.which])
        local = sgd(twin.parameters())
        trained.lose()
        with torch.no_grad():
            trained.check_is_of_the_other(experts["ffn.0"](tokens()), tokens())
        trained.give_back()
        optimizer = RemoteOptimizer(experts)
        for _ in range(2):
            y, expected = experts["ffn.0"](tokens()), twin(tokens())
            torch.testing.assert_close(y, expected)
            for loss, own in ((y.square().sum(), optimizer), (expected.square().sum(), local)):
                own.zero_grad()
                loss.backward()
                own.step()
        torch.testing.assert_close(trained.modules[trained.which].weight, twin.weight)
        assert trained.servers[1 - trained.which].num_updates == {"ffn.0": 0}


@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen, with inputs that are trained"])
def test_a_forward_that_records_gradients_raises_where_its_own_does_not_come_back(trained, is_frozen):
    with trained.connect(patience_s=0.2) as experts:
        experts["ffn.0"].requires_grad_(not is_frozen)
        trained.lose()
        for _ in range(2):
            with pytest.raises(ServerUnavailableError, match=trained.proxies[trained.which].address):
                experts["ffn.0"](tokens())


def test_once_one_has_recorded_gradients_those_that_record_none_stay_with_it(trained):
    """A checkpoint may make such a one first, and then its gradients, which would be those of another expert."""
    with trained.connect(patience_s=0.2) as experts:
        experts["ffn.0"](tokens())
        trained.lose()
        with torch.no_grad(), pytest.raises(ServerUnavailableError):
            experts["ffn.0"](tokens())
        trained.give_back()
        found = []
        for expert in (experts["ffn.0"], trained.modules[trained.which]):
            x = tokens()
            y = checkpoint(expert, x, use_reentrant=True)
            y.square().sum().backward()
            found.append((y, x.grad))
        torch.testing.assert_close(*found)


def test_those_of_one_with_an_optimizer_stay_with_it_from_the_first(trained):
    """A reentrant checkpoint gave the result of one, and gradients of the other."""
    with trained.connect(patience_s=0.2) as experts:
        trained.lose()
        with torch.no_grad():
            trained.check_is_of_the_other(experts["ffn.0"](tokens()), tokens())
        RemoteOptimizer(experts)
        with torch.no_grad(), pytest.raises(ServerUnavailableError):
            experts["ffn.0"](tokens())


def test_one_that_nobody_trains_there_does_not_stand_in_for_it():
    """What that said of the expert counted while the other was away: evaluations and weights were its own."""
    module, copy_of_old = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)
    with (
        ExpertsServer({"ffn.0": module}, optimizer=sgd) as server,
        ExpertsServer({"ffn.0": copy_of_old}) as other,
        Proxy(server.address) as proxy,
        connect_first_to(proxy.address, other.address) as experts,
    ):
        x = torch.randn(2, D_MODEL)
        experts["ffn.0"](x).sum().backward()
        proxy.is_gone = True
        proxy.cut()
        for call in (lambda: experts["ffn.0"](x), experts.state_dict):
            with torch.no_grad(), pytest.raises(ServerUnavailableError, match=proxy.address):
                call()
        assert experts.info()["ffn.0"].is_trained is False, "as the one says that answers"


def test_one_that_joins_in_the_midst_of_a_training_is_one_too():
    """It was taken for where the expert had moved."""
    with ExpertsServer({"ffn.0": nn.Linear(D_MODEL, D_MODEL)}, optimizer=sgd) as later:
        address = later.address
    with (
        ExpertsServer({"ffn.0": nn.Linear(D_MODEL, D_MODEL)}, optimizer=sgd) as server,
        Proxy(server.address) as proxy,
        connect([proxy.address, address], retry=SOON, allow_missing=True) as experts,
    ):
        optimizer = RemoteOptimizer(experts)

        def step() -> None:
            experts["ffn.0"](torch.randn(2, D_MODEL)).sum().backward()
            optimizer.step()

        step()
        with ExpertsServer({"ffn.0": nn.Linear(D_MODEL, D_MODEL)}, optimizer=sgd, listen=address) as joined:
            step()
            proxy.is_gone = True
            proxy.cut()
            for _ in range(2):
                with pytest.raises(ServerUnavailableError, match=proxy.address):
                    step()
            assert joined.num_updates == {"ffn.0": 0}
            with connect(address) as others:
                assert others.keys() == {"ffn.0"}, "it serves"
        assert server.num_updates == {"ffn.0": 2}


def test_one_that_records_none_goes_to_the_other(trained):
    with trained.connect() as experts:
        trained.lose()
        experts["ffn.0"].requires_grad_(False)
        for _ in range(2):
            trained.check_is_of_the_other(experts["ffn.0"](tokens().detach()), tokens())


def test_a_layer_that_may_drop_it_goes_on_without_it(trained):
    with trained.connect() as experts:
        local = nn.Linear(D_MODEL, D_MODEL).double()
        router = TopKRouter(D_MODEL, 2, top_k=2).double()
        layer = MixtureOfExperts(router, [local, experts["ffn.0"]], on_failure="drop")
        trained.lose()
        y, routing = layer(x := tokens(), return_routing=True)
        both = [local, trained.modules[trained.which]]
        torch.testing.assert_close(y, combine_survivors(x, router(x), both, lost_in_forward={1}))
        assert [failure.phase for failure in routing.failures] == ["forward"]


def test_a_training_does_not_go_on_with_a_replica_but_where_its_own_returns(monkeypatch):
    """It went over without a word, once the name stood for its server no more."""
    modules = make_modules(0)
    name_server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", name_server.getaddrinfo)
    old = serve(modules, "127.0.0.1:0")
    name_server.hosts, port = ["127.0.0.1"], old.address.rpartition(":")[2]
    x = torch.ones(1, 4)

    def step() -> None:
        optimizer.zero_grad()
        experts["ffn.0"](x).sum().backward()
        optimizer.step()

    with connect(named(old), timeout_s=120.0, retry=SOON) as experts:
        optimizer = RemoteOptimizer(experts)
        with move(make_modules(1, 0), old, name_server) as replica:
            name_server.hosts.append("127.0.0.1")
            step()
            old.stop()
            name_server.hosts.pop()
            for call in (step, lambda: experts["ffn.0"](x), experts.state_dict):
                with pytest.raises(ServerUnavailableError, match=rf"127\.0\.0\.1:{port}"):
                    call()
            at_replica = name_server.hosts[0]
            with move(modules, old, name_server) as new:
                name_server.hosts.append(at_replica)
                step()
                assert (new.num_updates["ffn.0"], replica.num_updates["ffn.0"]) == (1, 0)
                torch.testing.assert_close(
                    experts["ffn.0"].state_dict()["weight"], modules["ffn.0"].weight.data
                )
                assert {*experts.connection.addresses} == {new.address, replica.address}
