"""What a checkpoint of an earlier format has otherwise, of those that are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMAT = 7
READ_FORMATS = 6, FORMAT


def as_of_now(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an expert's plain values as they are written now."""
    now = dict(plain)
    if "dtypes" in now:  # until format 6, beside what has changed
        dtypes = now.pop("dtypes")
        now["schedule"] = _changes(now["schedule"], dtypes["schedule"])
        now["groups"] = [*map(_changes, now["groups"], dtypes["groups"])]
    return now


def _changes(values: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    return {"values": values, "dtypes": dtypes, "removed": []}
