"""Who may call: bearer tokens from a file.

A tokens file has one line for each token, a permission and the token; `#` at the beginning of a word starts a comment::

    train  4f8d0c6b2a...
    read   91be77aa05...

`read` allows information, weights and forwards; `train` allows all. A token is compared with every one in the
file, each in constant time, so the time of an answer says nothing about how much of it was right. Tokens are
never logged or shown, and kept only as digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from experts_server.serving.certificates import read_file
from experts_server.serving.followed import Looks, refuse_pipes
from moe_autograd.errors import ConfigError, PermissionDeniedError
from moe_autograd.wire.tokens import check_token

Permission = Literal["read", "train"]
MIN_TOKEN_LENGTH = 16
_LOOK_INTERVAL_S = 1.0

_SCHEME = "Bearer "
logger = logging.getLogger(__name__)


class Gate:
    """Decides whether a call may proceed.

    The file is looked at once a second, and whenever a token is not known, so that tokens can be added and taken away
    while the server runs. While it cannot be read, tokens stay as they were.

    Args:
        file: of the tokens; none: everybody may do everything (who may connect is TLS's business).

    Raises:
        ConfigError: the file cannot be read or has a line that is none.

    Attributes:
        edition: of the tokens: another number after each change.

    Threads: the event loop's; the file is read on another.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.edition = 0
        self._file = file
        self._read = _stamp(file)
        self._trouble = ""
        self._tokens = None if file is None else read_tokens(file)
        self._look_at = time.monotonic() + _LOOK_INTERVAL_S
        self._looks = Looks(self._look)

    def __repr__(self) -> str:
        return "<Gate open>" if self._tokens is None else f"<Gate {len(self._tokens)} tokens>"

    async def check(
        self, metadata: Iterable[tuple[str, str | bytes]] | None, permission: Permission
    ) -> Permission:
        """Return what the call's token allows; raise `PermissionDeniedError` unless that is `permission` or more."""
        if self._tokens is None:
            return "train"
        header = next((value for key, value in metadata or () if key == "authorization"), None)
        if not isinstance(header, str) or not header.startswith(_SCHEME):
            raise PermissionDeniedError(
                "server: expected a bearer token in the call's metadata, got none. Pass token=... or --token-file."
            )
        if time.monotonic() >= self._look_at:
            await self._look_now()
        granted = self._find(header.removeprefix(_SCHEME))
        if granted is None:
            await self._look_now()
            granted = self._find(header.removeprefix(_SCHEME))
        if granted is None:
            raise PermissionDeniedError(
                "server: expected a token that it knows, got another. Ask who runs it for one."
            )
        if permission == "train" and granted != "train":
            raise PermissionDeniedError(
                "server: expected a token with permission 'train' for this call, got one with 'read'."
            )
        return granted

    async def edition_now(self) -> int:
        """Return the edition, once the file has been looked at, if a second has passed since the last time."""
        if self._tokens is not None and time.monotonic() >= self._look_at:
            await self._look_now()
        return self.edition

    async def _look_now(self) -> None:
        self._look_at = time.monotonic() + _LOOK_INTERVAL_S
        await asyncio.to_thread(self._looks.now)

    def _look(self) -> None:
        """Take what is in the file, if that has changed and is a whole one; until it is, look again, and tell once."""
        if self._file is None or (stamp := _stamp(self._file)) == self._read:
            return
        try:
            refuse_pipes(self._file)
            self._tokens = read_tokens(self._file)
        except ConfigError as error:
            if self._trouble != (told := str(error)):
                logger.warning("tokens stay as they were: %s", told)
            self._trouble = told
        else:
            self._read, self._trouble = stamp, ""
            self.edition += 1  # after they are there
            logger.info("tokens: %d, read again from %s", len(self._tokens), self._file)

    def _find(self, token: str) -> Permission | None:
        assert self._tokens is not None
        given = _digest(token)
        found: Permission | None = None
        for digest, permission in self._tokens.items():  # all of them, whichever fits
            if hmac.compare_digest(digest, given):
                found = permission
        return found


def read_tokens(file: Path) -> dict[bytes, Permission]:
    """Return the tokens of a file, as digests."""
    tokens: dict[bytes, Permission] = {}
    lines = read_file(file, "tokens_file").decode("utf-8-sig", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
        if not words:
            continue
        place = f"config, key 'security.tokens_file': {str(file)!r}, line {number}"
        if len(words) != 2 or words[0] not in get_args(Permission):
            got = {1: "one word", 2: "another first word"}.get(len(words), f"{len(words)} words")
            raise ConfigError(f"{place}: expected 'read' or 'train' and a token, got {got}.")
        if len(words[1]) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{place}: expected a token of at least {MIN_TOKEN_LENGTH} characters, got {len(words[1])}. "
                "Make one with `python -c 'import secrets; print(secrets.token_hex(32))'`."
            )
        try:
            check_token(words[1])
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        tokens[_digest(words[1])] = "train" if words[0] == "train" else "read"
    if not tokens:
        raise ConfigError(f"config, key 'security.tokens_file': expected tokens in {str(file)!r}, got none.")
    return tokens


def _stamp(file: Path | None) -> tuple[int, ...] | None:
    """Return what differs between a file and another one in its place; None where there is none.

    The time of its last change also tells of permissions, without which it could not be read before, and of a copy with
    the times of its original.
    """
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ctime_ns, found.st_ino, found.st_size)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
