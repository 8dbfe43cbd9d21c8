"""What a user installs: both packages, with their types, and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_both_packages_with_their_types_and_nothing_else(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("moe_autograd", "experts_server", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, source / folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(wheels), str(source)], check=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (commands,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {"moe_autograd/py.typed", "experts_server/py.typed", "moe_autograd/wire/experts.proto"} <= {*names}
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"moe_autograd", "experts_server"}
    assert "experts-server = " in commands
