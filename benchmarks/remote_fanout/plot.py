"""Draw how the cost of a step grows with the number of experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE = "#22282e", "#6b7680", "#e6e9ec"
COLORS = ("#2a6f97", "#e07a2f")


class Cost(NamedTuple):
    """What passes over some experts cost."""

    num_servers: int
    num_experts: int
    delay_ms: float
    forward_ms: float
    backward_ms: float
    client_mb: float
    servers_mb: float

    @property
    def call_us(self) -> float:
        """Of one call in one pass."""
        return (self.forward_ms + self.backward_ms) / 2 / self.num_experts * 1e3


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Write a PNG: time on the left, memory on the right, both axes in powers."""
    figure = Figure(figsize=(9.6, 3.9), dpi=160)
    time, memory = figure.subplots(1, 2)
    _draw_panel(time, costs, ("forward_ms", "backward_ms"), "milliseconds a pass")
    _draw_panel(memory, costs, ("client_mb", "servers_mb"), "MB held after the steps")
    figure.suptitle(
        "Small experts on two servers: cost of a step as their number grows",
        x=0.02,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    figure.tight_layout()
    figure.savefig(path)


def _draw_panel(axis: Axes, costs: Sequence[Cost], names: Sequence[str], what: str) -> None:
    counts = [cost.num_experts for cost in costs]
    for name, color in zip(names, COLORS, strict=True):
        values = [getattr(cost, name) for cost in costs]
        axis.plot(counts, values, marker="o", color=color, label=name.rpartition("_")[0])
    last = max(getattr(costs[-1], name) for name in names)
    linear = [last * count / counts[-1] for count in counts]
    axis.plot(counts, linear, linestyle=":", color=MUTED, label="linear in experts")
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=1)  # what grew by less than a megabyte may not have grown at all
    axis.set_ylim(0, 1.6 * last)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("experts", color=MUTED, fontsize=9)
    axis.set_ylabel(what, color=MUTED, fontsize=9)
    axis.grid(color=RULE)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=MUTED, labelsize=8, length=0)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8.5, labelcolor=INK)
