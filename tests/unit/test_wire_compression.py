"""The error bounds that compression.py states, over any values; and what travels raw anyhow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_autograd.wire import compression
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter

ENCODINGS = [pb.AS_BFLOAT16, pb.AS_FLOAT16, pb.AS_INT8_BLOCKS]
values = st.floats(-60000, 60000, width=32).filter(lambda value: value == 0 or abs(value) > 1e-4)


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


@given(st.lists(values, min_size=1, max_size=600))
def test_bfloat16_is_within_its_bound(numbers):
    tensor = torch.tensor(numbers)
    assert ((through(tensor, pb.AS_BFLOAT16) - tensor).abs() <= tensor.abs() / 256).all()


@given(st.lists(values, min_size=1, max_size=600))
def test_float16_is_within_its_bound(numbers):
    tensor = torch.tensor(numbers)
    assert ((through(tensor, pb.AS_FLOAT16) - tensor).abs() <= tensor.abs() / 2048).all()


@given(st.lists(values, min_size=1, max_size=600))
def test_int8_blocks_are_within_their_bound(numbers):
    tensor = torch.tensor(numbers)
    error = (through(tensor, pb.AS_INT8_BLOCKS) - tensor).abs()
    assert (error <= block_maxima(tensor) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (255,), (256,), (257,), (3, 700)])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_shape_and_dtype_come_back(encoding, shape, part_bytes):
    for dtype in (torch.float32, torch.float64):
        received = through(torch.ones(shape, dtype=dtype), encoding, part_bytes)
        assert (received.shape, received.dtype) == (shape, dtype)
        assert torch.allclose(received, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_fewer_bytes_travel(encoding):
    num_bytes = compression.encoded_bytes(torch.float32, 2560, encoding)
    assert num_bytes == {pb.AS_INT8_BLOCKS: 2600}.get(encoding, 5120)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_other_dtypes_travel_raw(encoding, dtype):
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    assert torch.equal(through(tensor, encoding), tensor)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stays_so(encoding, value):
    received = through(torch.tensor([1.0, value]), encoding)
    assert not received[1].isfinite()


def test_a_block_of_zeros_stays_zero():
    assert not through(torch.zeros(300), pb.AS_INT8_BLOCKS).any()
