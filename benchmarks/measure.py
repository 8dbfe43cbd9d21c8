"""Time variants of one thing in one process, in turns, and print the figures as a table.

A machine drifts: its clock, its neighbours, its caches. So variants take turns (A B A B ...), and what is claimed
is the median over the rounds of the ratio within a round, not a ratio of times taken minutes apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """The times of one variant, one for each round, in seconds."""

    rounds_s: Sequence[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.rounds_s) * 1e3

    def ratio_to(self, other: Times) -> float:
        """Return the median over the rounds of this variant's time over the other's."""
        return statistics.median(a / b for a, b in zip(self.rounds_s, other.rounds_s, strict=True))


def stopwatch(function: Callable[[], object]) -> float:
    """Return how long `function` takes, in seconds."""
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def take_turns(
    variants: Mapping[str, Callable[[], Mapping[str, float]]], *, rounds: int, warmup: int = 2
) -> dict[str, dict[str, Times]]:
    """Run every variant once a round, after `warmup` rounds that do not count.

    Args:
        variants: each runs once and returns the seconds of its parts, by name.
        rounds: how many count.
        warmup: how many come first.

    Returns:
        For each variant and part, its times.
    """
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        for name, run in variants.items():
            parts = run()
            if turn >= warmup:
                taken[name].append(parts)
    return {
        name: {part: Times([parts[part] for parts in runs]) for part in runs[0]}
        for name, runs in taken.items()
    }


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table; floats with two decimals."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
