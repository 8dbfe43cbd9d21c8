"""Notes on what a call has raised."""

from __future__ import annotations

import contextlib


def add_note(error: BaseException, note: str) -> None:
    """Add a note to a user's exception, and let nothing else come out in its place.

    Some refuse attributes, as frozen dataclasses do, or have an `add_note` or `__notes__` of their own. Where nothing
    can be added they go without: their type is what handlers look for.
    """
    try:
        error.add_note(note)
    except Exception:
        with contextlib.suppress(Exception):
            BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])
