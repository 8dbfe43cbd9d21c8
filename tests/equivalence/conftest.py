"""These tests are about the map's own machinery: no call is too small for it, except where that is the claim."""

from __future__ import annotations

import pytest

from moe_autograd.autograd import small_calls


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_calls, "MOST_WORK", -1)
