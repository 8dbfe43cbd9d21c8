"""What travels in fewer bytes still gives values and gradients within the stated bounds."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, ServingConfig
from moe_autograd import parallel_apply
from moe_autograd.remote import Compression, connect
from moe_autograd.remote.compression import Encodings
from tests.support.proxy import Proxy


@pytest.fixture(scope="module")
def server():
    with ExpertsServer({"echo": nn.Identity(), "index": nn.Embedding(9, 4)}) as server:
        yield server


class SlowToConnect(Proxy):
    """Holds the first bytes of a connection for a second."""

    has_begun = False

    def _through(self, chunk: bytearray, carried: list[range], whole: list[range]) -> bytearray:
        if not self.has_begun:
            self.has_begun = True
            time.sleep(1.0)
        return super()._through(chunk, carried, whole)


class Slow(nn.Module):
    """Takes a quarter of a second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.25)
        return 2 * x


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize(
    ("compression", "forward_error", "backward_error"),
    [
        ("none", 0.0, 0.0),
        ("bfloat16", 1 / 256, 1 / 256),
        ("float16", 1 / 2048, 1 / 256),
        ("int8", 1 / 254, 1 / 254),
        (Compression(backward="bfloat16"), 0.0, 1 / 256),
        (Compression(forward="int8"), 1 / 254, 0.0),
    ],
    ids=str,
)
def test_each_direction_has_its_rounding_and_no_more(server, compression, forward_error, backward_error):
    torch.manual_seed(0)
    with connect(server.address, compression=compression) as experts:
        x = torch.randn(100, 70, requires_grad=True)
        upstream = torch.randn(100, 70)
        y = experts["echo"](x)
        y.backward(upstream)
    # An echo is rounded twice: to the server and back.
    assert 0.1 * forward_error <= relative_error(y, x) <= 2.1 * forward_error
    assert 0.1 * backward_error <= relative_error(x.grad, upstream) <= 2.1 * backward_error
    assert y.dtype == x.grad.dtype == torch.float32


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.parametrize(
    "compression",
    [
        "none",
        "int8",
        Compression(backward="int8"),
        Compression(forward="int8"),
        Compression("float16", "bfloat16"),
    ],
    ids=str,
)
def test_inputs_that_are_sent_again_are_rounded_as_at_first(compression):
    torch.manual_seed(0)
    x, grads = torch.randn(100, 70, requires_grad=True), []
    for kept_bytes in (1 << 30, 1):
        config = ServingConfig(limits=LimitsConfig(kept_forward_bytes=kept_bytes))
        with (
            ExpertsServer({"square": Square()}, config=config) as server,
            connect(server.address, compression=compression) as experts,
        ):
            grads += torch.autograd.grad(experts["square"](x).sum(), x)
    assert torch.equal(*grads)


def test_whole_numbers_travel_as_they_are(server):
    with connect(server.address, compression="int8") as experts:
        index = torch.tensor([3, 8])
        assert experts["index"](index).shape == (2, 4)
        assert torch.equal(experts["echo"](index), index)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_shapes_at_the_edge(server, shape):
    with connect(server.address, compression="bfloat16") as experts:
        assert torch.equal(experts["echo"](torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize("name", ["zip", "", None, {"forward": "int8"}])
def test_an_unknown_name_is_refused(server, name):
    with pytest.raises(ValueError, match="compression: expected one of"):
        connect(server.address, compression=name)


def test_gradients_never_travel_as_float16():
    with pytest.raises(ValueError, match=r"got 'float16' \(backward\)"):
        Compression(backward="float16")


class TestAuto:
    """It measures, chooses once, and stays with it."""

    def echo_once(self, experts) -> tuple[float, float]:
        """Move half a MiB there and back in each direction; return the relative errors."""
        x = torch.randn(256, 512, requires_grad=True)
        upstream = torch.randn(256, 512)
        y = experts["echo"](x)
        y.backward(upstream)
        return relative_error(y, x), relative_error(x.grad, upstream)

    def test_a_slow_link_is_found_slow_and_then_rounded_alike(self, server):
        with (
            Proxy(server.address) as proxy,
            connect(proxy.address, compression="auto", timeout_s=120.0) as experts,
        ):
            for _ in range(10):  # on a busy machine the fastest of many tells the round trip
                experts.info()
            proxy.bytes_per_s = 20e6
            assert [self.echo_once(experts) for _ in range(4)] == 4 * [(0.0, 0.0)]
            assert experts.compression == Compression("int8", "bfloat16")
            proxy.bytes_per_s = None
            for _ in range(8):
                forward_error, backward_error = self.echo_once(experts)
                assert 0 < forward_error <= 2.1 / 254
                assert 0 < backward_error <= 2.1 / 256
            assert experts.compression == Compression("int8", "bfloat16")

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3]], ids=str)
    def test_what_travels_while_an_expert_computes_does_not_make_a_link_fast(self, order):
        xs = [torch.randn(8, 512), *torch.randn(3, 512, 512)]
        hosted = {f"expert.{i}": Slow() if i == 0 else nn.Identity() for i in range(4)}
        with (
            ExpertsServer(hosted) as own_server,
            Proxy(own_server.address) as proxy,
            connect(proxy.address, compression=Compression("auto"), timeout_s=120.0) as experts,
        ):
            for _ in range(10):
                experts.info()
            proxy.bytes_per_s = 20e6
            for _ in range(4):
                parallel_apply([experts[f"expert.{i}"] for i in order], [(xs[i],) for i in order])
            assert experts.compression.forward == "int8"

    def test_what_connecting_takes_is_not_taken_for_a_round_trip(self, server):
        with (
            SlowToConnect(server.address) as proxy,
            connect(proxy.address, compression="auto", timeout_s=120.0) as experts,
        ):
            assert experts.connection._delivery._channel(proxy.address).round_trip_s < 0.5

    def test_each_direction_may_be_left_to_it(self, server):
        with connect(server.address, compression=Compression("bfloat16", "auto")) as experts:
            for _ in range(4):
                self.echo_once(experts)
            assert experts.compression.forward == "bfloat16"
            assert experts.compression.backward in ("none", "bfloat16")

    @pytest.mark.parametrize(("num_streams", "num_bytes"), [(3, 1 << 30), (15, 1 << 18)], ids=str)
    def test_four_streams_and_four_mib_are_enough_and_no_fewer(self, num_streams, num_bytes):
        encodings = Encodings(Compression("auto", "none"))
        for _ in range(num_streams):
            encodings.note_transfer("Forward", num_bytes, num_bytes / 100e6)
        assert encodings.compression.forward == "auto"
        encodings.note_transfer("Forward", 1 << 18, (1 << 18) / 100e6)
        assert encodings.compression.forward == "bfloat16"

    def test_small_streams_tell_nothing_of_the_bandwidth(self):
        encodings = Encodings(Compression("auto", "none"))
        for _ in range(100):
            encodings.note_transfer("Forward", (1 << 18) - 1, 1e-6)
        assert encodings.compression.forward == "auto"
        for _ in range(4):
            encodings.note_transfer("Forward", 1 << 20, (1 << 20) / 100e6)
        assert encodings.compression.forward == "bfloat16"

    @pytest.mark.parametrize(
        ("bytes_per_s", "chosen"),
        [
            (2e9, Compression("none", "none")),
            (499e6, Compression("bfloat16", "bfloat16")),
            (51e6, Compression("bfloat16", "bfloat16")),
            (49e6, Compression("int8", "bfloat16")),
        ],
    )
    def test_the_rule_is_the_documented_one(self, bytes_per_s, chosen):
        encodings = Encodings(Compression("auto", "auto"))
        for _ in range(4):
            for rpc in ("Forward", "Backward"):
                encodings.note_transfer(rpc, 1 << 20, (1 << 20) / bytes_per_s)
        assert encodings.compression == chosen
        for rpc in ("Forward", "Backward"):
            encodings.note_transfer(rpc, 1 << 30, 100.0)
        assert encodings.compression == chosen


def test_streams_that_a_busy_machine_slowed_down_do_not_make_a_link_slow():
    encodings = Encodings(Compression("auto", "auto"))
    for taken_s in (1.0, 0.5, 0.002, 1.0):  # 1 MiB each: 1, 2, 524 and 1 MB/s
        assert encodings.compression == Compression("auto", "auto")
        encodings.note_transfer("Forward", 1 << 20, taken_s)
    assert encodings.compression == Compression("none", "auto")
