"""Experts that move from one server to another: whatever is asked of them next finds them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import (
    ExpertNotFoundError,
    GradientsLostError,
    InvalidCallError,
    ServerUnavailableError,
)
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import make_modules, sgd
from tests.support.replicas import Replicas, is_lost
from tests.support.servers import wait_until

PATIENT = RetryPolicy(patience_s=100.0)
X = torch.ones(1, 4)
WEIGHTS = {"ffn.0.weight": torch.eye(4), "ffn.0.bias": torch.zeros(4)}


class Servers:
    """Two addresses; what is hosted at each can be changed, as by a restart with another configuration."""

    def __init__(self) -> None:
        self._running: list[ExpertsServer | None] = []
        self._another: grpc.Server | None = None
        self.addresses: list[str] = []

    def start(self, *hosted: dict[str, nn.Module]) -> None:
        for modules in hosted:
            server = ExpertsServer(modules, optimizer=sgd).start()
            self._running.append(server)
            self.addresses.append(server.address)

    def restart(self, *hosted: dict[str, nn.Module] | None) -> None:
        """Stop all; then host these, or nothing at an address of which None is said."""
        self.stop()
        self._running = [
            None if modules is None else ExpertsServer(modules, optimizer=sgd, listen=address).start()
            for address, modules in zip(self.addresses, hosted, strict=True)
        ]

    def start_another(self) -> None:
        """Start a server of something else at the first address."""
        self._another = grpc.server(ThreadPoolExecutor(1))
        self._another.add_insecure_port(self.addresses[0])
        self._another.start()

    def stop(self) -> None:
        if self._another is not None:
            self._another.stop(None).wait()
        for server in self._running:
            if server is not None:
                server.stop()
        self._running, self._another = [], None


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@contextlib.contextmanager
def connected(servers: Servers) -> Iterator[RemoteExperts]:
    with connect(servers.addresses, timeout_s=200.0, retry=PATIENT) as experts:
        yield experts


class TestOnce:
    """`ffn.0`, hosted at the first address and known to the client, moves to the second."""

    @pytest.fixture
    def modules(self, servers) -> dict[str, nn.Module]:
        modules = make_modules(0)
        servers.start(modules, {})
        return modules

    @pytest.fixture
    def experts(self, servers, modules) -> Iterator[RemoteExperts]:
        with connected(servers) as experts:
            yield experts

    @pytest.fixture(params=["its server lives", "its server is gone", "its address is another's"])
    def move(self, request, servers, modules) -> Callable[[], None]:
        stays = {"ffn.9": nn.Linear(4, 4)} if request.param == "its server lives" else None

        def move() -> None:
            servers.restart(stays, modules)
            if request.param == "its address is another's":
                servers.start_another()

        return move

    def test_a_forward_finds_it(self, modules, experts, move):
        move()
        assert torch.equal(experts["ffn.0"](X), modules["ffn.0"](X))

    def test_its_repr_and_its_errors_name_where_it_is(self, servers, experts, move):
        move()
        experts["ffn.0"](X)
        assert f"address='{servers.addresses[1]}'" in repr(experts["ffn.0"])
        with pytest.raises(InvalidCallError, match=rf"at {servers.addresses[1]}: expected shape"):
            experts["ffn.0"](torch.ones(1, 5))

    def test_its_weights_are_fetched(self, modules, experts, move):
        move()
        assert torch.equal(experts.state_dict()["ffn.0.weight"], modules["ffn.0"].weight)

    def test_its_weights_are_set(self, modules, experts, move):
        move()
        experts.load_state_dict(WEIGHTS)
        assert torch.equal(modules["ffn.0"].weight, torch.eye(4))

    def test_its_weights_are_set_after_it_was_found(self, modules, experts, move):
        move()
        experts["ffn.0"](X)
        experts.load_state_dict(WEIGHTS)
        assert torch.equal(modules["ffn.0"].weight, torch.eye(4))

    def test_a_step_tells_that_its_gradients_did_not_come_along_and_the_next_is_made(
        self, modules, experts, move
    ):
        optimizer = RemoteOptimizer(experts)
        experts["ffn.0"](X).sum().backward()
        move()
        twin = copy.deepcopy(modules["ffn.0"])
        with pytest.raises(GradientsLostError):
            optimizer.step()
        optimizer.zero_grad()
        experts["ffn.0"](X).sum().backward()
        optimizer.step()
        twin(X).sum().backward()
        sgd(twin.parameters()).step()
        torch.testing.assert_close(modules["ffn.0"].weight, twin.weight)

    def test_gradients_that_did_not_come_along_are_forgotten(self, experts, move):
        optimizer = RemoteOptimizer(experts)
        experts["ffn.0"](X).sum().backward()
        move()
        optimizer.zero_grad()
        optimizer.step()
        assert experts.info()["ffn.0"].num_updates == 0

    @pytest.mark.parametrize("noticed", ["nothing", "gone", "gone and back"])
    def test_an_optimizer_that_goes_on_without_servers_goes_on_where_it_is(
        self, servers, modules, experts, move, noticed
    ):
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        experts["ffn.0"](X).sum().backward()
        if noticed != "nothing":
            servers.restart(None, None)
            optimizer.zero_grad()
            assert [type(failure) for failure in optimizer.failures] == [ServerUnavailableError]
        if noticed == "gone and back":
            servers.restart(modules, None)
            wait_until(lambda: not is_lost(experts, servers.addresses[0]))
        move()
        before = modules["ffn.0"].weight.clone()

        def has_forgotten() -> bool:  # grpc takes a moment to find out that a server is back
            optimizer.zero_grad()
            return optimizer.failures == []

        wait_until(has_forgotten, patience_s=20.0)
        experts["ffn.0"](X).sum().backward()
        optimizer.step()
        assert optimizer.failures == []
        assert not torch.equal(modules["ffn.0"].weight, before)

    def test_it_says_that_gradients_did_not_come_along(self, modules, experts, move):
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        experts["ffn.0"](X).sum().backward()
        move()
        optimizer.step()
        assert [type(failure) for failure in optimizer.failures] == [GradientsLostError]


def test_experts_that_change_places_are_all_found(servers):
    """Each server answers that it does not host what it is asked for; nobody is gone."""
    first, second = make_modules(0), make_modules(1)
    servers.start(first, second)
    with connected(servers) as experts:
        optimizer = RemoteOptimizer(experts)
        (experts["ffn.0"](X) + experts["ffn.1"](X)).sum().backward()
        servers.restart(second, first)
        optimizer.zero_grad()
        servers.restart(first, second)
        assert {name.rpartition(".")[0] for name in experts.state_dict()} == {"ffn.0", "ffn.1"}
        servers.restart(second, first)
        experts.load_state_dict(WEIGHTS)
        assert torch.equal(first["ffn.0"].weight, torch.eye(4))


def test_an_expert_that_moves_there_and_back_again_is_trained_all_along(servers):
    modules = make_modules(0)
    twin = copy.deepcopy(modules["ffn.0"])
    local = sgd(twin.parameters())
    servers.start(modules, {})
    with connected(servers) as experts:
        optimizer = RemoteOptimizer(experts)
        for at_first in (False, True, False):
            optimizer.zero_grad()
            local.zero_grad()
            y = experts["ffn.0"](X)
            servers.restart(*((modules, None) if at_first else (None, modules)))
            y.square().sum().backward()
            optimizer.step()
            twin(X).square().sum().backward()
            local.step()
            torch.testing.assert_close(experts.state_dict()["ffn.0.weight"], twin.weight.data)


def test_one_that_fails_where_it_has_moved_to_does_not_keep_the_others_from_theirs(servers):
    first, second = make_modules(0), make_modules(1)
    servers.start(first | second, {}, {})
    with connected(servers) as experts:
        ones = {key: torch.ones_like(tensor) for key, tensor in experts.state_dict().items()}
        servers.restart(None, {"ffn.0": nn.Linear(4, 5)}, second)
        with pytest.raises(InvalidCallError, match=r"expert 'ffn\.0'"):
            experts.load_state_dict(ones)
        assert torch.equal(second["ffn.1"].weight, torch.ones(4, 4))


class TestReplicas:
    """A replica is not where an expert has moved to: it has weights and gradients of its own."""

    def test_weights_that_a_lost_replica_does_not_get_are_an_error(self, servers):
        one, other = make_modules(0), make_modules(0)
        servers.start(one, other)
        with connect(servers.addresses, retry=RetryPolicy(patience_s=0.2)) as experts:
            servers.restart(one, None)
            with pytest.raises(ServerUnavailableError, match=servers.addresses[1]):
                experts.load_state_dict(WEIGHTS)

    def test_where_one_has_dropped_it_the_other_is_asked(self, servers):
        one, other = make_modules(0), make_modules(0)
        servers.start(one, other)
        with connected(servers) as experts:
            (used,) = {experts["ffn.0"](X).grad_fn.calls[0].address}
            is_first = used == servers.addresses[0]
            servers.restart(*(({}, other) if is_first else (one, {})))
            experts.load_state_dict(WEIGHTS)
            assert torch.equal(experts.state_dict()["ffn.0.weight"], torch.eye(4))

    def test_a_forward_of_a_training_finds_it_where_it_has_moved(self, servers):
        replicas = [{"ffn.0": nn.Linear(4, 4)} for _ in range(2)]
        servers.start(*replicas, {})
        with connected(servers) as experts:
            optimizer = RemoteOptimizer(experts)
            moves = servers.addresses.index(experts["ffn.0"].hosted.addresses[0])
            hosted = [None if index == moves else replica for index, replica in enumerate(replicas)]
            servers.restart(*hosted, replicas[moves])
            for _ in range(2):
                optimizer.zero_grad()
                y = experts["ffn.0"](X)
                assert torch.equal(y, replicas[moves]["ffn.0"](X))
                y.sum().backward()
                optimizer.step()
            assert torch.equal(experts.state_dict()["ffn.0.weight"], replicas[moves]["ffn.0"].weight)

    def test_a_backward_is_not_sent_to_it(self, servers):
        servers.start(make_modules(0), make_modules(0))
        with connected(servers) as experts:
            y = experts["ffn.0"](X)
            is_first = y.grad_fn.calls[0].address == servers.addresses[0]
            servers.restart(*(({}, make_modules(0)) if is_first else (make_modules(0), {})))
            with pytest.raises(ExpertNotFoundError, match=r"expert 'ffn\.0'"):
                y.sum().backward()


class TestReplicasThatChangePlaces:
    """Two replicas with weights of their own, each with checkpoints; the forward is made by one of them."""

    @pytest.fixture
    def replicas(self, tmp_path) -> Iterator[Replicas]:
        replicas = Replicas(tmp_path)
        yield replicas
        replicas.stop()

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.ones(1, 4, requires_grad=True)

    def begin(self, experts: RemoteExperts, replicas: Replicas, x: Tensor) -> tuple[Tensor, int]:
        """Return the result of a forward, and which of the replicas made it."""
        y = experts["ffn.0"](x)
        return y, replicas.addresses.index(y.grad_fn.calls[0].address)

    @pytest.mark.parametrize(
        "changes", [True, False], ids=["they change places", "they stay where they were"]
    )
    @pytest.mark.parametrize("is_looked_for", [False, True], ids=["", "and are found"])
    def test_a_backward_goes_to_the_one_that_made_the_forward(self, replicas, x, changes, is_looked_for):
        with connect(replicas.addresses, timeout_s=200.0, retry=PATIENT) as experts:
            y, which = self.begin(experts, replicas, x)
            replicas.restart([1, 0] if changes else [0, 1])
            if is_looked_for:
                experts.info()
            y.sum().backward()
            assert torch.equal(x.grad, replicas.weight(which).sum(dim=0, keepdim=True))
            RemoteOptimizer(experts).step()
            assert replicas.num_updates(which) == 1

    def test_where_only_another_one_is_left_a_backward_raises(self, replicas, x):
        with connect(replicas.addresses, timeout_s=200.0, retry=RetryPolicy(patience_s=0.2)) as experts:
            y, which = self.begin(experts, replicas, x)
            replicas.restart([1 - which, None] if which == 0 else [None, 1 - which])
            with pytest.raises(
                ExpertNotFoundError, match="expected the replica that made the forward, got another"
            ):
                y.sum().backward()
            assert x.grad is None
            experts["ffn.0"](x).sum().backward()
            assert torch.equal(x.grad, replicas.weight(1 - which).sum(dim=0, keepdim=True))
