"""Which backwards a server has gathered, told in eight bytes: a client and its server have to mean the same ones.

The digest of some backwards is that of each one's sequence number, all of them XORed: one more is one XOR more, in any
order, and none are zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import xxhash

MAX_UNSURE = 8  # of more, all subsets would be too many


def digest_of(sequences: Iterable[int]) -> int:
    """Return the digest of backwards with these sequence numbers."""
    digest = 0
    for sequence in sequences:
        digest ^= xxhash.xxh3_64_intdigest(sequence.to_bytes(8, "little"))
    return digest


def is_digest_of(digest: int, sure: int, unsure: Sequence[int], num_unsure: int) -> bool:
    """Tell whether backwards are the sure ones, and so many of the unsure ones, whichever.

    Args:
        digest: of the backwards.
        sure: the digest of the sure ones.
        unsure: the other ones' sequence numbers; at most `MAX_UNSURE`.
        num_unsure: how many.
    """
    return any(digest == sure ^ digest_of(some) for some in itertools.combinations(unsure, num_unsure))
