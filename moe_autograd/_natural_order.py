"""The order of experts' names, for the client, the server and timelines: `ffn.2` comes before `ffn.10`."""

from __future__ import annotations

import re


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a sort key that takes digits as numbers.

    >>> sorted(["ffn.10", "ffn.2", "attn.3", "ffn"], key=natural_order)
    ['attn.3', 'ffn', 'ffn.2', 'ffn.10']
    """
    return [(text, int(digits) if digits else -1) for text, digits in re.findall(r"(\D*)(\d*)", name)]
