"""What others keep in a checkpoint_dir is theirs, whatever it is called."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.checkpointing import BEGUN_AND_STOPPED, served


def test_files_and_folders_of_users_stay_though_they_are_named_as_interrupted_saves_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = ["writing-2024-paper", "removing-2-gpus", "writing-20240131", "writing-1"]
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("mine")
    (tmp_path / "writing-1.md").write_text("mine")
    with caplog.at_level(logging.INFO), served(tmp_path):
        pass
    names = [*BEGUN_AND_STOPPED, "lock", "writing-1.md", *folders]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert [*map(Path.read_text, tmp_path.glob("*/a"))] == ["mine"] * len(folders)
    assert "removing " not in caplog.text


def test_the_log_says_which_leftovers_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leftover = tmp_path / "writing-00000001"
    leftover.mkdir()
    with caplog.at_level(logging.INFO), served(tmp_path):
        pass
    assert f"removing {leftover}, which an interrupted save or removal has left" in caplog.text
