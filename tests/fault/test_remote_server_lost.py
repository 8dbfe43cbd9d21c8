"""Servers that die, freeze, come back, or come back elsewhere, while experts on them are called."""

from __future__ import annotations

import copy
import signal
import threading

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import DeadlineExceededError, ExpertNotFoundError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import ServerProcess, wait_until

AT_ONCE = RetryPolicy(patience_s=0.0)
PATIENT = RetryPolicy(patience_s=150.0)  # a server process takes a while to start on a busy machine
SERVE = ("--expert", "ffn", "--num-experts", "2", "--d-model", "8", "--optimizer", "sgd", "--lr", "0.1")


class Gated(nn.Module):
    """Says that it has begun, and waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.gate.wait(120)
        return x


def call_in_thread(experts: RemoteExperts) -> tuple[threading.Thread, list[BaseException | torch.Tensor]]:
    """Begin a call; return its thread and a list that will hold what became of it."""
    became: list[BaseException | torch.Tensor] = []

    def call() -> None:
        try:
            became.append(experts["ffn.0"](torch.ones(1, 8)))
        except BaseException as error:
            became.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, became


def serve_slowly() -> ServerProcess:
    """A server whose answers take a minute; what is lost is noticed within two seconds."""
    return ServerProcess(*SERVE, "--latency-ms", "60000")


@pytest.fixture(scope="module")
def slow_server():
    with serve_slowly() as server:
        yield server


class TestNoticed:
    """A call under way on a server that is lost fails long before its deadline: pings go unanswered."""

    def test_a_network_that_swallows_everything_is_noticed(self, slow_server):
        with (
            Proxy(slow_server.address) as proxy,
            connect(proxy.address, timeout_s=1000.0, retry=AT_ONCE) as experts,
        ):
            proxy.is_black_hole = True
            with pytest.raises(ServerUnavailableError):
                experts["ffn.0"](torch.ones(1, 8))

    def test_a_server_that_does_not_answer_in_time_has_a_deadline(self, slow_server):
        with connect(slow_server.address, timeout_s=3.0) as experts:
            place = r"expert 'ffn\.0' at .*, forward, after \d+\.\d s \(deadline 3\.0 s\): expected an answer"
            with pytest.raises(DeadlineExceededError, match=place):
                experts["ffn.0"](torch.ones(1, 8))

    def test_closing_the_connection_ends_a_call_under_way(self):
        gated = Gated()
        with ExpertsServer({"ffn.0": gated}) as server:
            experts = connect(server.address)
            thread, became = call_in_thread(experts)
            assert gated.begun.wait(60)
            experts.close()
            thread.join(60)
            gated.gate.set()
        assert isinstance(became[0], ServerUnavailableError)

    @pytest.mark.parametrize("fate", ["frozen", "killed"])
    def test_a_lost_server_is_noticed(self, fate):
        with (
            serve_slowly() as server,
            connect(server.address, timeout_s=1000.0, retry=AT_ONCE) as experts,
        ):
            thread, became = call_in_thread(experts)
            server.signal(signal.SIGSTOP) if fate == "frozen" else server.kill()
            thread.join(200)
            assert isinstance(became[0], ServerUnavailableError)
            assert "expert 'ffn.0' at" in str(became[0])
            assert "): expected " in str(became[0]), "in our words"
            with pytest.raises(ServerUnavailableError):
                experts["ffn.1"](torch.ones(1, 8))


class TestComesBack:
    def test_a_pass_waits_for_a_server_that_is_restarted(self):
        with (
            ServerProcess(*SERVE) as first,
            connect(first.address, timeout_s=200.0, retry=PATIENT) as experts,
        ):
            x = torch.ones(1, 8)
            expected = experts["ffn.0"](x)
            first.kill()
            thread, became = call_in_thread(experts)
            with ServerProcess(*SERVE, "--listen", first.address):
                thread.join(200)
                assert isinstance(became[0], torch.Tensor), became[0]
                assert became[0].shape == expected.shape

    def test_a_frozen_server_that_thaws_serves_again(self):
        with ServerProcess(*SERVE) as server, connect(server.address) as experts:
            expected = experts["ffn.0"](torch.ones(1, 8))
            server.signal(signal.SIGSTOP)
            thread, became = call_in_thread(experts)
            server.signal(signal.SIGCONT)
            thread.join(60)
            torch.testing.assert_close(became[0], expected)

    @pytest.mark.parametrize("operation", ["forward", "step", "state_dict"])
    def test_a_server_that_is_gone_for_good_ends_the_patience(self, operation):
        retry = RetryPolicy(patience_s=0.5)
        with ServerProcess(*SERVE) as server, connect(server.address, retry=retry) as experts:
            optimizer = RemoteOptimizer(experts)
            experts["ffn.0"](torch.ones(1, 8)).sum().backward()
            server.kill()
            operations = {
                "forward": lambda: experts["ffn.0"](torch.ones(1, 8)),
                "step": optimizer.step,
                "state_dict": experts.state_dict,
            }
            with pytest.raises(ServerUnavailableError) as raised:
                operations[operation]()
        note = raised.value.__notes__[-1]
        assert note.startswith("Given up after ")
        assert note.endswith(
            "is waited for 0.5 s; connect(..., retry=RetryPolicy(patience_s=...)) waits longer."
        )

    @pytest.mark.parametrize("operation", ["state_dict", "load_state_dict", "step", "zero_grad"])
    def test_an_error_of_a_lost_server_names_the_operation(self, operation):
        with ServerProcess(*SERVE) as server, connect(server.address, retry=AT_ONCE) as experts:
            optimizer, weights = RemoteOptimizer(experts), experts.state_dict()
            experts["ffn.0"](torch.ones(1, 8)).sum().backward()
            server.kill()
            operations = {
                "state_dict": experts.state_dict,
                "load_state_dict": lambda: experts.load_state_dict(weights),
                "step": optimizer.step,
                "zero_grad": optimizer.zero_grad,
            }
            place = (
                rf"server at {server.address}, {operation}, after \d+\.\d s \(deadline 30\.0 s\): expected "
            )
            for _ in range(2):  # noticed, and known
                with pytest.raises(ServerUnavailableError, match=place):
                    operations[operation]()

    def test_nothing_is_sent_to_a_server_that_was_lost_before_it_answers_again(self):
        server = ExpertsServer({"ffn.0": nn.Linear(8, 8)}).start()
        with connect(server.address, retry=AT_ONCE) as experts:
            server.stop()
            for expected in ("expected a connection", "expected a server that answers, got none"):
                with pytest.raises(ServerUnavailableError, match=rf"forward, .*: {expected}"):
                    experts["ffn.0"](torch.ones(1, 8))

    def test_a_backward_after_a_restart_computes_the_forward_again(self):
        torch.manual_seed(0)
        modules = {"ffn.0": nn.Linear(8, 8)}
        twin = copy.deepcopy(modules["ffn.0"])
        server = ExpertsServer(modules, optimizer=sgd).start()
        with connect(server.address) as experts:
            x = torch.randn(3, 8, requires_grad=True)
            y = experts["ffn.0"](x)
            server.stop()
            with ExpertsServer(modules, optimizer=sgd, listen=server.address):
                y.square().sum().backward()
                (expected,) = torch.autograd.grad(twin(x).square().sum(), x)
                torch.testing.assert_close(x.grad, expected)
                RemoteOptimizer(experts).step()
                assert experts.info()["ffn.0"].num_updates == 1


class TestElsewhere:
    """Several servers for one expert: replicas, and an expert that moves."""

    def make(self) -> dict[str, nn.Module]:
        torch.manual_seed(0)
        return {"ffn.0": nn.Linear(8, 8), "ffn.1": nn.Linear(8, 8)}

    def test_a_forward_moves_to_a_replica(self):
        servers = [ExpertsServer(self.make()).start() for _ in range(2)]
        x = torch.ones(1, 8)
        with connect([server.address for server in servers]) as experts:
            assert sorted(experts["ffn.0"].hosted.addresses) == sorted(server.address for server in servers)
            expected = experts["ffn.0"](x)
            servers[0].stop()
            torch.testing.assert_close(experts["ffn.0"](x), expected)
            with ExpertsServer(self.make(), listen=servers[0].address):
                servers[1].stop()
                torch.testing.assert_close(experts["ffn.0"](x), expected)

    def test_what_is_said_of_an_expert_is_said_by_the_replica_that_is_asked(self):
        expected = {}
        with (
            ExpertsServer({"e": nn.Linear(4, 4)}) as frozen,
            ExpertsServer({"e": nn.Sequential(nn.Linear(8, 8))}, optimizer=sgd) as trained,
        ):
            expected[frozen.address] = (4, False, ["e.bias", "e.weight"])
            expected[trained.address] = (8, True, ["e.0.bias", "e.0.weight"])
            asked: set[str] = set()
            while asked != {*expected}:  # each client chooses one
                with connect(expected) as experts:
                    address = experts.connection.address_of("e")
                    width, is_trained, keys = expected[address]
                    assert experts["e"].hosted.addresses[0] == address
                    assert experts["e"].is_trained == is_trained
                    assert experts["e"](torch.ones(1, width)).shape == (1, width)
                    assert sorted(experts.state_dict()) == keys
                    asked.add(address)

    def test_one_client_trains_one_replica(self):
        servers = [ExpertsServer(self.make(), optimizer=sgd).start() for _ in range(2)]
        with connect([server.address for server in servers]) as experts:
            optimizer = RemoteOptimizer(experts)
            for _ in range(3):
                optimizer.zero_grad()
                experts["ffn.0"](torch.ones(1, 8)).sum().backward()
                optimizer.step()
        assert sorted(server.num_updates["ffn.0"] for server in servers) == [0, 3]
        for server in servers:
            server.stop()

    def test_training_goes_on_where_an_expert_has_moved(self):
        modules = self.make()
        twin = copy.deepcopy(modules["ffn.0"])
        old, spare = ExpertsServer(modules, optimizer=sgd).start(), ExpertsServer({}, optimizer=sgd).start()
        with connect([old.address, spare.address]) as experts:
            x = torch.randn(3, 8, requires_grad=True)
            y = experts["ffn.0"](x)
            old.stop()
            spare.stop()
            with ExpertsServer(modules, optimizer=sgd, listen=spare.address) as new:
                y.square().sum().backward()
                RemoteOptimizer([experts["ffn.0"]]).step()
                assert new.num_updates["ffn.0"] == 1
        local = sgd(twin.parameters())
        twin(x).square().sum().backward()
        local.step()
        torch.testing.assert_close(modules["ffn.0"].state_dict(), twin.state_dict())

    def test_a_backward_needs_no_server_whose_outputs_are_not_used(self):
        modules = self.make()
        servers = [ExpertsServer({name: module}, optimizer=sgd).start() for name, module in modules.items()]
        with connect([server.address for server in servers], retry=AT_ONCE) as experts:
            used, unused = parallel_apply(list(experts.values()), [(torch.ones(1, 8),)] * 2)
            servers[1].stop()
            used.sum().backward()
            RemoteOptimizer([experts["ffn.0"]]).step()
            assert servers[0].num_updates == {"ffn.0": 1}
            del unused
        servers[0].stop()

    def test_nor_one_of_which_nothing_is_wanted(self):
        modules = self.make()
        servers = [ExpertsServer({name: module}, optimizer=sgd).start() for name, module in modules.items()]
        with connect([server.address for server in servers], retry=AT_ONCE) as experts:
            xs = [torch.ones(1, 8, requires_grad=True) for _ in servers]
            ys = parallel_apply(list(experts.values()), [(x,) for x in xs])
            servers[1].stop()
            (grad,) = torch.autograd.grad(sum(y.sum() for y in ys), xs[:1])
            torch.testing.assert_close(grad, torch.autograd.grad(modules["ffn.0"](xs[0]).sum(), xs[0])[0])
        servers[0].stop()

    def test_a_backward_does_not_move_to_a_replica(self):
        servers = [ExpertsServer(self.make(), optimizer=sgd).start() for _ in range(2)]
        with connect([server.address for server in servers], retry=RetryPolicy(patience_s=0.3)) as experts:
            y = experts["ffn.0"](torch.ones(1, 8))
            address = y.grad_fn.calls[0].address
            (used,) = [server for server in servers if server.address == address]
            used.stop()
            with pytest.raises(ServerUnavailableError, match=address):
                y.sum().backward()
        for server in servers:
            server.stop()

    def test_a_missing_server_is_allowed_if_asked_for(self):
        gone = ExpertsServer(self.make()).start()
        gone.stop()
        with (
            ExpertsServer(self.make()) as server,
            connect([gone.address, server.address], allow_missing=True) as experts,
        ):
            assert experts["ffn.0"](torch.ones(1, 8)).shape == (1, 8)
        with pytest.raises(ServerUnavailableError):
            connect([gone.address, server.address], allow_missing=True)

    def test_an_expert_that_moved_between_living_servers_is_found(self):
        first, second = self.make(), self.make()
        moving = {"ffn.1": first.pop("ffn.1")}
        old, other = ExpertsServer(first | moving).start(), ExpertsServer({"ffn.9": second["ffn.0"]}).start()
        x = torch.ones(1, 8)
        with connect([old.address, other.address]) as experts:
            expected = experts["ffn.1"](x)
            old.stop()
            other.stop()
            with (
                ExpertsServer(first, listen=old.address),
                ExpertsServer(moving, listen=other.address),
            ):
                torch.testing.assert_close(experts["ffn.1"](x), expected)

    def test_an_expert_that_is_hosted_no_more_is_named(self):
        server = ExpertsServer(self.make()).start()
        with connect(server.address) as experts:
            server.stop()
            with ExpertsServer({"ffn.1": nn.Linear(8, 8)}, listen=server.address):
                for _ in range(2):
                    with pytest.raises(ExpertNotFoundError, match=r"expert 'ffn\.0'"):
                        experts["ffn.0"](torch.ones(1, 8))
                    experts.info()

    def test_what_is_known_of_old_is_not_told_as_of_now(self):
        goes = ExpertsServer({"ffn.1": nn.Linear(8, 8)}).start()
        with (
            ExpertsServer({"ffn.0": nn.Linear(8, 8)}) as stays,
            connect([stays.address, goes.address]) as experts,
        ):
            assert list(experts.info()) == ["ffn.0", "ffn.1"]
            goes.stop()
            assert list(experts.info()) == ["ffn.0"]
            with ExpertsServer({"ffn.1": nn.Linear(8, 8)}, listen=goes.address):
                wait_until(lambda: list(experts.info()) == ["ffn.0", "ffn.1"])
