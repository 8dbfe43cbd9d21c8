"""How an expert is trained: gradients come in by client, and become updates.

The number of updates is a matter of what clients send, and never of when: what one client gives meets what another
gives in the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from experts_server.budget import Budget
from experts_server.checks import check_finite
from experts_server.gathered import GatheredGradients
from experts_server.gradients import Gradients, added, clipped
from moe_autograd.errors import GradientsLostError


@dataclass(frozen=True)
class Training:
    """How an expert is trained.

    Args:
        optimizer: made of the expert's parameters.
        update: `on_step`: gradients gather until the client's step; `on_backward`: each is applied at once.
        schedule: stepped once for each update.
        clip_grad_norm: the largest total norm of an update's gradients; `None`: any.
    """

    optimizer: torch.optim.Optimizer
    update: Literal["on_step", "on_backward"] = "on_step"
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    clip_grad_norm: float | None = None


class Trainer:
    """Takes in the gradients of one expert's parameters and updates them.

    Args:
        name: the expert's, for errors.
        parameters: in the order of the gradients that come.
        training: how.
        budget: the bytes that gathered gradients of all experts share.
        max_age_s: how long gradients wait for their client's step.
        after_update: called after each update, also one that failed half way: the weights are no longer what they were.

    Threads: one at a time, as the expert itself.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        training: Training,
        budget: Budget,
        *,
        max_age_s: float,
        after_update: Callable[[], None],
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.training = training
        self.gathered = GatheredGradients(budget, max_age_s)
        self.num_updates = 0
        self._after_update = after_update

    def __repr__(self) -> str:
        gathering = f"{len(self.gathered)} gathering"
        return f"<Trainer of {self.name!r} {self.training.update}, {self.num_updates} updates, {gathering}>"

    def take_in(self, client_id: bytes, new: Gradients) -> None:
        """Gather a backward's gradients, or apply them at once.

        Raises:
            InvalidCallError: they, or their sum with those before, are not finite. Nothing was changed.
            ServerBusyError: there is no room for more of them. Nothing was changed.
        """
        if self.training.update == "on_backward":
            check_finite(self.name, new, "weight gradient")
            self._update(new)
            return
        total = added(self.gathered.get(client_id), new)
        check_finite(self.name, total, "gathered weight gradient")
        self.gathered.put(client_id, total)

    def forget(self, client_id: bytes) -> None:
        """Let go of what the client gave since its last step."""
        self.gathered.forget(client_id)

    def step(self, client_id: bytes, num_backwards: tuple[int, int] | None) -> None:
        """Apply what the client gave; without anything given this is no update.

        Args:
            client_id: whose gradients.
            num_backwards: at least and at most so many must have given them; `None`: any number.

        Raises:
            GradientsLostError: they are no longer all there. Nothing was changed.
        """
        if self.gathered.has_lost(client_id):
            raise GradientsLostError(
                f"expert {self.name!r}: expected a step within {self.gathered.max_age_s:g} s of the backward, got one "
                "later, when its gradients had been let go. Repeat the backward."
            )
        least, most = num_backwards or (0, math.inf)
        found = self.gathered.num_backwards(client_id)
        if not least <= found <= most:
            raise GradientsLostError(
                f"expert {self.name!r}: expected the gradients of {least} backwards, got those of {found}. "
                "The server was restarted since; nothing was changed. Call zero_grad and repeat forward and backward."
            )
        gathered = self.gathered.get(client_id)
        if gathered is not None:
            self._update(gathered)

    def _update(self, grads: Gradients) -> None:
        """Apply one update; a parameter without a gradient is skipped, as in torch."""
        if all(grad is None for grad in grads):
            return
        if self.training.clip_grad_norm is not None:
            grads = clipped(grads, self.training.clip_grad_norm)
        try:
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = grad
            self.training.optimizer.step()
            if self.training.schedule is not None:
                self.training.schedule.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            self._after_update()
        self.num_updates += 1
