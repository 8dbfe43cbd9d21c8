"""What is wrong with a configuration, in words: `key 'a.b': expected X, got Y.`, where pydantic finds it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from experts_server.configuration.config import NONE, TABLE
from moe_autograd._toml import describe_unknown_key, is_named_as_a_token

_EXPECTED = {
    "dict_type": "expected a table",
    "model_type": "expected a table",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "string_type": "expected a text",
    "path_type": "expected a path",
    "string_too_short": "expected a text that is not empty",
}


@dataclass(frozen=True)
class Mistake:
    """One of them: the key, with the tables that it is in, and a sentence about it."""

    key: str
    sentence: str


def mistakes_in(error: ValidationError, model: type[BaseModel]) -> list[Mistake]:
    """Return what `error`, of validating `model`, says; of a mistake that several experts have, the first."""
    alike: dict[object, list[dict[str, Any]]] = {}
    for each in map(dict[str, Any], error.errors()):
        alike.setdefault(_whatever_the_expert(each), []).append(each)
    return [_mistake(found[0], model, len(found) - 1) for found in alike.values()]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence that names one or two that may have been meant, in any case; nothing where none is near.

    >>> did_you_mean("adma", ["Adam", "Adamax", "SGD"])
    " Did you mean 'Adamax' or 'Adam'?"
    """
    by_lower = {one.lower(): one for one in allowed}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2)
    return f" Did you mean {' or '.join(repr(by_lower[one]) for one in near)}?" if near else ""


def _whatever_the_expert(found: dict[str, Any]) -> object:
    """Return what a mistake is, without the name of the expert that it is in."""
    location = found["loc"]
    in_entry = location[2:] if location[:1] == ("experts",) else location
    return in_entry, found["type"], repr(found["input"])


def _mistake(found: dict[str, Any], model: type[BaseModel], num_others: int) -> Mistake:
    mistake = _described(found, model)
    others = f" So it is for {num_others} more expert{'s' * (num_others > 1)}." if num_others else ""
    return Mistake(mistake.key, mistake.sentence + others)


def _described(found: dict[str, Any], model: type[BaseModel]) -> Mistake:
    location = tuple(part for part in found["loc"] if part not in (TABLE, NONE))
    key, got = ".".join(str(part) for part in location), found["input"]
    if _may_be_secret(location, found["type"]):
        got = "..."
    match found["type"]:
        case "missing":
            return Mistake(key, f"key {key!r}: expected a value, got none. Set it.")
        case "extra_forbidden":
            allowed, elsewhere = _allowed_keys(location[:-1], model), _in_tables(str(location[-1]), model)
            advice = _advice(location, got, allowed, model)
            return Mistake(key, describe_unknown_key(key, got, allowed, elsewhere, advice))
        case "value_error" if not key:  # of the whole: the message begins with the key
            key, _, expected = str(found["ctx"]["error"]).partition(": ")
            return Mistake(key, f"key {key!r}: {expected}.")
        case "value_error":
            expected = str(found["ctx"]["error"])
        case "too_short" if key == "experts":
            expected = "expected at least one expert: a table [experts.NAME], or --expert ffn --d-model 64"
        case "model_type" if location[-1] == "schedule":
            expected = "expected a table such as { name = 'CosineAnnealingLR', args = { T_max = 10000 } }"
        case kind:
            expected = _EXPECTED.get(kind, str(found["msg"]).replace("Input should be", "expected"))
    return Mistake(key, f"key {key!r}: {expected}, got {got!r}.")


def _may_be_secret(location: tuple[Any, ...], kind: str) -> bool:
    """Whether a token may be what stands there: it belongs into a file, and errors go into logs."""
    if kind == "extra_forbidden":
        is_alone = len(location) == 1
        return location[0] == "security" or (is_alone and is_named_as_a_token(str(location[0])))
    return location == ("security",) or (location == ("security", "tokens_file") and kind != "value_error")


def _advice(location: tuple[Any, ...], value: object, allowed: Sequence[str], model: type[BaseModel]) -> str:
    """Say where a key may belong that the table at its place does not have."""
    *tables, name = location
    if tables and name in model.model_fields:
        return f"{name} belongs above the first [table]: what stands below one is part of it."
    if tables[:1] == ["experts"] and len(tables) == 2 and isinstance(value, dict):
        return f'Names with dots want quotes: [experts."{tables[1]}.{name}"].'
    return f"Arguments of the class go into args = {{ {name} = ... }}." if "args" in allowed else ""


def _allowed_keys(location: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    """The keys that the table at `location` has."""
    parts = iter(location)
    for part in parts:
        field = next(f for name, f in model.model_fields.items() if part in (name, f.alias))
        model = _models_in(field.annotation)[0]
        if part == "experts":
            next(parts, None)  # the name of one
    return [field.alias or name for name, field in model.model_fields.items()]


def _in_tables(name: str, model: type[BaseModel]) -> list[str]:
    """The tables of `model` that have a key `name`, with it."""
    return [
        f"{table}.{name}"
        for table, field in model.model_fields.items()
        if table != "experts" and any(name in inner.model_fields for inner in _models_in(field.annotation))
    ]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(cast(Any, part))]
