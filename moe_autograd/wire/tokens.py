"""Tokens as a header can carry them."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_TOKEN_LENGTH = 4096  # grpc refuses headers of more than 8 KiB


def check_token(token: str) -> None:
    """Refuse a token that no header can carry; the token is not shown.

    Raises:
        ValueError: it is empty or too long, or has other characters than printable ones of ASCII.
    """
    expected = f"token: expected 1 to {_MAX_TOKEN_LENGTH} printable characters of ASCII without blanks"
    if not 0 < len(token) <= _MAX_TOKEN_LENGTH:
        raise ValueError(f"{expected}, got {len(token)} characters. Take one of the server's tokens_file.")
    for position, character in enumerate(token):
        if not "!" <= character <= "~":
            raise ValueError(
                f"{expected}, got {character!r} at position {position} of {len(token)}. "
                "If it was read from a file, strip its line end."
            )


def read_token(file: Path) -> str:
    """Return the token that is all that a file holds.

    What names no file is not shown: it may be the token itself.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        token = file.read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:  # not there, no text, or a name with a null byte
        reason = getattr(error, "strerror", None) or error
        got = repr(str(file)) if os.path.exists(file) else "none"  # `Path`'s raises for some names
        raise ValueError(f"expected a readable text file, got {got} ({reason}). Check the path.") from error
    if not token:
        raise ValueError(f"expected a token in {str(file)!r}, got an empty file. Write one.")
    check_token(token)
    return token
