"""How floating tensors travel, for each direction; the encodings and their error bounds are in `wire.compression`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_autograd.wire import experts_pb2 as pb

_ENCODINGS: dict[str, pb.Encoding] = {
    "none": pb.RAW,
    "bfloat16": pb.AS_BFLOAT16,
    "float16": pb.AS_FLOAT16,
    "int8": pb.AS_INT8_BLOCKS,
}


@dataclass(frozen=True)
class Compression:
    """What travels in fewer bytes.

    Worth it where the network is slower than about 10 Gbit/s; numbers are rounded on their way.

    Args:
        forward: of inputs and outputs: "none", "bfloat16", "float16" or "int8".
        backward: of gradients: "none", "bfloat16" or "int8". Not "float16": small gradients vanish in it.

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
            if name not in allowed:
                raise ValueError(
                    f"compression: expected one of {sorted(allowed)}, got {name!r} ({direction}). Choose one of these."
                )

    @classmethod
    def of(cls, name: str | Compression) -> Compression:
        """Return what a single name stands for; float16 takes bfloat16 for gradients."""
        if isinstance(name, Compression):
            return name
        return cls(name, "bfloat16" if name == "float16" else name)

    def encoding(self, rpc: str) -> pb.Encoding:
        """Return the encoding for `Forward` or `Backward`."""
        return _ENCODINGS[self.forward if rpc == "Forward" else self.backward]
