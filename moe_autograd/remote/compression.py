"""How floating tensors travel, for each direction; the encodings and their error bounds are in `wire.compression`.

"auto" measures first and then chooses, by these rules:

1. Until it has chosen, tensors travel as they are.
2. A stream is measured if it moves at least 256 KiB: the bytes that a result had to wait for, and the time that it was
   waited for beyond the server's own and a round trip, which `connect` measures once it is connected (`calls`). After
   four such streams and 4 MiB the fastest of them tells the bandwidth: a first connection or a busy machine slows a
   stream down, and nothing makes it faster than the link.
3. Above 500 MB/s: "none". From 50 to 500 MB/s: "bfloat16", which halves the bytes. Below 50 MB/s: "int8" in the
   forward, and "bfloat16" in the backward: in blocks, a gradient much smaller than its neighbours would vanish.
4. The choice is made once a direction, for all servers of the connection, and stays until it is closed: later steps
   never round otherwise than earlier ones. `experts.compression` tells it; given to `connect` in the place of
   "auto" it makes another run round alike from the first step on.

Rounding costs time too. Encoding and decoding take 0.13 ns a byte for bfloat16 and 1.2 ns for int8 on one core here,
so at 500 MB/s (2 ns a byte) bfloat16 is 1.8 times as fast as none, and at 50 MB/s int8 is 1.6 times as fast as
bfloat16; what is gained at higher bandwidths is not worth the digits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from moe_autograd.wire import experts_pb2 as pb

_ENCODINGS: dict[str, pb.Encoding] = {
    "none": pb.RAW,
    "bfloat16": pb.AS_BFLOAT16,
    "float16": pb.AS_FLOAT16,
    "int8": pb.AS_INT8_BLOCKS,
    "auto": pb.RAW,
}

MEASURED_BYTES = 1 << 18
_ENOUGH_STREAMS, _ENOUGH_BYTES = 4, 1 << 22
_FAST_BYTES_PER_S, _SLOW_BYTES_PER_S = 500e6, 50e6


@dataclass(frozen=True)
class Compression:
    """What travels in fewer bytes.

    Worth it where the network is slower than about 4 Gbit/s; numbers are rounded on their way.

    Args:
        forward: of inputs and outputs: "none", "bfloat16", "float16", "int8" or "auto".
        backward: of gradients: "none", "bfloat16", "int8" or "auto". Not "float16": small gradients vanish in it.

    Raises:
        ValueError: another name.

    >>> Compression.of("float16")
    Compression(forward='float16', backward='bfloat16')
    """

    forward: str = "none"
    backward: str = "none"

    def __post_init__(self) -> None:
        for direction, allowed in (("forward", _ENCODINGS), ("backward", _ENCODINGS.keys() - {"float16"})):
            name = getattr(self, direction)
            if not isinstance(name, str) or name not in allowed:
                raise ValueError(
                    f"compression: expected one of {sorted(allowed)}, got {name!r} ({direction}). Choose one of these; "
                    "Compression(forward=..., backward=...) names one for each direction."
                )

    @classmethod
    def of(cls, name: str | Compression) -> Compression:
        """Return what a single name stands for; float16 takes bfloat16 for gradients."""
        if isinstance(name, Compression):
            return name
        return cls(name, "bfloat16" if name == "float16" else name)


class Encodings:
    """The encoding of each direction now: as it was asked for, or, for "auto", as rule 3 chose it.

    Args:
        compression: what was asked for.

    Mutable state: under `_lock`. Threads: any.
    """

    def __init__(self, compression: Compression) -> None:
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._names = {"Forward": compression.forward, "Backward": compression.backward}
        self._measured: dict[str, tuple[int, int, float]] = {}  # streams, bytes, the fastest's bytes a second

    def encoding(self, rpc: str) -> pb.Encoding:
        """Return the encoding for `Forward` or `Backward`."""
        return _ENCODINGS[self._names[rpc]]

    def is_measuring(self, rpc: str) -> bool:
        """Tell whether `note_transfer` is of interest."""
        return self._names.get(rpc) == "auto"

    def note_transfer(self, rpc: str, num_bytes: int, taken_s: float) -> None:
        """Learn how long it took to move so many bytes, one after the other, as they are."""
        if num_bytes < MEASURED_BYTES:
            return
        with self._lock:
            streams, total_bytes, bytes_per_s = self._measured.get(rpc, (0, 0, 0.0))
            streams, total_bytes = streams + 1, total_bytes + num_bytes
            bytes_per_s = max(bytes_per_s, num_bytes / taken_s)
            self._measured[rpc] = streams, total_bytes, bytes_per_s
            is_enough = streams >= _ENOUGH_STREAMS and total_bytes >= _ENOUGH_BYTES
            if is_enough and self.is_measuring(rpc):
                self._names[rpc] = choose(rpc.lower(), bytes_per_s)

    @property
    def compression(self) -> Compression:
        """What is in effect now; "auto" where nothing has been chosen yet."""
        return Compression(self._names["Forward"], self._names["Backward"])

    def __repr__(self) -> str:
        return f"Encodings({self._names['Forward']}, {self._names['Backward']})"


def choose(direction: str, bytes_per_s: float) -> str:
    """Return what rule 3 says.

    Args:
        direction: "forward" or "backward".
        bytes_per_s: the bandwidth.

    >>> [choose("forward", speed) for speed in (1e9, 100e6, 10e6)], choose("backward", 10e6)
    (['none', 'bfloat16', 'int8'], 'bfloat16')
    """
    if bytes_per_s > _FAST_BYTES_PER_S:
        return "none"
    return "int8" if bytes_per_s < _SLOW_BYTES_PER_S and direction == "forward" else "bfloat16"
