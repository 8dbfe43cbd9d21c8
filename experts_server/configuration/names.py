"""Expert names: what is allowed, and patterns such as `ffn.[0:32]` that stand for many of them.

A name is also the name of a file in a checkpoint, so it is letters, digits, `_`, `-`, and single dots between
them: it can neither leave a folder nor hide in one.
"""

from __future__ import annotations

import itertools
import math
import re

MAX_NAME_LENGTH = 128
MAX_NAMES_PER_PATTERN = 65_536

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_RANGE = re.compile(r"\[(\d{1,9}):(\d{1,9})\]")


def check_name(name: str) -> str:
    """Return `name` if it is one an expert may have.

    Raises:
        ValueError: it is not.

    >>> check_name("ffn.3")
    'ffn.3'
    """
    if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"expert name {name[: MAX_NAME_LENGTH + 1]!r}: expected letters, digits, '_' and '-' with single dots "
            f"between them, at most {MAX_NAME_LENGTH} characters"
            + (". A range is [start:stop], as in 'ffn.[0:8]'" if "[" in name else "")
        )
    return name


def expand_pattern(pattern: str) -> list[str]:
    """Return the names that `pattern` stands for, in order; each `[start:stop]` counts as `range` does.

    Raises:
        ValueError: a name is not allowed, a range is empty, or there are too many.

    >>> expand_pattern("layer.[0:2].ffn.[0:2]")
    ['layer.0.ffn.0', 'layer.0.ffn.1', 'layer.1.ffn.0', 'layer.1.ffn.1']
    """
    pieces = _RANGE.split(pattern)  # text, start, stop, text, start, stop, ..., text
    ranges = [range(int(start), int(stop)) for start, stop in zip(pieces[1::3], pieces[2::3], strict=True)]
    num_names = math.prod(map(len, ranges))
    if not 0 < num_names <= MAX_NAMES_PER_PATTERN:
        raise ValueError(
            f"expert pattern {pattern!r}: expected 1 to {MAX_NAMES_PER_PATTERN} names, got {num_names}. "
            "A range is [start:stop], without its stop"
        )
    texts = pieces[0::3]
    return [
        check_name(texts[0] + "".join(f"{n}{text}" for n, text in zip(numbers, texts[1:], strict=True)))
        for numbers in itertools.product(*ranges)
    ]


def counted(num_experts: int) -> str:
    """Return how many experts there are, as a text.

    >>> counted(1), counted(2)
    ('1 expert', '2 experts')
    """
    return f"{num_experts} expert{'' if num_experts == 1 else 's'}"
