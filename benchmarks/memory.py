"""What this process has resident, by the kernel's count; Linux only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory


def resident_bytes(field: str) -> int:
    """Return `VmRSS`, what is resident now, or `VmHWM`, what was at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def peak_beyond_now(run: Callable[[], object]) -> int:
    """Return how many bytes `run` has resident at most, beyond what is resident now."""
    gc.collect()
    give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # sets `VmHWM` back
    before = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before
