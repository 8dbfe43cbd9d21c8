"""What the experts of several layers share: one limit, one store, one checkpoint of all.

The threads that read and write end, and the folder is free for others, when somebody closes it or when nobody has the
residency any more. So a layer may outlive the one that it was built beside, and a graph the layers that made it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd._waiting import wait
from moe_autograd.autograd.offload.checkpoints import link_files, newest_checkpoint, write_checkpoint
from moe_autograd.autograd.offload.checks import check_note
from moe_autograd.autograd.offload.folder_locks import FolderLock
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import FolderStore, RamStore, Store
from moe_autograd.errors import CheckpointError


class SharedResidency:
    """The residency of some layers' experts, and the folder they may be saved to.

    Args:
        limit_bytes: for all buffers together.
        store: "ram", a folder, or a `Store`.
        device: of the buffers.

    Raises:
        RuntimeError: other experts use the folder, in this process or another; or the system has no thread to give.

    Threads: any may call `close`; `checkpoint` and `restore` belong where no forward, backward or update runs. They
        wait for each other.
    """

    def __init__(self, limit_bytes: int, store: str | Path | Store, device: torch.device) -> None:
        self.held: list[HeldExpert] = []  # of all layers
        self._folder = Path(store).absolute() if isinstance(store, str | Path) and store != "ram" else None
        if self._folder is not None:
            path = self._folder / "resident-store"
            store = FolderStore(path, _locked(path))
        elif isinstance(store, str | Path):
            store = RamStore()
        try:
            self.residency = Residency(limit_bytes, store, device)
        except BaseException:  # whose traceback would keep the folder locked
            _unlock(store)
            raise
        # Of who saves or restores. Reentrant, as its own thread is not to wait, but to be told.
        self._one_at_a_time, self._is_in_use = threading.RLock(), False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "OffloadedExperts: expected to stay where they are, got copied or pickled. `checkpoint()` and "
            "`state_dict(index)` have the weights."
        )

    def close(self) -> None:
        """End the threads, and let others use the folder."""
        self.residency.close()
        _unlock(self.residency.store)

    def give_up(self, taken: Sequence[HeldExpert]) -> None:
        """Forget experts of a layer that was refused after all; the last ones that came."""
        for held in taken:
            self.held.remove(held)
            held.forget()

    def checkpoint(self, note: Any) -> Path:
        """Save all experts' weights and optimizers; see `OffloadedExperts.checkpoint`."""
        check_note(note)
        folder, store = self._need_folder()
        with self._alone():
            return self._checkpoint(folder, store, note)

    def _checkpoint(self, folder: Path, store: FolderStore, note: Any) -> Path:
        for held in self.held:
            held.settle()
            held.check_settled()
        for held in self.held:
            held.forget_cleared_state()
            held.make_room_for_state()
        self.residency.flush()
        names = [part.name for held in self.held for part in (held.weights, held.state) if part]
        manifest = {"note": note, "experts": [held.options() for held in self.held]}
        return write_checkpoint(folder, store, names, manifest)

    def restore(self) -> Any:
        """Go back to the newest checkpoint; return its note. See `OffloadedExperts.restore`."""
        folder, store = self._need_folder()
        if self.residency.holders.has_current:
            raise RuntimeError(
                "OffloadedExperts: expected restore() between calls, got one within an expert's call, backward "
                "or update. Set a flag there, and restore between steps."
            )
        with self._alone():
            return self._restore(folder, store)

    def _restore(self, folder: Path, store: FolderStore) -> Any:
        path, manifest = newest_checkpoint(folder)
        if len(manifest["experts"]) != len(self.held):
            raise CheckpointError(
                f"{path}: expected {len(self.held)} experts, got {len(manifest['experts'])}. "
                "Build as many as were saved."
            )
        for held, options in zip(self.held, manifest["experts"], strict=True):
            held.check_checkpoint(path, options)
        self.residency.forget_wishes()
        try:
            link_files(path, store)
            with uninterrupted():  # else some would be those of the checkpoint, and others not
                for held, options in zip(self.held, manifest["experts"], strict=True):
                    held.forget_others()
                    held.forget_gradients()
                    held.restore(path, options, store)
        finally:
            store.drop_links()
        for held, options in zip(self.held, manifest["experts"], strict=True):
            held.restore_contents(path, options)
        return manifest["note"]

    @unwindable
    def _alone(self) -> Iterator[None]:
        """Wait until no other thread saves or restores; inside, none does.

        Raises:
            RuntimeError: its own thread does so, as where the handler of a signal comes in the midst of it, or holds
                parts, for which another may wait that does so; or the experts are closed, or this process is a fork.
        """
        self.residency.check_is_open()  # else it would write into a folder that another may have
        with uninterrupted() as section:
            self._take_turn()
            try:
                self.residency.check_is_open()  # still
                with section.opened():
                    yield
            finally:
                self._is_in_use = False
                self._one_at_a_time.release()

    def _take_turn(self) -> None:
        if self.residency.holders.has_current:
            is_taken = self._one_at_a_time.acquire(blocking=False)
        else:
            is_taken = wait(lambda pause_s: self._one_at_a_time.acquire(timeout=pause_s))
        if is_taken and not self._is_in_use:
            self._is_in_use = True
            return
        if is_taken:  # its own thread has it
            self._one_at_a_time.release()
        raise RuntimeError(
            "OffloadedExperts: expected checkpoint() and restore() one after the other, got one in the midst of "
            "another, or of an expert's call while another thread is in one. Let a signal's handler set a flag, and "
            "look at that between steps."
        )

    def _need_folder(self) -> tuple[Path, FolderStore]:
        """Return the folder and its store, or complain that there is none."""
        if self._folder is None or not isinstance(self.residency.store, FolderStore):
            raise CheckpointError(
                f"OffloadedExperts: expected a folder as store, got {type(self.residency.store).__name__}. "
                "Pass store=FOLDER to save checkpoints."
            )
        return self._folder, self.residency.store


def _unlock(store: Store) -> None:
    """Let others use the folder of a store; nothing where it has none."""
    if isinstance(store, FolderStore) and store.lock is not None:
        store.lock.release()


def _locked(folder: Path) -> FolderLock:
    """Take the lock of the store at `folder`; a server's `OffloadMemory` takes the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FolderLock(folder.with_name(f"{folder.name}.lock"))
    except BlockingIOError as error:
        raise RuntimeError(
            f"{folder}: expected a folder that nobody uses, got one in use: two would read each other's weights. "
            "Close the other experts (close()), or choose another folder."
        ) from error
