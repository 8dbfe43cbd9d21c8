"""Experts that are in memory only while they have a turn: weights, buffers and optimizer state come and go.

    turn of ffn.3      waits for room, reads what is absent, computes, lets go
    between turns      what was changed is written behind; the least recently used leave when others want room
    a hint, or a call that queues up for ffn.3      starts to read it (`prefetch`)

What stays: inputs of forwards that wait for their backward (offloaded experts recompute), gradients that gather, the
ledger. They have limits of their own.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from experts_server.locks import take_folder
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.folder_locks import FolderLock
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import FolderStore, RamStore, Store
from moe_autograd.errors import ConfigError

STORE = "resident-store"


class OffloadMemory:
    """The memory that a server's offloaded experts share.

    Args:
        max_resident_bytes: of weights, buffers and optimizer state in memory.
        store: "ram", or the folder where the rest is.

    Raises:
        ConfigError: the folder cannot be used, or another server uses it.
        RuntimeError: the system has no thread to give.

    Threads: any.
    """

    def __init__(self, max_resident_bytes: int, store: str | Path) -> None:
        self._lock: FolderLock | None = None
        kept: Store = RamStore()
        if store != "ram":  # what is written there is the experts: another server's must not come over it
            folder = Path(store).absolute()
            self._lock = take_folder("offload.store", folder, f"{STORE}.lock", ConfigError)
            kept = FolderStore(folder / STORE, self._lock)
        try:
            self.residency = Residency(max_resident_bytes, kept, torch.device("cpu"))
        except BaseException:  # whose traceback would keep the folder locked
            self._unlock()
            raise
        self._layouts: dict[object, Layout] = {}  # of the tensors of optimizers, by what these depend on

    def __repr__(self) -> str:
        return f"<OffloadMemory {self.residency!r}>"

    def layout_of(self, optimizer: torch.optim.Optimizer) -> Layout:
        """Return how the tensors will lie that an optimizer makes in its first step; nothing of it changes."""
        shapes = [(p.shape, p.dtype) for group in optimizer.param_groups for p in group["params"]]
        key = type(optimizer), str(optimizer), str(shapes)
        if key not in self._layouts:
            self._layouts[key] = Layout.of(_tensors_after_a_step(copy.deepcopy(optimizer)))
        return self._layouts[key]

    def close(self) -> None:
        """End the threads that read and write, and release the folder."""
        self.residency.close()
        self._unlock()

    def _unlock(self) -> None:
        """Let others use the folder; nothing where there is none."""
        if self._lock is not None:
            self._lock.release()


class Lodger:
    """One expert whose tensors live in an `OffloadMemory`.

    Args:
        name: the expert's.
        module: taken over; it reads as NaN between turns.
        optimizer: of its parameters; `None`: it is not trained.
        memory: where.

    Raises:
        ConfigError: there will never be room for it, or it is not on the CPU.
    """

    def __init__(
        self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None, memory: OffloadMemory
    ) -> None:
        devices = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]} - {"cpu"}
        if devices:
            raise ConfigError(
                f"expert {name!r}, key 'memory.offload': expected an expert on the CPU, got one on {devices}. "
                "Set offload = false."
            )
        make_optimizer = None if optimizer is None else lambda _: optimizer
        state = []
        if type(optimizer).__module__.startswith("torch."):  # others may want more than gradients to step
            assert optimizer is not None
            state.append(Part(f"{name}.optimizer", memory.layout_of(optimizer)))
        self._memory = memory
        try:
            self._held = HeldExpert(name, module, make_optimizer, memory.residency)
            memory.residency.check_fits([*self._held.parts_to_update(), *state])
        except ValueError as error:
            raise ConfigError(f"expert {name!r}, key 'offload.max_resident_bytes': {error}") from error

    def __repr__(self) -> str:
        return f"<Lodger {self._held.name!r} in {self._memory!r}>"

    def in_memory(self, *, for_update: bool) -> AbstractContextManager[None]:
        """Be in memory inside; with `for_update` so is the optimizer's state.

        Raises:
            OSError: the store failed.
        """
        return self._held.in_memory(for_update=for_update)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in its weights' memory; to be asked while it is in memory."""
        return self._held.is_borrowed(tensor)

    def prefetch(self) -> None:
        """Start to read it, if there is room; returns at once."""
        self._memory.residency.prefetch([self._held.weights])


def _tensors_after_a_step(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        f"{key}.{index}": value
        for index, parameter in enumerate(parameters)
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
