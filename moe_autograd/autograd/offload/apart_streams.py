"""Streams of a GPU that nothing else is queued on: for memory of their own, and for copies beside the kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def stream_apart(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream; `None`, if the device is no GPU.

    It is of high priority: torch hands out the same few streams again and again, and those of low priority to maps.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Use it inside; nothing for `None`, where `torch.cuda.stream` would look for a GPU and begin to use it."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
