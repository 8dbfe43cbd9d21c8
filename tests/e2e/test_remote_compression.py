"""What travels in fewer bytes still gives values and gradients within the stated bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.remote import Compression, connect


@pytest.fixture(scope="module")
def server():
    with ExpertsServer({"echo": nn.Identity(), "index": nn.Embedding(9, 4)}) as server:
        yield server


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


def test_whole_numbers_travel_as_they_are(server):
    with connect(server.address, compression="int8") as experts:
        index = torch.tensor([3, 8])
        assert experts["index"](index).shape == (2, 4)
        assert torch.equal(experts["echo"](index), index)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_shapes_at_the_edge(server, shape):
    with connect(server.address, compression="bfloat16") as experts:
        assert torch.equal(experts["echo"](torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize("name", ["zip", "", None])
def test_an_unknown_name_is_refused(server, name):
    with pytest.raises(ValueError, match="compression: expected one of"):
        connect(server.address, compression=name)


def test_gradients_never_travel_as_float16():
    with pytest.raises(ValueError, match=r"got 'float16' \(backward\)"):
        Compression(backward="float16")
