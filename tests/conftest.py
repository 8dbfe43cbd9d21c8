"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make soak` say how long it has."""
    parser.addoption("--soak-minutes", type=float, default=1.0, help="how long the soak tests run")
