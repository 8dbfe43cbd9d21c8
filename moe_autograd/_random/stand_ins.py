"""Who answers for the generators of the process and of devices while maps run (Rule 3 of `_random`)."""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import torch
import torch.random

from moe_autograd._random.seeds import CPU, PROCESS_GENERATOR, current_generator, running

_ACCELERATOR = torch.accelerator.current_accelerator()  # what torch was built for

lending = threading.RLock()  # held while a device's generator has the state of a call's (see `fused`)


class _StandIn:
    """Takes the place of a device's own generator, the process's, while maps run."""

    def __init__(self, device: torch.device, own: torch.Generator) -> None:
        self._device = device
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(current_generator(self._device) or self._own, name)

    def get_state(self) -> torch.Tensor:
        if running.seeds is None:
            with lending:
                return self._own.get_state()
        return running.seeds.generator(running.index, self._device).get_state()

    def set_state(self, state: torch.Tensor) -> None:
        if running.seeds is None:
            with lending:
                self._own.set_state(state)
        else:
            running.seeds.set_state(running.index, self._device, state)

    def manual_seed(self, seed: int) -> torch.Generator:
        if running.seeds is None:
            with lending:
                return self._own.manual_seed(seed)
        return running.seeds.manual_seed(running.index, self._device, seed)


class StandIns:
    """Puts the stand-ins in place for the first thread that runs calls, and back for the last one to end.

    Ctrl-C, another thread or a fork may come after any call in here, and only there. So to begin or to end once more
    changes nothing, and what belongs together is done without a call. There is no lock: who forks may hold it himself.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._are_in_place = False
        self._accelerator: Any = None  # whose generators are away, if any
        self._away: tuple[torch.Generator, ...] = ()

    def begin(self) -> None:
        """Call it on a thread that is about to run calls."""
        self._threads.add(threading.get_ident())
        if not self._are_in_place:
            self._stand_in()

    def end(self) -> None:
        """Call it on the same thread after them."""
        self._threads.discard(threading.get_ident())
        self._step_back()

    def after_fork_in_child(self) -> None:
        """No other thread runs calls here."""
        self._threads &= {threading.get_ident()}
        self._step_back()

    def _stand_in(self) -> None:
        kind, accelerator = _accelerator_in_use() or ("", None)
        away = () if accelerator is None else accelerator.default_generators
        in_place = tuple([_StandIn(torch.device(kind, index), own) for index, own in enumerate(away)])
        if not self._are_in_place:  # else another thread was faster
            torch.random.default_generator = _STAND_IN
            if accelerator is not None:
                accelerator.default_generators = in_place
                self._accelerator, self._away = accelerator, away
            self._are_in_place = True

    def _step_back(self) -> None:
        if not self._threads:
            torch.random.default_generator = PROCESS_GENERATOR
            if self._accelerator is not None:
                self._accelerator.default_generators = self._away
                self._accelerator, self._away = None, ()
            self._are_in_place = False


def generator_of(device: torch.device) -> torch.Generator:
    """Return an accelerator's own generator, though a stand-in may be in its place."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: Any = torch.get_device_module(device.type).default_generators[index]
    own: torch.Generator = found._own if isinstance(found, _StandIn) else found
    return own


def _accelerator_in_use() -> tuple[str, Any] | None:
    """Return the kind and the module of the accelerator, if it has generators and was used."""
    if _ACCELERATOR is None:
        return None
    module = torch.get_device_module(_ACCELERATOR.type)
    has_generators = getattr(module, "default_generators", ()) and module.is_initialized()
    return (_ACCELERATOR.type, module) if has_generators else None


_STAND_IN = cast(torch.Generator, _StandIn(CPU, PROCESS_GENERATOR))
stand_ins = StandIns()

if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds it would never get it; who forks may have it.
    os.register_at_fork(
        before=lending.acquire, after_in_parent=lending.release, after_in_child=lending.release
    )
    os.register_at_fork(after_in_child=stand_ins.after_fork_in_child)
