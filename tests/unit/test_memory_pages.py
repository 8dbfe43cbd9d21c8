"""The code on the pages about memory, and about moving a model, runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
GO_ON = {"offload", "recompute", "porting"}  # pages whose code goes on from one block to the next


@pytest.mark.parametrize("page", ["split-backward", "recompute", "offload", "porting", "prefetch"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
        if page not in GO_ON:
            names = {}
