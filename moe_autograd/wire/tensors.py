"""Tensor <-> header and raw bytes. Nothing is pickled, nothing is believed.

Out: `travelling_form` describes and encodes a tensor, `raw_bytes` shows its memory as a `memoryview`, without a copy.

In: `check_header` makes a `TensorForm` of a header, within `TensorLimits`, before any memory is taken. A tensor
that came whole in one message becomes a view of that message (`tensor_in`): the `bytes` object that gRPC made
for us has no other reader, so its memory is ours to use, and to write to, although Python calls it read-only. A
tensor of several parts is assembled in memory of its own (`Assembly`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from google.protobuf.message import DecodeError

from moe_autograd.errors import InvalidCallError
from moe_autograd.wire import compression
from moe_autograd.wire import experts_pb2 as pb

assert sys.byteorder == "little", "the wire is little-endian, and so is all that torch runs on"

MAX_RANK = 64
MAX_HEADER_BYTES = 1024  # 64 dimensions of 10 bytes each, and some

DTYPES: dict[torch.dtype, pb.DType] = {
    torch.float64: pb.FLOAT64,
    torch.float32: pb.FLOAT32,
    torch.float16: pb.FLOAT16,
    torch.bfloat16: pb.BFLOAT16,
    torch.int64: pb.INT64,
    torch.int32: pb.INT32,
    torch.int16: pb.INT16,
    torch.int8: pb.INT8,
    torch.uint8: pb.UINT8,
    torch.bool: pb.BOOL,
    torch.complex64: pb.COMPLEX64,
    torch.complex128: pb.COMPLEX128,
}
TORCH_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in DTYPES.items()}


@dataclass(frozen=True)
class TensorLimits:
    """What a receiver accepts.

    Args:
        max_tensor_bytes: of one tensor, decoded.
        max_unfinished_bytes: of all tensors in a stream whose parts are still coming.
        max_tensors: in one parcel.
        max_unfinished_parcels: in one stream.
    """

    max_tensor_bytes: int = 1 << 30
    max_unfinished_bytes: int = 1 << 31
    max_tensors: int = 1024
    max_unfinished_parcels: int = 65536

    @classmethod
    def of_one_tensor(cls, max_tensor_bytes: int) -> TensorLimits:
        """Return limits under which a tensor of so many bytes comes through."""
        return cls(max_tensor_bytes, max(cls.max_unfinished_bytes, max_tensor_bytes))


class TensorForm(NamedTuple):
    """A tensor's description, once it has been checked."""

    dtype: torch.dtype | None  # None: there is no tensor
    shape: tuple[int, ...]
    encoding: int
    num_bytes: int  # as encoded


class Travelling(NamedTuple):
    """A tensor as it travels, or None: what `ParcelWriter` makes of one, where nobody has before.

    Args:
        header: a serialized `TensorHeader`.
        plain: whose memory is the encoded bytes.
    """

    header: bytes
    plain: torch.Tensor | None


_CPU = torch.device("cpu")  # to read the name takes half as long as to make an empty tensor
_NO_TENSOR = TensorForm(None, (), pb.RAW, 0)
_NOTHING = Travelling(b"", None)


# ---- out


def check_can_travel(tensor: torch.Tensor) -> None:
    """Raise `TypeError` where a tensor's dtype, layout, device or kind cannot travel."""
    # A subclass may have no memory of its own, and may have a plain tensor to give.
    is_plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not is_plain and _is_dispatched_in_python(tensor) and _is_dispatched_in_python(tensor.detach().cpu()):
        raise TypeError(f"tensor: expected plain memory, got a {type(tensor).__name__}. Convert it first.")
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        layout = "nested layout" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(
            f"tensor: expected a dense tensor of {known}, got {tensor.dtype} with {layout} on {tensor.device}. "
            "Convert it first."
        )
    if tensor.is_cpu and torch._C._has_storage(tensor) and not tensor.data_ptr():
        _check_is_empty(tensor)


def _is_dispatched_in_python(tensor: torch.Tensor) -> bool:
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as `raw_bytes` can show them; itself if it is all that already.

    On the CPU, contiguous, and without autograd or lazy bits.
    """
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def travelling_form(tensor: torch.Tensor | Travelling | None, encoding: pb.Encoding = pb.RAW) -> Travelling:
    """Return a tensor as it travels; what does already, as it is.

    Raises:
        TypeError: its dtype, layout or kind cannot travel.
    """
    if tensor is None:
        return _NOTHING
    if isinstance(tensor, Travelling):
        return tensor
    dtype = tensor.dtype
    if dtype not in DTYPES or tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        check_can_travel(tensor)
    form = plain(tensor)
    if encoding != pb.RAW and compression.gets_smaller(dtype, form.numel(), encoding):
        encoded = compression.encode(form, encoding)
        if encoded is not None:
            return Travelling(_header(DTYPES[dtype], tensor.shape, encoding, encoded.nbytes), encoded)
    return Travelling(raw_header(dtype, form.shape), form)


@functools.lru_cache(maxsize=1024)
def raw_header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return the serialized `TensorHeader` of a tensor that travels raw."""
    return _header(DTYPES[dtype], shape, pb.RAW, shape.numel() * dtype.itemsize)


def _header(dtype: pb.DType, shape: torch.Size, encoding: pb.Encoding, num_bytes: int) -> bytes:
    header = pb.TensorHeader(dtype=dtype, shape=shape, encoding=encoding, num_bytes=num_bytes)
    return header.SerializeToString()


# ---- in


def check_header(header: bytes, limits: TensorLimits) -> TensorForm:
    """Refuse a serialized `TensorHeader` that lies or asks for too much. Takes no memory.

    Raises:
        InvalidCallError: naming what is wrong and what is allowed.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidCallError(
            f"tensor: expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(header)}. "
            f"A tensor has at most {MAX_RANK} dimensions."
        )
    return _checked_form(header, limits.max_tensor_bytes)


# The same few headers come again and again, and to parse one costs more than its tensor.
@functools.lru_cache(maxsize=1024)
def _checked_form(serialized: bytes, max_tensor_bytes: int) -> TensorForm:
    try:
        header = pb.TensorHeader.FromString(serialized)
    except DecodeError as error:
        raise InvalidCallError(
            f"tensor: expected a TensorHeader, got {error}. The sender is broken."
        ) from error
    shape, encoding, num_bytes = tuple(header.shape), header.encoding, header.num_bytes
    dtype = TORCH_DTYPES.get(header.dtype)
    if dtype is None:
        if header.dtype == pb.DTYPE_NONE and not (shape or encoding or num_bytes):
            return _NO_TENSOR
        raise InvalidCallError(
            f"tensor: expected a dtype of experts.proto, got number {header.dtype}. Is the sender newer?"
        )
    if len(shape) > MAX_RANK:
        raise InvalidCallError(f"tensor: expected at most {MAX_RANK} dimensions, got {len(shape)}.")
    if bytes_if_filled(shape, dtype) > max_tensor_bytes:
        raise too_large(shape, dtype, max_tensor_bytes)
    numel = math.prod(shape)
    if encoding != pb.RAW and not compression.is_applicable(dtype, encoding):
        raise InvalidCallError(
            f"tensor: expected an encoding that {dtype} can have, got number {encoding}. Send it raw."
        )
    expected = compression.encoded_bytes(dtype, numel, encoding)
    if num_bytes != expected:
        raise InvalidCallError(
            f"tensor: expected {expected} bytes for shape {shape} of {dtype}, got {num_bytes} "
            f"(encoding={pb.Encoding.Name(encoding)}). The sender's header contradicts itself."
        )
    return TensorForm(dtype, shape, encoding, num_bytes)


def too_large(shape: Sequence[int], dtype: torch.dtype, max_tensor_bytes: int) -> InvalidCallError:
    """Return what refuses a tensor of more bytes than its receiver takes."""
    return InvalidCallError(
        f"tensor: expected at most {max_tensor_bytes} bytes, got shape {tuple(shape)} of {dtype} "
        f"({bytes_if_filled(shape, dtype)} bytes{'' if all(shape) else ', were 0 a 1'}). Send fewer rows at once, or "
        "raise the receiver's max_tensor_bytes."
    )


def bytes_if_filled(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return how large a tensor is, a size of 0 taken for a 1: PyTorch multiplies those of what is empty as well."""
    return math.prod(size or 1 for size in shape) * dtype.itemsize


class Memory(ctypes.Array):  # type: ignore[type-arg]  # ctypes is generic in stubs only
    """Any memory, writable; `owner` keeps it alive."""

    _type_ = ctypes.c_ubyte
    _length_ = sys.maxsize
    owner: bytes


_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ, _WRITE = 0x100, 0x200
_HUGE_PAGES_FROM = 4 << 20


def memory_of(message: bytes) -> Memory:
    """Return the memory of `message`, writable; it stays alive as long as what is returned.

    Only for a message that nobody else reads any more.
    """
    memory = Memory.from_address(_address_of(message))
    memory.owner = message
    return memory


def tensor_in(memory: Memory, start: int, form: TensorForm) -> torch.Tensor:
    """Return the tensor whose whole bytes are in a message, from `start` on.

    Shares the message's memory and keeps all of it alive. Each tensor has a storage of its own, so writing to
    one leaves the version counters of its neighbours alone.

    Raises:
        InvalidCallError: a bool that is neither 0 nor 1.
    """
    dtype = compression.travelling_dtype(form.dtype, form.encoding)
    itemsize = dtype.itemsize
    elements = torch.frombuffer(memory, dtype=dtype, count=form.num_bytes // itemsize, offset=start)
    if start % itemsize:  # a sender that does not pad; `bytes` objects themselves are aligned
        elements = elements.clone()
    return _decode(elements, form)


def empty_of(form: TensorForm) -> torch.Tensor | None:
    """Return the tensor of a form without bytes: one without elements, or None."""
    return None if form.dtype is None else torch.empty(form.shape, dtype=form.dtype, device=_CPU)


class Assembly:
    """A tensor whose bytes come in several parts, in order; each part is copied once.

    Args:
        form: the memory for all parts is taken here.
    """

    def __init__(self, form: TensorForm) -> None:
        dtype = compression.travelling_dtype(form.dtype, form.encoding)
        self._form = form
        self._elements = _uninitialised(form.num_bytes // dtype.itemsize, dtype)
        self._bytes = _view_memory(self._elements.data_ptr(), form.num_bytes, _WRITE)

    def write(self, offset: int, part: memoryview) -> None:
        """Copy a part to its place."""
        self._bytes[offset : offset + len(part)] = part

    def finish(self) -> torch.Tensor:
        """Return the tensor; raises as `tensor_in` does."""
        return _decode(self._elements, self._form)


def _uninitialised(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a one-dimensional tensor to be filled, in huge pages where it is large and the system has them.

    To write to fresh memory for the first time costs a page fault for each 4 KiB: filling 64 MiB takes 65 ms so,
    18 ms in pages of 2 MiB, and 9 ms once the memory is there.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes < _HUGE_PAGES_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _decode(elements: torch.Tensor, form: TensorForm) -> torch.Tensor:
    dtype, shape = form.dtype, form.shape
    if form.encoding != pb.RAW:
        assert dtype is not None, "None has no encoding"
        elements = compression.decode(elements, dtype, form.encoding)
    elif dtype is torch.bool and int(elements.view(torch.uint8).max()) > 1:
        raise InvalidCallError("tensor: expected bools of 0 and 1, got another byte. The sender is broken.")
    return elements.resize_(shape)  # of the same size; a view would cost twice as much


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Show the memory of a `plain` tensor. The caller keeps the tensor alive, and unchanged."""
    address = tensor.data_ptr()
    if not address:
        return _zeros_of(tensor)
    view: memoryview = _view_memory(address, tensor.nbytes, _READ)
    return view


def _zeros_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of what has no memory: zeros, as forward-mode differentiation gives where nothing flows."""
    _check_is_empty(tensor)
    return memoryview(bytes(tensor.nbytes))


def _check_is_empty(tensor: torch.Tensor) -> None:
    """Raise `TypeError` where what has no memory has values to lose."""
    if tensor.nbytes and not tensor._is_zerotensor():
        raise TypeError(f"tensor: expected memory, got {tuple(tensor.shape)} without: its storage was freed.")
