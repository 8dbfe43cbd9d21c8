"""The device that the tests in `tests/device` compute on: a GPU where there is one, else the CPU.

So tests that hold anywhere are kept alive by CI, which has no GPU; what only a GPU has asks for it (`needs_gpu`).
"""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")

LONG_CYCLES = 20_000_000  # of a GPU's clock: some 10 ms


def hold_up(cycles: int = LONG_CYCLES) -> None:
    """Keep the current stream from going on for a while; a missing order between streams shows in the numbers."""
    if HAS_GPU:
        torch.cuda._sleep(cycles)
