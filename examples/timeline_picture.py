"""Draw recorded timelines: one panel a way of calling, one lane an expert, one bar a call. Used by demo.py."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moe_autograd.timeline import Timeline

COLORS = {"forward": "#2a6f97", "backward": "#e07a2f"}
INK, MUTED, RULE = "#22282e", "#6b7680", "#e6e9ec"


def draw(panels: Sequence[tuple[str, Timeline]], title: str, path: str | os.PathLike[str]) -> None:
    """Write a PNG with one panel for each (heading, timeline), all with the same time axis."""
    lanes = sorted({span.name for _, timeline in panels for span in timeline.spans})
    figure = Figure(figsize=(9.6, 0.6 + len(panels) * (0.75 + 0.235 * len(lanes))), dpi=160)
    axes = figure.subplots(len(panels), sharex=True)
    for axis, (heading, timeline) in zip(axes, panels, strict=True):
        _draw_panel(axis, heading, timeline, lanes)
    axes[-1].set_xlabel("milliseconds since the first call", color=MUTED, fontsize=9)
    axes[-1].margins(x=0.06)
    axes[-1].set_xlim(left=0)
    figure.suptitle(title, x=0.043, y=0.985, ha="left", va="top", fontsize=12.5, fontweight="bold", color=INK)
    figure.legend(
        handles=[Patch(color=color, label=phase) for phase, color in COLORS.items()],
        loc="upper right",
        bbox_to_anchor=(0.992, 0.995),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        labelcolor=INK,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.985), h_pad=1.6)
    figure.savefig(path)


def _draw_panel(axis: Axes, heading: str, timeline: Timeline, lanes: Sequence[str]) -> None:
    origin_s = min(span.start_s for span in timeline.spans)
    end_ms = max(span.end_s - origin_s for span in timeline.spans) * 1e3
    for phase, color in COLORS.items():
        spans = [span for span in timeline.spans if span.phase == phase]
        axis.barh(
            [lanes.index(span.name) for span in spans],
            [(span.end_s - span.start_s) * 1e3 for span in spans],
            left=[(span.start_s - origin_s) * 1e3 for span in spans],
            height=0.72,
            color=color,
            linewidth=0,
        )
    axis.axvline(end_ms, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axis.annotate(
        f"{end_ms:.0f} ms",
        (end_ms, 1.0),
        (4, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=9,
        color=INK,
        fontweight="bold",
    )
    axis.set_title(heading, loc="left", fontsize=10, color=INK, pad=5)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8, color=MUTED)
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    axis.grid(axis="x", color=RULE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelcolor=MUTED, labelsize=8, labelbottom=True)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
