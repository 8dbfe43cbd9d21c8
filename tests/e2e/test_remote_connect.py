"""Finding experts: what `connect` returns, and what it says when it cannot."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.spec import InputSpec
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import (
    ConfigError,
    ExpertFailedError,
    ExpertNotFoundError,
    InvalidCallError,
    ServerUnavailableError,
)
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import connect
from moe_autograd.remote.channel import Channel
from tests.support.subprocesses import assert_prints, run_command


class Failing(nn.Module):
    """Raises on even sums."""

    def forward(self, x):
        if int(x.sum()) % 2 == 0:
            raise ArithmeticError("an even sum")
        return x


class FailingBackward(nn.Module):
    """Raises in its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("a backward")

    def forward(self, x):
        return self.Function.apply(x)


@pytest.fixture(scope="module")
def server():
    modules = {f"ffn.{index}": nn.Linear(4, 4) for index in (10, 2, 1)}
    modules |= {"failing": Failing(), "failing_backward": FailingBackward()}
    with ExpertsServer(modules) as server:
        yield server


@pytest.fixture
def experts(server):
    with connect(server.address) as experts:
        yield experts


@pytest.fixture
def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


class TestMapping:
    def test_iteration_is_in_natural_order(self, experts):
        assert list(experts) == ["failing", "failing_backward", "ffn.1", "ffn.2", "ffn.10"]
        assert [expert.name for expert in experts.values()] == list(experts)
        assert len(experts) == 5

    def test_an_unknown_name_is_a_key_error_that_shows_the_known_ones(self, experts, server):
        with pytest.raises(KeyError) as raised:
            experts["ffn.3"]
        assert isinstance(raised.value, ExpertNotFoundError)
        assert "expert 'ffn.3': expected one of 5 (failing, " in str(raised.value)
        assert server.address in str(raised.value)
        assert "ffn.3" not in experts
        assert experts.get("ffn.3") is None

    def test_repr_shows_how_many_and_where(self, experts, server):
        assert repr(experts) == f"RemoteExperts(5 experts at {server.address})"
        assert repr(experts.connection) == f"Connection(5 experts at {server.address})"

    def test_hosted_says_what_an_expert_is(self, experts, server):
        hosted = experts["ffn.1"].hosted
        assert (hosted.kind, hosted.num_parameters, hosted.is_trained) == ("Linear", 20, False)
        assert hosted.addresses == (server.address,)


class TestNoServer:
    def test_a_server_that_is_not_there_is_named(self, free_address):
        with pytest.raises(
            ServerUnavailableError, match=re.escape(f"server at {free_address}, info, after ")
        ):
            connect(free_address)

    def test_one_of_two_that_is_not_there_is_named(self, server, free_address):
        with pytest.raises(ServerUnavailableError, match=re.escape(free_address)):
            connect([server.address, free_address])

    @pytest.mark.parametrize(
        "address",
        ["", "localhost", "localhost:", ":99", "localhost:0", "localhost:65536", "h:p", "h:" + "9" * 5000],
        ids=lambda address: address[:20],
    )
    def test_an_address_that_is_none_is_refused(self, address):
        with pytest.raises(ValueError, match=f"expected host:port, got {address!r}"):
            connect(address)

    @pytest.mark.parametrize("addresses", [None, 31415])
    def test_what_is_neither_an_address_nor_several_is_refused(self, addresses):
        with pytest.raises(TypeError, match=f"connect: expected host:port, .*, got {addresses}"):
            connect(addresses)

    def test_who_has_a_server_in_python_is_told_to_take_its_address_once_it_has_started(self):
        server = ExpertsServer({"ffn.0": nn.Linear(4, 4)})
        with pytest.raises(TypeError, match="the `address` of an `ExpertsServer`"):
            connect(server)
        with pytest.raises(ValueError, match="the `address` of an `ExpertsServer` that has started"):
            connect(server.address)

    def test_a_file_is_no_tls(self):
        with pytest.raises(
            TypeError, match=r"expected tls to be a TLS or None, got 'ca\.pem'\. Pass TLS\(ca_file="
        ):
            connect("localhost:1", tls="ca.pem")

    def test_no_address_is_refused(self):
        with pytest.raises(ValueError, match="at least one"):
            connect([])

    @pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), None])
    def test_no_deadline_is_refused(self, server, timeout_s):
        with pytest.raises(ValueError, match="timeout_s: expected a positive, finite number"):
            connect(server.address, timeout_s=timeout_s)

    def test_after_the_block_the_connection_is_closed(self, server):
        with connect(server.address) as experts:
            expert = experts["ffn.1"]
        with pytest.raises(ServerUnavailableError, match="closed"):
            expert(torch.ones(1, 4))

    def test_a_port_in_use_is_said_by_the_server(self, server):
        with pytest.raises(ConfigError), ExpertsServer({}, listen=server.address):
            pass


class TestBadCalls:
    """Each has a clear error that names expert, address, phase and time, and the server lives on."""

    @pytest.fixture(autouse=True)
    def lives_on(self, experts):
        yield
        assert experts["ffn.1"](torch.ones(1, 4)).shape == (1, 4)

    def test_values_that_are_not_finite_are_refused_by_the_server(self, experts, server):
        with pytest.raises(InvalidCallError, match="expected finite values") as raised:
            experts["ffn.1"](torch.full((1, 4), float("nan")))
        place = (
            rf"expert 'ffn.1' at {re.escape(server.address)}, forward, after \d+\.\d s \(deadline 30\.0 s\): "
        )
        assert re.match(place, str(raised.value))
        assert str(raised.value).count("'ffn.1'") == 1

    def test_a_bad_gradient_is_refused(self, experts):
        x = torch.ones(1, 4, requires_grad=True)
        y = experts["ffn.1"](x)
        with pytest.raises(InvalidCallError, match=r"backward, after .* expected finite values"):
            y.backward(torch.full((1, 4), float("inf")))

    def test_an_expert_that_raises_is_named_with_its_error_and_the_deadline_that_every_call_has(
        self, experts
    ):
        expected = r"expert 'failing' at .*\(deadline 30\.0 s\).*ArithmeticError: an even sum"
        with pytest.raises(ExpertFailedError, match=expected):
            experts["failing"](torch.zeros(1, 4))

    def test_an_expert_that_raises_in_its_backward_is_named_with_its_error(self, experts):
        y = experts["failing_backward"](torch.zeros(1, 4, requires_grad=True))
        with pytest.raises(ExpertFailedError, match=r"backward, .*ArithmeticError: a backward"):
            y.sum().backward()

    def test_of_several_failures_the_first_is_raised_and_the_others_counted(self, experts):
        names = ["ffn.1", "ffn.2", "failing", "ffn.1"]
        inputs = [(torch.full((1, 4), value),) for value in (0.0, float("nan"), 0.0, 0.0)]
        with pytest.raises(InvalidCallError, match=r"expert 'ffn\.2' at") as raised:
            experts.connection.call_together([experts[name] for name in names], inputs, [{}] * 4)
        assert raised.value.__notes__ == ["1 more of the calls of this pass failed."]

    def test_a_tensor_above_the_servers_limit_is_refused(self, experts):
        with pytest.raises(InvalidCallError, match="expected at most"):
            experts["failing"](torch.empty(1, dtype=torch.uint8).expand(1 << 29))


class Numbers(nn.Identity):
    """Takes whole numbers."""

    input_spec = InputSpec(torch.int64, 4, None, is_certain=True)


@pytest.fixture(scope="module")
def shapes():
    modules = {
        "linear": nn.Linear(4, 4),
        "ffn": FeedForwardExpert(4),
        "half": nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.ReLU()),
        "any": nn.Identity(),
        "numbers": Numbers(),
    }
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        yield experts


class TestInputsOfAnotherShape:
    """They fail at the call, and nothing travels: the server's word at `connect` is enough."""

    @pytest.mark.parametrize(
        ("name", "x", "complaint"),
        [
            (
                "linear",
                torch.ones(1, 5),
                "expected shape (..., 4), got (1, 5) (dtype=torch.float32)",
            ),
            ("linear", torch.ones(3), "expected shape (..., 4), got (3,)"),
            ("linear", torch.ones(()), "expected shape (..., 4), got ()"),
            ("ffn", torch.ones(2, 3, 4), "expected shape (num_tokens, 4), got (2, 3, 4)"),
            (
                "ffn",
                torch.ones(2, 4).double(),
                "expected dtype torch.float32, got torch.float64 (shape=(2, 4))",
            ),
            ("half", torch.ones(2, 4), "expected dtype torch.bfloat16, got torch.float32"),
        ],
        ids=["width", "rank", "no dimension", "too many dimensions", "dtype", "dtype of a sequence"],
    )
    def test_it_is_a_value_error_that_names_expert_expected_and_got(
        self, shapes, monkeypatch, name, x, complaint
    ):
        monkeypatch.setattr(Channel, "stream", only_asking_what_is_hosted(Channel.stream))
        with pytest.raises(ValueError, match=re.escape(complaint)) as raised:
            shapes[name](x)
        (address,) = shapes[name].hosted.addresses
        assert str(raised.value).startswith(f"expert {name!r} at {address}: ")

    def test_one_bad_input_among_many_calls_is_enough(self, shapes, monkeypatch):
        monkeypatch.setattr(Channel, "stream", only_asking_what_is_hosted(Channel.stream))
        with pytest.raises(ValueError, match=r"expert 'ffn' at .* got \(1, 5\)"):
            parallel_apply([shapes["linear"], shapes["ffn"]], [(torch.ones(1, 4),), (torch.ones(1, 5),)])

    def test_autocast_makes_no_whole_numbers(self, shapes):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ValueError, match=r"expected dtype torch\.int64, got torch\.float32"),
        ):
            shapes["numbers"](torch.full((1, 4), 0.5))

    @pytest.mark.parametrize("shape", [(1, 4), (0, 4), (2, 3, 4)], ids=str)
    def test_what_fits_is_computed(self, shapes, shape):
        assert shapes["linear"](torch.ones(shape)).shape == shape

    def test_a_server_that_is_not_certain_says_nothing(self, shapes):
        assert shapes["any"].hosted.inputs == ()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(shapes["any"](torch.ones(3)), torch.ones(3))
        assert torch.equal(shapes["any"](torch.ones(3).long()), torch.ones(3).long())


def only_asking_what_is_hosted(stream: Callable[..., Any]) -> Callable[..., Any]:
    def checked(channel: Channel, rpc: str, *rest: Any) -> Any:
        return stream(channel, rpc, *rest) if rpc == "Info" else pytest.fail("it travelled")

    return checked


def test_a_proxy_for_web_pages_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc asks the one of the environment, also for a server on this machine."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ExpertsServer({"e": nn.Linear(4, 4)}) as server:
        assert_prints(
            f"""
            import torch
            from moe_autograd.remote import connect
            with connect({server.address!r}) as experts:
                print(tuple(experts["e"](torch.ones(2, 4)).shape))
            """,
            "(2, 4)",
        )
        info = run_command("info", server.address)
        assert (info.returncode, info.stderr) == (0, b"")
