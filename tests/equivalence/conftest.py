"""These tests are about the map's own machinery: no call is too small for it, except where that is the claim."""

from __future__ import annotations

import pytest

from moe_autograd.autograd import in_turn


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
