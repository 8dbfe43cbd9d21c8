"""These tests are about the map's own machinery: no call is too small for it, except where that is the claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_autograd.autograd import in_turn
from moe_autograd.moe import failures
from tests.support.unreliable import Clock


@pytest.fixture(autouse=True)
def machinery(nothing_is_small: None) -> None:
    """Make all calls by it."""


@pytest.fixture(params=["ram", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where offloaded experts lie."""
    return "ram" if request.param == "ram" else tmp_path / "experts"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which an expert that failed is left alone."""
    clock = Clock()
    monkeypatch.setattr(failures, "time", clock)
    return clock


@pytest.fixture
def some_are_small(nothing_is_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of calls that are made in turn."""
    monkeypatch.setattr(in_turn, "MOST_SMALL", 1 << 20)
