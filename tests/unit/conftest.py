"""What several tests of units begin with."""

from __future__ import annotations

import pytest

from moe_autograd import _streams
from tests.support.streams import RecordingAccelerator


@pytest.fixture(params=[1, 2])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RecordingAccelerator:
    accelerator = RecordingAccelerator(request.param)
    monkeypatch.setattr(_streams, "_built_for", accelerator)
    return accelerator
