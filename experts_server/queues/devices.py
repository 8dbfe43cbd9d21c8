"""What a turn does with its thread's devices stays in it.

Its backwards stay on the thread. The engine has one thread of its own for each device, and a client in this process
that differentiates there waits on it for our answer. It knows nothing of the turn's random numbers, either.

And what a module leaves current, a device or streams, is put back: the next turns of this thread are other experts'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from moe_autograd._contexts import contextmanager
from moe_autograd._streams import Accelerator, accelerator_in_use, put_back

_NOTHING = contextlib.nullcontext()


def devices_contained() -> contextlib.AbstractContextManager[None]:
    """Return what each turn is in; where no accelerator is in use, that is nothing."""
    accelerator = accelerator_in_use()
    return _NOTHING if accelerator is None else _contained(accelerator)


@contextmanager
def _contained(accelerator: Accelerator) -> Iterator[None]:
    with put_back(accelerator, accelerator.devices()), torch.autograd.set_multithreading_enabled(False):
        yield
