"""`make demo`'s script, at full length: it trains well, leaves a true timeline, and stops its servers."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import psutil
import pytest

ROOT = Path(__file__).parents[2]
MARK = "MOE_AUTOGRAD_DEMO"
EXPERTS = {f"ffn.{index}" for index in range(8)}


@dataclass(frozen=True)
class Demo:
    code: int
    printed: str
    out: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-W", "error", "examples/demo.py", "--out", str(out)]
    environment = {**os.environ, MARK: str(out)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    return Demo(run.returncode, run.stdout + run.stderr, out)


def number_after(text: str, printed: str) -> float:
    found = re.search(rf"{text}\s+([\d,.]*\d)", printed)
    assert found, f"{text!r} is not in what the demo printed:\n{printed}"
    return float(found.group(1).replace(",", ""))


def test_it_ends_well_and_reads_at_least_97_of_100_digits(demo: Demo) -> None:
    assert demo.code == 0, demo.printed
    assert number_after("test accuracy", demo.printed) >= 0.97


def test_the_server_applied_exactly_the_updates_that_the_client_gave(demo: Demo) -> None:
    given = number_after("which gave", demo.printed)
    assert given > 0
    assert number_after("applied there", demo.printed) == given


def test_it_times_a_step_both_ways_and_the_plain_loop_waits_for_every_call(demo: Demo) -> None:
    assert number_after("20 ms away", demo.printed) >= 2 * 20
    in_turn_ms = re.search(r"(\d+) ms one call after the other", demo.printed)
    assert in_turn_ms, demo.printed
    assert int(in_turn_ms.group(1)) >= 2 * 8 * 20


def spans_of(demo: Demo, phase: str) -> dict[str, list[tuple[float, float]]]:
    events = json.loads((demo.out / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in lanes.values()}
    for event in events:
        if event["ph"] == "X" and event["name"] == phase:
            spans[lanes[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    return spans


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_trace_shows_all_eight_experts_running_at_the_same_time(demo: Demo, phase: str) -> None:
    spans = spans_of(demo, phase)
    assert spans.keys() == EXPERTS
    first = [sorted(of_expert)[0] for of_expert in spans.values()]
    assert max(start for start, _ in first) < min(end for _, end in first)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_trace_shows_the_plain_loop_calling_one_at_a_time(demo: Demo, phase: str) -> None:
    last = sorted(sorted(of_expert)[-1] for of_expert in spans_of(demo, phase).values())
    assert all(end <= next_start for (_, end), (next_start, _) in itertools.pairwise(last))


def test_the_picture_shows_bars_in_both_colours(demo: Demo) -> None:
    pixels = matplotlib.image.imread(demo.out / "timeline.png")[..., :3]
    for colour in ((0x2A, 0x6F, 0x97), (0xE0, 0x7A, 0x2F)):
        is_colour = (abs(pixels - [channel / 255 for channel in colour]) < 0.02).all(axis=-1)
        assert is_colour.mean() > 0.005, "bars of this colour cover some of the picture"


def test_both_servers_have_ended_with_it(demo: Demo) -> None:
    assert "Both servers have drained and stopped." in demo.printed
    assert [process for process in psutil.process_iter() if is_of(process, demo)] == []


def is_of(process: psutil.Process, demo: Demo) -> bool:
    """Whether the demo started `process`: children inherit the variable that marks it."""
    try:
        return process.environ().get(MARK) == str(demo.out)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
