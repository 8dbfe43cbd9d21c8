"""What `connect` is told, from a TOML file.

::

    addresses = ["experts.example:31415", "10.0.0.7:31415"]
    timeout_s = 30.0
    token_file = "token"                    # relative to this file's folder
    compression = { forward = "bfloat16", backward = "none" }

    [tls]
    ca_file = "ca.pem"

    [retry]
    patience_s = 60.0

Its keys are the arguments of `connect`, of `TLS`, of `RetryPolicy`, of `HedgePolicy` and of `Compression`. Whatever
is wrong raises `ConfigError` with one line a mistake, each naming the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_autograd._toml import describe_unknown_key, is_named_as_a_token, read_toml
from moe_autograd.errors import ConfigError
from moe_autograd.remote.addresses import check_addresses
from moe_autograd.remote.compression import Compression
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.hedging import HedgePolicy
from moe_autograd.remote.retry import RetryPolicy
from moe_autograd.remote.security import TLS
from moe_autograd.wire.tokens import check_token, read_token

Reader = Callable[[Any], Any]  # returns what the value means; raises ValueError saying what was expected


def load_config(file: Path) -> dict[str, Any]:
    """Return the arguments of `connect` that a file sets.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed.
    """
    settings = read_toml(file)
    mistakes: list[str] = []
    arguments = _read_table(settings, _readers(file.parent), (), mistakes)
    if "addresses" not in settings:
        mistakes.append("key 'addresses': expected a list of host:port, got none. Set it.")
    if "token" in settings and "token_file" in settings:
        mistakes.append(
            "key 'token_file': expected only one of token and token_file, got both. Leave one out."
        )
    if mistakes:
        raise ConfigError("\n".join(f"config {str(file)!r}, {mistake}" for mistake in mistakes))
    if "token_file" in arguments:
        arguments["token"] = arguments.pop("token_file")
    return arguments


# ---- tables


def _readers(folder: Path) -> dict[str, Reader | _Table]:
    """Return what reads each key; files are relative to `folder`."""

    def path(value: Any) -> Path:
        return folder / _text(value)

    tls: dict[str, Reader] = {"ca_file": path, "cert_file": path, "key_file": path, "server_name": _text}

    def token_file(value: Any) -> Path:
        read_token(path(value))
        return path(value)

    return {
        "addresses": _addresses,
        "token": _token,
        "token_file": token_file,
        "timeout_s": lambda value: Deadline(value).timeout_s,
        "allow_missing": _flag,
        "max_tensor_bytes": _positive_count,
        "compression": _Table({"forward": _text, "backward": _text}, Compression, alone=Compression.of),
        "hedge": _Table(_numbers_of(HedgePolicy), HedgePolicy, alone=_flag),
        "tls": _Table(tls, _tls),
        "retry": _Table(_numbers_of(RetryPolicy), RetryPolicy),
    }


def _numbers_of(policy: type[HedgePolicy | RetryPolicy]) -> dict[str, Reader]:
    """Return what reads each number of a policy, which itself refuses what is none."""

    def reader(name: str) -> Reader:
        return lambda value: getattr(policy(**{name: value}), name)

    return {field.name: reader(field.name) for field in dataclasses.fields(policy)}


@dataclasses.dataclass(frozen=True)
class _Table:
    """A key whose value is a table.

    Args:
        readers: of the keys in it.
        make: of the values read.
        alone: reads a value that is no table; None if there is none.
    """

    readers: Mapping[str, Reader]
    make: Callable[..., Any]
    alone: Reader | None = None


def _read_table(
    table: Mapping[str, Any], readers: Mapping[str, Reader | _Table], at: tuple[str, ...], mistakes: list[str]
) -> dict[str, Any]:
    """Return what the values of a table mean; of those with mistakes, which are added to the others, nothing."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = (*at, key)
        name = ".".join(path)
        reader = readers.get(key)
        num_before = len(mistakes)
        if reader is None:
            mistakes.append(describe_unknown_key(name, "..." if is_named_as_a_token(key) else value, readers))
            continue
        try:
            meant = _meant_by(value, reader, path, mistakes)
        except ValueError as error:
            mistakes.append(f"key {name!r}: {_with_value(str(error), name, value)}")
        if len(mistakes) == num_before:
            found[key] = meant
    return found


def _meant_by(value: Any, reader: Reader | _Table, at: tuple[str, ...], mistakes: list[str]) -> Any:
    if not isinstance(reader, _Table):
        return reader(value)
    if isinstance(value, dict):
        own: list[str] = []
        inner = _read_table(value, reader.readers, at, own)
        mistakes += own
        return None if own else reader.make(**inner)
    if reader.alone is None:
        raise ValueError("expected a table")
    return reader.alone(value)


def _with_value(expected: str, name: str, value: Any) -> str:
    """Return what was expected, and what came; errors end up in logs, so a token is not shown."""
    if ", got " in expected:
        return expected
    return f"{expected}, got {f'a {type(value).__name__}' if name == 'token' else repr(value)}."


# ---- values


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text that is not empty")
    return value


def _token(value: Any) -> str:
    check_token(_text(value))
    return str(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _positive_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("expected a positive whole number")
    return value


def _addresses(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("expected a list of host:port")
    return check_addresses(value)


def _tls(**settings: Any) -> TLS:
    tls = TLS(**settings)
    try:
        tls.credentials()
    except OSError as error:
        raise ValueError(str(error).removeprefix("TLS: ")) from error
    return tls
