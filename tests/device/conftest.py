"""What holds for all tests on a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_autograd.autograd import parallel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch warn, where the engine's thread is the first of the process to multiply matrices there."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else calls of known modules would be made in turn, on the caller's stream."""
    monkeypatch.setattr(parallel, "call_in_turn", lambda *_, **__: None)
