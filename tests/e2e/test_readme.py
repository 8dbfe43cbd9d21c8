"""The code in the README and the documentation runs as it stands there; only the server's port is a free one."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from tests.support.servers import ServerProcess
from tests.support.subprocesses import ROOT, run_python

PATHS = ("README.md", "docs/index.md", "docs/server.md", "docs/remote.md", "docs/failures.md")
PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in PATHS}
README = PAGES["README.md"]
PORT_IN_README = "127.0.0.1:31415"
LONGEST = 15  # lines


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def run(code: str, folder: Path) -> None:
    with contextlib.chdir(folder):
        ended = run_python(code)
    assert ended.returncode == 0, ended.stderr


def shell_lines(command: str) -> list[str]:
    return [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith(command)]


LOCAL = [code for page in PAGES.values() for code in blocks(page, "python") if PORT_IN_README not in code]
REMOTE = [code for code in blocks(README, "python") if PORT_IN_README in code]
SERVE = shell_lines("experts-server serve")


def test_there_is_code_for_each_of_the_three_uses() -> None:
    assert (len(blocks(README, "python")), len(REMOTE), len(SERVE)) == (3, 1, 1)
    assert all(len(code.splitlines()) <= LONGEST for code in blocks(README, "python"))


@pytest.mark.parametrize("code", LOCAL)
def test_code_without_a_server_runs(code: str, tmp_path: Path) -> None:
    run(code, tmp_path)


def test_the_command_starts_a_server_and_the_code_trains_its_experts(tmp_path: Path) -> None:
    arguments = shlex.split(SERVE[0].replace(PORT_IN_README, "127.0.0.1:0"))[2:]
    with ServerProcess(*arguments) as server:
        run(REMOTE[0].replace(PORT_IN_README, server.address), tmp_path)


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {line.split()[1] for line in shell_lines("make ")}
    assert named == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


def test_the_layout_it_draws_is_the_real_one() -> None:
    drawn = re.findall(r"^((?:moe_autograd|experts_server)/\S*)  ?", README, flags=re.MULTILINE)
    assert len(drawn) == 6
    assert all((ROOT / name).exists() for name in drawn)
