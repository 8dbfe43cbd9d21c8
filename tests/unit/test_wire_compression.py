"""The error bounds that compression.py states, over any values; and what travels raw anyhow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_autograd.wire import compression
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import travelling_form

ENCODINGS = [pb.AS_BFLOAT16, pb.AS_FLOAT16, pb.AS_INT8_BLOCKS]


def magnitudes(smallest: float, largest: float) -> st.SearchStrategy[float]:
    """Zero, and numbers of either sign from one magnitude to another."""
    low, high = (float(torch.tensor(bound)) for bound in (smallest, largest))  # as float32 has them
    return st.one_of(st.floats(low, high, width=32), st.floats(-high, -low, width=32), st.just(0.0))


def through(tensor: torch.Tensor, encoding: pb.Encoding, part_bytes: int = 1 << 20) -> torch.Tensor:
    writer, reader = ParcelWriter(part_bytes), ParcelReader()
    writer.add(pb.StateEntry(), [tensor], encoding)
    (parcel,) = [parcel for message in iter(writer.next_message, None) for parcel in reader.feed(message)]
    received = parcel.tensors[0]
    assert received is not None
    return received


def block_maxima(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each element's block of 256."""
    blocks = [block.abs().max().expand(block.shape) for block in tensor.split(compression.BLOCK)]
    return torch.cat(blocks)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_autograd_records_nothing_of_it(encoding):
    """A thread that sends to one of several servers has gradients enabled."""

    def save(saved: torch.Tensor) -> None:
        raise AssertionError("expected nothing to be saved for a backward")

    x = torch.randn(300, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, save):
        encoded = compression.encode(x, encoding)
    assert encoded is not None
    assert not encoded.requires_grad


@given(st.lists(magnitudes(1.2e-38, 3.4028234e38), min_size=1, max_size=600))
def test_bfloat16_is_within_its_bound(numbers):
    tensor = torch.tensor(numbers)
    assert ((through(tensor, pb.AS_BFLOAT16) - tensor).abs() <= tensor.abs() / 256).all()


@given(st.lists(magnitudes(6.2e-5, 1e5), min_size=1, max_size=600))
def test_float16_is_within_its_bound(numbers):
    tensor = torch.tensor(numbers)
    assert ((through(tensor, pb.AS_FLOAT16) - tensor).abs() <= tensor.abs() / 2048).all()


@pytest.mark.parametrize(
    ("dtype", "own_error"),
    [
        (torch.float32, 0.0),
        (torch.float64, 0.0),
        (torch.bfloat16, 1 / 256),
        (torch.float16, 1 / 2048),
    ],
    ids=str,
)
@given(numbers=st.lists(magnitudes(0.0, 3.4028234e38), min_size=1, max_size=600))
def test_int8_blocks_are_within_their_bound(dtype, own_error, numbers):
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    tensor = torch.tensor(numbers).clamp(-most, most).to(dtype)
    received, exact = through(tensor, pb.AS_INT8_BLOCKS).double(), tensor.double()
    largest = block_maxima(exact)
    bound = (largest / 254 + own_error * received.abs()) * (1 + 1e-5)
    # A subnormal float16, and a scale that is a subnormal float32, have steps of their own.
    bound += {torch.float16: 2.0**-25}.get(dtype, 0.0)
    error = (received - exact).abs()
    assert received.isfinite().all()
    assert (error[largest > 1e-38] <= bound[largest > 1e-38]).all()
    assert (error <= largest).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_values_stay_finite_in_int8_blocks(sign):
    largest = torch.tensor([torch.finfo(torch.float32).max, 1e38]) * sign
    assert torch.allclose(through(largest, pb.AS_INT8_BLOCKS), largest, rtol=1 / 50)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (255,), (256,), (257,), (3, 700)])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_shape_and_dtype_come_back(encoding, shape, part_bytes):
    for dtype in (torch.float32, torch.float64):
        received = through(torch.ones(shape, dtype=dtype), encoding, part_bytes)
        assert (received.shape, received.dtype) == (shape, dtype)
        assert torch.allclose(received, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_reader_knows_whether_something_encoded_is_still_to_come(encoding):
    writer, reader = ParcelWriter(part_bytes=64), ParcelReader()
    writer.add(pb.StateEntry(), [torch.ones(100)], encoding)
    to_come = []
    for message in iter(writer.next_message, None):
        reader.feed(message)
        to_come.append(reader.num_encoded)
    assert to_come == [1] * (len(to_come) - 1) + [0]
    assert len(to_come) > 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_fewer_bytes_travel(encoding):
    num_bytes = compression.encoded_bytes(torch.float32, 2560, encoding)
    assert num_bytes == {pb.AS_INT8_BLOCKS: 2600}.get(encoding, 5120)


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.float16, 4), (torch.bfloat16, 4), (torch.float32, 1)], ids=str
)
def test_a_tensor_that_its_scale_would_make_no_smaller_travels_as_it_is(dtype, numel):
    few, one_more = (
        torch.rand(n, generator=torch.Generator().manual_seed(0)).to(dtype) for n in (numel, numel + 1)
    )
    assert travelling_form(few, pb.AS_INT8_BLOCKS).header == travelling_form(few).header
    assert torch.equal(through(few, pb.AS_INT8_BLOCKS), few)
    assert travelling_form(one_more, pb.AS_INT8_BLOCKS).plain.nbytes < one_more.nbytes


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_other_dtypes_travel_raw(encoding, dtype):
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    assert torch.equal(through(tensor, encoding), tensor)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_with_a_value_that_is_not_finite_travels_as_it_is(encoding, dtype, value):
    sent = torch.tensor([1 / 3, value, 2 / 3]).to(dtype)
    torch.testing.assert_close(through(sent, encoding), sent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("encoding", "value"), [(pb.AS_BFLOAT16, 1e39), (pb.AS_FLOAT16, 65520), (pb.AS_INT8_BLOCKS, 1e39)]
)
def test_a_tensor_with_a_value_that_its_encoding_cannot_hold_travels_as_it_is(encoding, value):
    sent = torch.tensor([1 / 3, value], dtype=torch.float64)
    assert torch.equal(through(sent, encoding), sent)


def test_a_block_of_zeros_stays_zero():
    assert not through(torch.zeros(300), pb.AS_INT8_BLOCKS).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "value", [0.0, 65504.0, 65519.0, 65520.0, 3.39e38, 3.3961e38, 3.4e38, 1e39, float("inf"), float("nan")]
)
def test_it_is_known_in_advance_what_cannot_be_encoded(encoding, dtype, value):
    for values in ([], [value], [1.0, -value, 2.0] * 300):
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
        encoded = compression.encode(tensor, encoding)
        assert compression.can_hold(tensor, encoding) == (encoded is not None)
