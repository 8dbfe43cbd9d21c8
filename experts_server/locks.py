"""Folders that one server at a time may write to."""

from __future__ import annotations

from pathlib import Path

from moe_autograd.autograd.offload.folder_locks import FolderLock
from moe_autograd.errors import CheckpointError, ConfigError


def take_folder(key: str, folder: Path, name: str, error: type[ConfigError | CheckpointError]) -> FolderLock:
    """Make `folder` if it is not there, and lock the file called `name` in it.

    Args:
        key: of the configuration, for the error.
        folder: to write to.
        name: of the lock file.
        error: what is raised.

    Raises:
        error: the folder cannot be used, or another server uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder / name)
    except BlockingIOError as cause:
        raise error(
            f"{key} {str(folder)!r}: expected it to be free, got one that another server uses. "
            "Stop that one, or choose another folder."
        ) from cause
    except OSError as cause:
        raise error(
            f"{key} {str(folder)!r}: expected a folder to write to, got {cause.strerror!r}. "
            "Choose another, or correct its permissions."
        ) from cause
