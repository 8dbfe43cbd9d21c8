"""Where a server's configuration comes from: a TOML file, the environment and flags, later ones winning.

A variable is called `EXPERTS_SERVER_<KEY>`, with `__` between a table and its key; its value is a text, or an inline
table of TOML. Whatever is wrong raises `ConfigError` with one line a mistake, each naming where it comes from, the
key, the value and what is allowed. docs/server.md shows a file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experts_server.configuration.config import ServerConfig
from experts_server.configuration.mistakes import mistakes_in
from experts_server.configuration.names import expand_pattern
from moe_autograd._toml import read_toml
from moe_autograd.errors import ConfigError

ENVIRONMENT_PREFIX = "EXPERTS_SERVER_"


@dataclass(frozen=True)
class Source:
    """Settings, and where they come from, as an error names it."""

    name: str
    settings: Mapping[str, Any]


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Read the file, then the environment, then the flags, and check the result.

    Args:
        file: a TOML file, or `None`.
        flags: a nested mapping shaped like the file; keys whose value is `None` are left out.
        environment: the process's own by default.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed.
    """
    sources = [] if file is None else [Source(f"config {str(file)!r}", read_toml(file))]
    sources += _variables(os.environ if environment is None else environment)
    return _check([*sources, Source("flags", _without_none(flags or {}))])


def _check(sources: Sequence[Source]) -> ServerConfig:
    merged: dict[str, Any] = {"experts": {}}
    for source in sources:
        try:
            _merge(merged, _expanded(source))
        except RecursionError:
            raise ConfigError(
                f"{source.name}: expected tables a few deep, got one within another hundreds of times."
            ) from None
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        mistakes = mistakes_in(error, ServerConfig)
        lines = [f"{_source_of(mistake.key, sources)}, {mistake.sentence}" for mistake in mistakes]
        raise ConfigError("\n".join(lines)) from error


def _source_of(key: str, sources: Sequence[Source]) -> str:
    """Return the name of the last source that says most about `key`; of the first where none says anything."""
    reached = {source.name: _reach(key, _expanded(source)) for source in reversed(sources)}
    return max(reached, key=lambda name: reached[name]) if any(reached.values()) else sources[0].name


def _reach(key: str, settings: Any) -> int:
    """How many characters of `a.b.c` lead somewhere in `settings`; the names of experts have dots as well."""
    if not isinstance(settings, Mapping):
        return 0
    reached = [
        len(name) + 1 + (0 if key == name else _reach(key[len(name) + 1 :], value))
        for name, value in settings.items()
        if key == name or key.startswith(f"{name}.")
    ]
    return max(reached, default=0)


def _variables(environment: Mapping[str, str]) -> Iterator[Source]:
    """One source for each variable; a table comes before its keys."""
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX):
            *tables, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            settings: dict[str, Any] = {key: _value(environment[variable], "args" in tables)}
            for table in reversed(tables):
                settings = {table: settings}
            yield Source(f"environment variable {variable}", settings)


def _value(text: str, may_be_number: bool) -> Any:
    """Return a variable's value. Where a type is known, the model finds it; of arguments none is known."""
    if not may_be_number and not text.lstrip().startswith("{"):
        return text
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["value"] if read.keys() == {"value"} else text


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if not isinstance(value, Mapping):
            base[key] = value
            continue
        before = base.get(key)
        if not isinstance(before, dict):
            # no optimizer: what is said of one names it, too
            before = base[key] = {"name": "none"} if before == "none" else {}
        _merge(before, value)


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in flags.items()
        if value is not None
    }


def _expanded(source: Source) -> Mapping[str, Any]:
    """Turn patterns into names; an entry for a name that is there already overrides key by key."""
    experts = source.settings.get("experts")
    if not isinstance(experts, Mapping) or not all(isinstance(entry, Mapping) for entry in experts.values()):
        return source.settings  # the model says what is wrong with it
    expanded: dict[str, Any] = {}
    for pattern, entry in experts.items():
        try:
            names = expand_pattern(pattern)
        except ValueError as error:
            raise ConfigError(f"{source.name}, {error}.") from error
        for name in names:
            _merge(expanded.setdefault(name, {}), entry)
    return {**source.settings, "experts": expanded}
