"""Messages with a checksum at their end; those that carry tensors are written and read without a copy.

Protobuf's Python classes copy a `bytes` field twice on the way out and once on the way in. But a message is
only its fields one after another, and a `bytes` field only a tag, a length and the bytes. So we write that
frame by hand and join it with the tensors' own memory: one copy, into the message that gRPC sends. The same
bytes come out as protobuf would write (tested), so any protobuf library can be on the other side::

    | 0A n  Contents | 12 k  zeros | 1A m  payload ............................. | 79  XXH3-64 |
      field 1          field 2       field 3                                       field 15
      parsed by        so that the   memory of tensors, taken by `memoryview`      covers all bytes
      protobuf         payload is                                                  before it
                       aligned

Pure functions; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from moe_autograd.errors import CorruptDataError

Buffer = bytes | memoryview
MessageT = TypeVar("MessageT", bound=Message)

ALIGNMENT = 16  # what Python gives the first byte of a `bytes` object, and as much as any dtype needs

_CONTENTS, _PADDING, _PAYLOAD, _CHECKSUM = b"\x0a", b"\x12", b"\x1a", b"\x79"
_TAGS = _CONTENTS + _PADDING + _PAYLOAD
_TRAILER_BYTES = 9
_ZEROS = bytes(2 * ALIGNMENT)
_SHORT_VARINTS = [bytes([number]) for number in range(0x80)]


class Frame(NamedTuple):
    """A packet taken apart: its contents, still serialized, and its payload, still in the packet."""

    contents: bytes
    payload: memoryview
    payload_start: int  # where in the packet the payload begins


def seal(message: Message) -> bytes:
    """Serialize `message` and write the checksum of what came out as its last field."""
    message.ClearField("checksum")
    return _with_trailer([message.SerializeToString()])


def unseal(message_class: type[MessageT], sealed: bytes, *, required: bool = True) -> MessageT:
    """Check and parse what `seal` wrote.

    Args:
        message_class: a class of `experts_pb2` with a `checksum` field.
        sealed: the message's bytes.
        required: false accepts a message without a checksum (for `InfoRequest` from other tools).

    Raises:
        CorruptDataError: the checksum is missing or wrong, or the bytes are no such message.
    """
    if required or _has_trailer(sealed):
        check_seal(sealed)
    return parse(message_class, sealed)


def parse(message_class: type[MessageT], serialized: bytes) -> MessageT:
    """Return the message, of any protocol; raises `CorruptDataError` if the bytes are none."""
    try:
        return message_class.FromString(serialized)
    except DecodeError as error:
        raise CorruptDataError(f"message: expected a {message_class.__name__}, got {error}.") from error


def check_seal(sealed: bytes) -> None:
    """Raise `CorruptDataError` unless `sealed` ends with the checksum of all that comes before."""
    if not _has_trailer(sealed):
        raise CorruptDataError(
            f"message: expected a checksum as its last field, got none ({len(sealed)} bytes). "
            "Something between client and server cut it, or one of the two is of another make."
        )
    declared = int.from_bytes(sealed[-8:], "little")
    actual = xxhash.xxh3_64_intdigest(memoryview(sealed)[:-_TRAILER_BYTES])
    if declared != actual:
        raise CorruptDataError(
            f"message: expected checksum {declared:#x}, got {actual:#x} ({len(sealed)} bytes). "
            "It was damaged on its way; sending it again is safe."
        )


def frame_packet(contents: bytes, payload: Sequence[Buffer], payload_bytes: int) -> bytes:
    """Write a `Packet` whose payload is the given buffers, one after another.

    Args:
        contents: a serialized `Contents`.
        payload: the buffers; the only copy of their bytes is the one into the result.
        payload_bytes: their bytes together.
    """
    pieces: list[Buffer] = [_CONTENTS, varint(len(contents)), contents]
    if payload_bytes:
        start = 1 + len(pieces[1]) + len(contents)
        pieces += _padding(start + 1 + len(varint(payload_bytes)))
        pieces += [_PAYLOAD, varint(payload_bytes), *payload]
    return _with_trailer(pieces)


def _padding(payload_start: int) -> list[Buffer]:
    """Return the padding field that moves the payload from `payload_start` to the next multiple of 16.

    The shortest padding field that protobuf would write has 3 bytes, so a gap of 1 or 2 becomes 17 or 18.
    """
    gap = -payload_start % ALIGNMENT
    if gap == 0:
        return []
    if gap < 3:
        gap += ALIGNMENT
    return [_PADDING, varint(gap - 2), _ZEROS[: gap - 2]]


def take_packet_apart(packet: bytes) -> Frame:
    """Check a `Packet`'s checksum and find its contents and its payload, which is not copied.

    Raises:
        CorruptDataError: the checksum is wrong, or the fields are not those of a packet.
    """
    check_seal(packet)
    end = len(packet) - _TRAILER_BYTES
    contents, payload, payload_start, position = b"", memoryview(b""), 0, 0
    while position < end:
        tag = packet[position]
        length, start = _read_varint(packet, position + 1)
        position = start + length
        if position > end or tag not in _TAGS:
            raise CorruptDataError(
                f"packet: expected fields 1 to 3 within {end} bytes, got tag 0x{tag:02x} "
                f"with {length} bytes at {start}. The sender speaks another version of the protocol."
            )
        if tag == _CONTENTS[0]:
            contents = packet[start:position]
        elif tag == _PAYLOAD[0]:
            payload, payload_start = memoryview(packet)[start:position], start
    return Frame(contents, payload, payload_start)


def varint(number: int) -> bytes:
    """Write a non-negative number as protobuf does: seven bits a byte, the lowest first."""
    if number < len(_SHORT_VARINTS):
        return _SHORT_VARINTS[number]
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it."""
    if buffer[position] < 0x80:  # mostly; there is a trailer behind it
        return buffer[position], position + 1
    number = 0
    for index, byte in enumerate(buffer[position : position + 10]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, position + index + 1
    raise CorruptDataError(f"packet: expected a length at byte {position}, got no end of one.")


def _with_trailer(pieces: Iterable[Buffer]) -> bytes:
    checksum = xxhash.xxh3_64()
    written = list(pieces)
    for piece in written:
        checksum.update(piece)
    return b"".join([*written, _CHECKSUM, checksum.intdigest().to_bytes(8, "little")])


def _has_trailer(sealed: bytes) -> bool:
    return sealed[-_TRAILER_BYTES : -_TRAILER_BYTES + 1] == _CHECKSUM


def mark_of(server_id: str) -> int:
    """Return what results tell of a server in place of its id; 0 for none."""
    return xxhash.xxh3_64_intdigest(server_id.encode()) if server_id else 0
