"""`import moe_autograd` is light: no server, no network, no side effects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def fresh_interpreter(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_importing_the_library_loads_neither_grpc_nor_the_server_nor_what_they_need() -> None:
    printed = fresh_interpreter("import json, sys, moe_autograd; print(json.dumps(sorted(sys.modules)))")
    loaded = {name.split(".")[0] for name in json.loads(printed)}
    foreign = {"grpc", "grpc_health", "xxhash", "cryptography", "experts_server"}
    foreign |= {"click", "pydantic", "rich", "safetensors"}
    assert "moe_autograd" in loaded
    assert not loaded & foreign
    assert "google.protobuf" not in json.loads(printed)


NEEDS = {
    "moe_autograd.remote": ["cryptography", "grpc", "xxhash"],
    "experts_server": [
        *("click", "cryptography", "grpc", "grpc_health", "grpc_reflection", "prometheus_client", "pydantic"),
        *("rich", "safetensors", "xxhash"),
    ],
}


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, str], str]:
    """What importing a package raises without a module that it needs; in a fork for each, which has torch already."""
    code = f"""
import importlib, json, os, sys, torch
for package, modules in {NEEDS}.items():
    for missing in modules:
        if os.fork() == 0:
            assert package not in sys.modules
            sys.modules[missing] = None  # as if it were not installed
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                print(json.dumps([package, missing, error.name, str(error)]), flush=True)
            os._exit(0)
        os.wait()
"""
    told = [json.loads(line) for line in fresh_interpreter(code).splitlines()]
    return {(package, missing): text for package, missing, name, text in told if name == missing}


@pytest.mark.parametrize(
    ("package", "missing"), [(package, missing) for package, needed in NEEDS.items() for missing in needed]
)
def test_importing_what_needs_an_extra_names_it(
    package: str, missing: str, texts: dict[tuple[str, str], str]
) -> None:
    text, extra = texts[package, missing], "remote" if package == "moe_autograd.remote" else "server"
    assert text.startswith(f"{package}: expected ")
    assert f"extra '{extra}': pip install '.[{extra}]'" in text


def test_importing_the_library_starts_no_thread_and_changes_no_setting_of_torch() -> None:
    code = """
import threading, torch
before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())
import moe_autograd
after = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())
print(before == after, threading.active_count())
"""
    assert fresh_interpreter(code).split() == ["True", "1"]


def test_every_public_name_is_there_documented_and_listed() -> None:
    code = "import json, moe_autograd as m; print(json.dumps({n: getattr(m, n).__doc__ for n in m.__all__}))"
    documentation = json.loads(fresh_interpreter(code))
    assert {
        "EmulatedAutogradContext",
        "run_isolated_forward",
        "run_isolated_backward",
        "map_with_parallel_backward",
        "parallel_apply",
        "split_backward",
        "MixtureOfExperts",
        "TopKRouter",
    } <= documentation.keys()
    assert [name for name, text in documentation.items() if not text] == []
    map_of_names = fresh_interpreter("import moe_autograd; print(moe_autograd.__doc__)")
    assert documentation.keys() - set(re.findall(r"\w+", map_of_names)) == set()


def test_a_server_saves_and_exports_with_nothing_installed_but_what_its_extra_names(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = [
        *project["dependencies"],
        *project["optional-dependencies"]["remote"],
        *project["optional-dependencies"]["server"],
    ]
    code = f"""
import importlib.abc, importlib.metadata as metadata, re, sys

def plain(name):
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", name)[0]).lower()

needed, to_visit = {{"moe-autograd"}}, {named!r}
while to_visit:
    name = plain(to_visit.pop())
    if name not in needed and name in {{plain(one.name) for one in metadata.distributions()}}:
        needed.add(name)
        to_visit += [said for said in metadata.requires(name) or () if "extra ==" not in said]

class NotInstalled(importlib.abc.MetaPathFinder):
    owners = metadata.packages_distributions()

    def find_spec(self, name, path=None, target=None):
        if name in self.owners and not needed.intersection(map(plain, self.owners[name])):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
import torch
from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from experts_server.command.console import ask_save, export_weights
terms = dict(token_file=None, ca=None, cert=None, key=None, timeout_s=60.0)
with ExpertsServer({{"e": torch.nn.Linear(2, 2)}}, config=ServingConfig(checkpoint_dir={str(tmp_path)!r})) as server:
    print(ask_save(server.address, **terms))
    export_weights(server.address, "e", {str(tmp_path / "e")!r}, **terms)
"""
    assert fresh_interpreter(code).split() == ["generation-00000002"]
