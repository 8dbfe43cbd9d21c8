"""Whether a call is made as the plain loop that it means, and an expert that is small enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_autograd.autograd import in_turn


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def is_made_in_turn(module: Callable[..., Any], x: Any = None, *more: Any, **kwargs: Any) -> bool:
    """Whether it is beside another such call; a single one, which no thread makes faster, is whatever its size."""
    x = torch.randn(3, 4, requires_grad=True) if x is None else x
    return in_turn.call_in_turn([module] * 2, [(x, *more)] * 2, [kwargs] * 2) is not None
