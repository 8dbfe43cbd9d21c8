"""A mode that counts operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperators(TorchDispatchMode):
    """Counts the operators that run inside, by name."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter() if counts is None else counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **kwargs or {})
