"""What gradients that are added call by call have to pass, for modules and for functions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_autograd.autograd.joining import accumulating
from tests.support.comparison import loss_of

WAYS_TO_ASK = ["grad", "inputs", "graph"]


def ask_for_some(way: str, loss: Tensor, weights: Sequence[Tensor], xs: Sequence[Tensor]) -> Any:
    """Go backward for a part of the gradients, or for all of them with a graph; return what there is then."""
    found: Any = ()
    if way == "grad":
        found = torch.autograd.grad(loss, [weights[0], weights[3], xs[1]])
    elif way == "inputs":
        loss.backward(inputs=[weights[2], xs[0]])
    else:
        loss.backward(create_graph=True)
        found = torch.autograd.grad(loss_of([weight.grad for weight in weights]), list(xs))
    return found, [weight.grad for weight in weights], [x.grad for x in xs]


class InterruptedBackward:
    """Ctrl-C comes to the calling thread in its call's backward, while a worker is in the other one.

    The worker's call ends, and would add its gradients, only when the backward has raised. For a process of its own.
    """

    def __init__(self) -> None:
        self._both, self._raised, self._added = threading.Barrier(2), threading.Event(), threading.Event()

    def look(self) -> None:
        """Is called in the backward of each of two calls."""
        self._both.wait(60)
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        self._raised.wait(60)

    def run(self, outputs: Sequence[Tensor]) -> bool:
        """Go backward; return whether the worker's call came to where gradients are added."""
        try_add = accumulating.Adder.try_add

        def note(adder: accumulating.Adder, grad: Tensor) -> bool:
            result = try_add(adder, grad)
            self._added.set()
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accumulating, "LEAST_ADDED", 1)
            patch.setattr(accumulating.Adder, "try_add", note)
            with pytest.raises(KeyboardInterrupt):
                torch.stack(list(outputs)).sum().backward()
            self._raised.set()
            return self._added.wait(60)
