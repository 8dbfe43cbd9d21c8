"""What a checkpoint of an earlier format has otherwise, of those that are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FORMAT = 7
READ_FORMATS = 6, FORMAT


def as_of_now(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an expert's plain values as they are written now."""
    now = dict(plain)
    if "dtypes" in now:  # until format 6, beside what has changed
        dtypes = now.pop("dtypes")
        now["schedule"] = _changes(now["schedule"], dtypes["schedule"], [])
        now["groups"] = [
            _changes(values, dtypes_of_it, [key for key, value in values.items() if isinstance(value, list)])
            for values, dtypes_of_it in zip(now["groups"], dtypes["groups"], strict=True)
        ]
    if "optimizer_tuples" in now:  # until format 6
        now["optimizer_empty"] = []
        now["optimizer_kinds"] = dict.fromkeys(now.pop("optimizer_tuples"), "tuple")
    return now


def _changes(values: Mapping[str, Any], dtypes: Mapping[str, str], tuples: Iterable[str]) -> dict[str, Any]:
    """Return them as they are told now. Of groups all lists counted as tuples, which most of them are."""
    return {"values": values, "dtypes": dtypes, "kinds": dict.fromkeys(tuples, "tuple"), "removed": []}
