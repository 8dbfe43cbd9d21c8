"""What configuration files of the client and of the server have in common: reading one, and naming a key that is none.

Imports only `errors`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_autograd.errors import ConfigError


def read_toml(file: Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"config {str(file)!r}: expected a readable file, got {reason!r}. Check the path and its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config {str(file)!r}: expected TOML in UTF-8, got other bytes ({error}). Save it as UTF-8."
        ) from error
    except ValueError as error:  # a null byte
        raise ConfigError(
            f"config {str(file)!r}: expected the name of a file, got none ({error})."
        ) from error
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # of a number of thousands of digits, or lists in lists in lists
        raise ConfigError(
            f"config {str(file)!r}: expected TOML, got a file that does not parse ({error}). Correct that line."
        ) from error


def is_named_as_a_token(key: str) -> bool:
    """Tell whether a token may be the value of this key, which is none: it is not shown then."""
    name = key.lower()
    return "token" in name or bool(difflib.get_close_matches(name, ["token"]))


def describe_unknown_key(
    key: str, value: Any, allowed: Iterable[str], elsewhere: Sequence[str] = (), advice: str = ""
) -> str:
    """Return what to say of a key that is not allowed, with the one that may have been meant.

    Args:
        key: as in the file, with the tables that it is in: `security.tls_crt`.
        value: its value.
        allowed: the keys that its table has.
        elsewhere: keys of the same name in other tables, with these.
        advice: what to do, where no key is near.

    >>> describe_unknown_key("tls.ca_fil", "ca.pem", ["ca_file", "cert_file"])
    "key 'tls.ca_fil': expected one of ca_file, cert_file, got an unknown key (value 'ca.pem'). Did you mean 'ca_file'?"
    """
    names = sorted(allowed)
    near = [*elsewhere, *difflib.get_close_matches(key.rpartition(".")[2], names, n=1)]
    advice = f"Did you mean {near[0]!r}?" if near else advice
    expected = f"key {key!r}: expected one of {', '.join(names)}, got an unknown key (value {value!r})."
    return f"{expected} {advice}" if advice else expected
