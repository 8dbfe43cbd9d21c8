"""The code on the pages about memory, and about moving a model, runs as it stands there."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
GO_ON = {"offload", "recompute", "porting"}  # pages whose code goes on from one block to the next


@pytest.mark.parametrize("page", ["split-backward", "recompute", "offload", "porting", "prefetch"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(page)


def run(page: str) -> dict[str, Any]:
    """Run the code of a page, and return the names that its last block leaves."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text("utf-8"), re.DOTALL):
        names = names if page in GO_ON else {}
        exec(block, names)
    return names


def test_the_routers_of_the_page_about_moving_a_model_choose_as_it_says() -> None:
    torch.manual_seed(0)
    names = run("porting")
    block, experts = names["Block"](names["experts"]), names["experts"]
    x, ids = torch.randn(2, 5, 8), torch.tensor([[7, 0, 3, 8, 0], [0, 1, 9, 9, 2]])
    expected = x.clone()
    for place in ids.nonzero().tolist():
        chosen = block.layer.router.expert_of_id[ids[*place]]
        expected[*place] += experts[chosen](x[*place])
    torch.testing.assert_close(block(x, ids), expected)
    by_sigmoids = names["SigmoidRouter"](8, 4, top_k=2)(x)
    torch.testing.assert_close(by_sigmoids.probabilities.sum(-1), torch.ones(10))
    top_p = names["TopPRouter"](8, 4, p=0.6)(x)
    torch.testing.assert_close(top_p.load_balancing_loss, torch.tensor(4.0))
    for row, index, kept in zip(top_p.probabilities, top_p.expert_index, top_p.is_kept, strict=True):
        chosen = row[index[kept]]
        assert chosen.sum() >= 0.6 > chosen[:-1].sum()
    assert 0 < top_p.num_dropped < 40
