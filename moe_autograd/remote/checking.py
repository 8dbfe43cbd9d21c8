"""What `connect` was given, looked at before anything is sent: grpc says later and less of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from moe_autograd.remote.hedging import HedgePolicy
from moe_autograd.remote.retry import RetryPolicy
from moe_autograd.remote.security import TLS
from moe_autograd.wire.tokens import check_token

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "token": ((str, Path, NoneType), "a text, a Path or None"),
    "tls": ((TLS, NoneType), "a TLS or None"),
    "retry": ((RetryPolicy, NoneType), "a RetryPolicy or None"),
    "hedge": ((bool, HedgePolicy), "True, False or a HedgePolicy"),
    "allow_missing": ((bool,), "True or False"),
    "max_tensor_bytes": ((int,), "a positive whole number"),
}


def check_kind_of_addresses(addresses: Any) -> None:
    """Refuse what is no text, nor several of them; what stands in these is for `addresses` to look at.

    Raises:
        TypeError: it is something else, such as the pair of host and port that a socket has.
    """
    is_pair = isinstance(addresses, tuple) and len(addresses) == 2 and isinstance(addresses[1], int)
    if not isinstance(addresses, Iterable) or isinstance(addresses, bytes | bytearray) or is_pair:
        raise TypeError(
            f"connect: expected host:port, several of them, or a file, got {addresses!r}. Take what "
            "`experts-server serve` printed, or the `address` of an `ExpertsServer`."
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `connect` that cannot be meant.

    Raises:
        TypeError: one is of another type.
        ValueError: or of another value.
    """
    for name, (types, expected) in _KINDS.items():
        value = arguments[name]
        advice = "Pass TLS(ca_file=...)." if name == "tls" else "Leave it out for the default."
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            shown = f"a {type(value).__name__}" if name == "token" else repr(value)
            raise TypeError(f"connect: expected {name} to be {expected}, got {shown}. {advice}")
    if isinstance(token := arguments["token"], str):
        check_token(token)
        if os.path.isfile(token):
            raise ValueError(f"token: expected one, got the name of a file, {token!r}. Pass Path({token!r}).")
    if arguments["max_tensor_bytes"] < 1:
        raise ValueError(
            f"max_tensor_bytes: expected a positive whole number, got {arguments['max_tensor_bytes']!r}. "
            "Leave it out for 1 GiB."
        )
