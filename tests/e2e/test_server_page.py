"""docs/server.md and its dashboard name every key, command and metric that there is, and none that there is not."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.configuration import config as models
from moe_autograd.remote import TLS, connect
from tests.support.certificates import make_certificates
from tests.support.servers import WireClient

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "server.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
TABLES = (
    models.ServerConfig,
    models.OptimizerConfig,
    models.ExpertConfig,
    models.MemoryConfig,
    models.OffloadConfig,
    models.BatchingConfig,
    models.LimitsConfig,
    models.SecurityConfig,
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def in_first_columns() -> set[str]:
    """Return what the page's tables have in backticks in their first column."""
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.fixture(scope="module")
def families() -> Iterator[dict[str, set[str]]]:
    """Return the names of all metrics that a server shows, with those of their samples."""
    config = models.ServingConfig(metrics_listen="127.0.0.1:0")
    with (
        ExpertsServer({"e": torch.nn.Linear(1, 1)}, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", torch.ones(1, 1))
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as reply:
            parsed = list(text_string_to_metric_families(reply.read().decode()))
        yield {family.name: {sample.name for sample in family.samples} for family in parsed}


@pytest.mark.parametrize("text", blocks("toml"))
def test_each_configuration_passes_the_check(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_certificates(tmp_path)
    Path("tokens").write_text("train a-token-of-16-characters-or-more\n", encoding="utf-8")
    Path("server.toml").write_text(text, encoding="utf-8")
    checked = CliRunner().invoke(main, ["config", "--check", "server.toml"])
    assert (checked.exit_code, "no mistakes" in checked.output) == (0, True), checked.output


def test_clients_and_commands_take_the_certificate_and_the_token_that_it_makes(tmp_path: Path) -> None:
    (commands,) = (text for text in blocks("sh") if text.startswith("openssl"))
    subprocess.run(["sh", "-ec", commands], check=True, capture_output=True, cwd=tmp_path)
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tokens_file": "tokens"}
    security = {key: tmp_path / name for key, name in files.items()}
    ca, token = tmp_path / "server.pem", tmp_path / "token"
    tls = TLS(ca_file=ca, server_name="experts.example")
    with (
        ExpertsServer({"e": torch.nn.Linear(1, 1)}, config={"security": security}) as server,
        connect(server.address, tls=tls, token=token) as experts,
    ):
        assert experts["e"](torch.ones(1, 1)).shape == (1, 1)
        arguments = ["info", server.address, "--ca", str(ca), "--token-file", str(token)]
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 0, shown.output


def test_it_names_every_key_and_no_other(families: dict[str, set[str]]) -> None:
    keys = {field.alias or name for model in TABLES for name, field in model.model_fields.items()}
    tables = {
        name
        for name, field in models.ServerConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    } | {"experts"}
    named = in_first_columns()
    assert keys - tables - named == set()
    others = {name for name in named if not name.startswith(("experts-server", "experts_"))}
    assert others - keys == set()
    assert all(f"[{table}" in PAGE for table in tables)


UNITS = {"": 1, "s": 1, "h": 3600, "MiB": 1 << 20, "GiB": 1 << 30}


def meant_by(text: str) -> Any:
    """Return the value that stands in a column of defaults."""
    text = text.strip("`")
    if number := re.fullmatch(r"([\d.]+(?:e-\d+)?)(?: (\w+))?", text):
        return float(number[1]) * UNITS[number[2] or ""]
    return {"none": None, "true": True, "false": False}.get(text, text.strip('"'))


def test_the_defaults_that_it_names_are_those_of_the_code() -> None:
    fields = [item for model in TABLES for item in model.model_fields.items()]
    compared = 0
    tables = "".join(re.findall(r"^\| key \| default \|.*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE))
    for keys, column in re.findall(r"^\| (`[^|]*`) \| ([^|]+) \|", tables, flags=re.MULTILINE):
        said = column.split(", ")
        for name, default in zip(re.findall(r"`([^`]+)`", keys), said, strict=False):
            own = [field.default for key, field in fields if key == name and not field.is_required()]
            if own and not default.startswith(("that of", "those of")):
                assert meant_by(default) in own, name
                compared += 1
    assert compared > 30


def test_it_names_every_command_and_no_other() -> None:
    named = {name.split()[1] for name in in_first_columns() if name.startswith("experts-server ")}
    assert named == set(main.commands)


def test_it_names_every_metric_and_no_other(families: dict[str, set[str]]) -> None:
    named = {name.removesuffix("_total") for name in in_first_columns() if name.startswith("experts_")}
    assert named == {family for family in families if family.startswith("experts_")}


def test_the_dashboard_asks_only_for_metrics_that_exist_and_shows_all_of_them(
    families: dict[str, set[str]],
) -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:experts|process)_\w+", query)}
    samples = {name for names in families.values() for name in names}
    assert asked - samples == set()
    own = {family: names for family, names in families.items() if family.startswith("experts_")}
    assert [family for family, names in own.items() if not names & asked] == []
