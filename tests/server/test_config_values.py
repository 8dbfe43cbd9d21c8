"""Whatever value any key of a configuration has, it is taken, or refused with an error that names the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from experts_server.command.cli import main
from experts_server.configuration import config as models
from experts_server.configuration.settings import load_config
from moe_autograd.errors import ConfigError

EXPERT = ("experts", "e")
TABLES: dict[tuple[str, ...], type[BaseModel]] = {
    (): models.ServerConfig,
    ("batching",): models.BatchingConfig,
    ("limits",): models.LimitsConfig,
    ("security",): models.SecurityConfig,
    ("memory",): models.MemoryConfig,
    ("offload",): models.OffloadConfig,
    ("optimizer",): models.OptimizerConfig,
    ("optimizer", "schedule"): models.ScheduleConfig,
    EXPERT: models.ExpertConfig,
    (*EXPERT, "optimizer"): models.OptimizerConfig,
    (*EXPERT, "optimizer", "schedule"): models.ScheduleConfig,
    (*EXPERT, "memory"): models.MemoryConfig,
}
VALUES: list[Any] = [
    None, True, -1, 0, 1, 3.5, float("inf"), float("nan"), 10**30, "", "x", "none", "127.0.0.1:0", "0.0.0.0:1", "a\0b",
    [], [1], {}, {"x": 1}, {"name": "sgd"}, {"name": 3}, {"e": {"class": "ffn"}},
]  # fmt: skip


def keys() -> Iterator[tuple[str, ...]]:
    for table, model in TABLES.items():
        for name, field in model.model_fields.items():
            yield (*table, field.alias or name)
        yield (*table, "no_such_key")


@pytest.mark.parametrize("key", list(keys()), ids=".".join)
def test_a_value_is_taken_or_refused_with_its_key(key: tuple[str, ...]) -> None:
    for value in VALUES:
        settings: dict[str, Any] = {"experts": {"e": {"class": "ffn", "args": {"d_model": 8}}}}
        table = settings
        for name in key[:-1]:
            table = table.setdefault(name, {})
        table[key[-1]] = value
        said = ""
        try:
            load_config(flags=settings, environment={})
        except ConfigError as refusal:
            said = str(refusal)
        for line in said.splitlines():
            assert "key '" in line or "expert name" in line, line
            assert "expected" in line
            assert "got" in line
            assert "literal[" not in line


def numbers() -> Iterator[tuple[str, ...]]:
    """The keys of all that is a number."""
    for key in keys():
        model = TABLES[key[:-1]]
        field = next((f for name, f in model.model_fields.items() if key[-1] in (f.alias, name)), None)
        if field is not None and any(kind in str(field.annotation) for kind in ("int", "float")):
            yield key


@pytest.mark.parametrize("key", list(numbers()), ids=".".join)
def test_true_is_no_number(key: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"experts": {"e": {"class": "ffn", "args": {"d_model": 8}}}}
    table = settings
    for name in key[:-1]:
        table = table.setdefault(name, {})
    table[key[-1]] = True
    with pytest.raises(ConfigError, match=rf"key '{'.'.join(key)}': expected .*, got True"):
        load_config(flags=settings, environment={})


ARGS = [key for key in keys() if key[-1] == "args" and not {"optimizer", "schedule"}.isdisjoint(key)]


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), [[float("nan")]], {"x": float("inf")}], ids=str
)
@pytest.mark.parametrize("key", ARGS, ids=".".join)
def test_arguments_are_finite_as_all_numbers_are(key: tuple[str, ...], value: Any) -> None:
    """Training with others would be without sense, and a checkpoint of it is refused."""
    settings: dict[str, Any] = {"experts": {"e": {"class": "ffn", "args": {"d_model": 8}}}}
    table = settings
    for name in key[:-1]:
        table = table.setdefault(name, {})
    table["args"] = {"x": value}
    with pytest.raises(
        ConfigError, match=rf"key '{'.'.join(key)}': expected numbers that are finite, got .*'x'"
    ):
        load_config(flags=settings, environment={})


def test_each_of_several_files_is_checked_and_those_with_mistakes_are_named(tmp_path: Path) -> None:
    good, unknown, unbuilt = (tmp_path / f"{name}.toml" for name in ("good", "unknown", "unbuilt"))
    good.write_text('[experts."ffn.0"]\nclass = "ffn"\nargs = { d_model = 8 }\n')
    unknown.write_text("sed = 1\n")
    unbuilt.write_text('[experts.a]\nclass = "torch.nn:Linera"\n')
    files = (unknown, unbuilt, good)
    shown = CliRunner().invoke(main, ["config", *(f"--check={file}" for file in files)])
    assert (shown.exit_code, shown.stdout) == (1, f"{good}: 1 expert, no mistakes\n")
    errors = [line for line in shown.stderr.splitlines() if line.startswith("Error: ")]
    assert [error.split(": ")[1] for error in errors] == [str(unknown), str(unbuilt)]
    assert "'sed'" in shown.stderr
    assert "torch.nn:Linera" in errors[1]
    assert CliRunner().invoke(main, ["config", f"--check={unbuilt}"]).stderr == f"{errors[1]}\n"
