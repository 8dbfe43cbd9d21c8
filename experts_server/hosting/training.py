"""How an expert is trained: gradients come in by client, and become updates.

The number of updates is a matter of what clients send, and never of when. There are three ways:

- `on_step`: a client's gradients gather until its step, which applies them; until its `zero_grad` they stay, as
  `.grad` does in torch. The number of updates is the number of steps of clients that gave any.
- `on_samples`: a client's gradients gather until they are of `samples_per_update` rows or more, and are applied by the
  backward that completes them. A backward is never cut in two, and nothing is carried over. Step and `zero_grad` change
  nothing. What one client gives never completes what another one gave: then updates would depend on who came first.
- `on_backward`: each backward is an update.

Gradients are summed, not averaged, as torch does. A client that stays away for `max_age_s` loses what it has gathered.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from experts_server.budget import Budget
from experts_server.configuration.config import UpdateMode
from experts_server.hosting.calls import Expected
from experts_server.hosting.checks import check_finite, check_frozen, check_late_hooks
from experts_server.hosting.gathered import Gathered, GatheredGradients
from experts_server.hosting.gradients import (
    Gradients,
    added,
    clipped_to_norm,
    clipped_to_value,
    laid_out_like,
)
from moe_autograd.errors import ExpertFailedError, GradientsLostError
from moe_autograd.wire.status import told

logger = logging.getLogger(__name__)

Settings = tuple[list[dict[str, Any]], dict[str, Any]]  # of the optimizer's groups, and of the schedule


@dataclass(frozen=True)
class Training:
    """How an expert is trained.

    Made with the optimizer, and used by every server that hosts the expert after: `built_with` is what was set then.

    Args:
        optimizer: made of the expert's parameters.
        update: when it steps; see above.
        samples_per_update: of `on_samples`.
        schedule: stepped once for each update.
        clip_grad_value: the largest value of an update's gradients, either sign; `None`: any. Comes before the norm.
        clip_grad_norm: the largest total norm of an update's gradients; `None`: any.
    """

    optimizer: torch.optim.Optimizer
    update: UpdateMode = "on_step"
    samples_per_update: int = 1
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    clip_grad_value: float | None = None
    clip_grad_norm: float | None = None
    built_with: Settings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "built_with", self.settings())

    def settings(self) -> Settings:
        """Return a copy of what is set in the optimizer's groups, and of the schedule's state (empty without one)."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return copy.deepcopy((groups, {} if self.schedule is None else self.schedule.state_dict()))

    def weights_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return those that get gradients: also frozen ones that the optimizer has, as they may thaw."""
        untrained = set(self.untrained_of(module).values())
        return [parameter for parameter in module.parameters() if parameter not in untrained]

    def untrained_of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the frozen ones that no optimizer has, by name."""
        own = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        return {key: p for key, p in module.named_parameters() if not (p.requires_grad or p in own)}


class Trainer:
    """Takes in the gradients of one expert's parameters and updates them.

    Args:
        name: the expert's, for errors.
        parameters: in the order of the gradients that come.
        training: how.
        budget: the bytes that gathered gradients of all experts share.
        max_age_s: how long gradients wait for their client.
        after_update: called after each update, also one that failed half way: the weights are no longer what they were.
        untrained: weights that are to stay frozen, by name.

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
        untrained: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.training = training
        self.gathered = GatheredGradients(budget, max_age_s)
        self.num_updates = 0
        self._after_update = after_update
        self._untrained = untrained or {}
        self.schedule_end: str | None = None  # what the schedule raised

    def __repr__(self) -> str:
        gathering = f"{len(self.gathered)} gathering"
        return f"<Trainer of {self.name!r} {self.training.update}, {self.num_updates} updates, {gathering}>"

    def take_in(self, client_id: bytes, new: Gradients, num_samples: int, sequence: int) -> None:
        """Take in the gradients of one backward.

        Args:
            client_id: who gave them.
            new: one for each parameter.
            num_samples: the rows that they are of.
            sequence: the client's number for it.

        Raises:
            InvalidCallError: they, or their sum with those before, are not finite, or there will never be room for
                them. Nothing was changed.
            ServerBusyError: there is no room for more of them. Nothing was changed.
            ExpertFailedError: a weight that no optimizer has was thawed. Nothing was changed.
        """
        check_frozen(self.name, self._untrained)
        if self.training.update == "on_backward":
            check_finite(self.name, new, "weight gradient")
            self._update(new)
            return
        before = self.gathered.get(client_id) or Gathered((), 0, 0)
        total = added(before.grads, new)
        check_finite(self.name, total, "gathered weight gradient")
        gathered = before.joined_by(total, num_samples, sequence)
        if self.training.update == "on_samples" and gathered.num_samples >= self.training.samples_per_update:
            self._update(total)
            self.gathered.forget(client_id)
        else:
            self.gathered.put(client_id, gathered)

    def zero_grad(self, client_id: bytes) -> None:
        """Let go of what the client has gathered for its step."""
        if self.training.update == "on_step":
            self.gathered.forget(client_id)

    def step(self, client_id: bytes, expected: Expected | None) -> None:
        """Apply what the client has gathered for its step; without anything given this is no update.

        Args:
            client_id: whose gradients.
            expected: see `UpdateCall.gathered`.

        Raises:
            GradientsLostError: they are no longer all there. Nothing was changed.
        """
        if self.training.update != "on_step":
            # Of backwards that a server with another `update` took.
            if expected is not None and expected.at_least:
                raise GradientsLostError(
                    f"expert {self.name!r}: expected the gradients of {expected.at_least} backwards, got none. The "
                    f"server was restarted since, with update = {self.training.update!r}; nothing was changed. Call "
                    "zero_grad and repeat forward and backward."
                )
            return
        if self.gathered.pop_lost(client_id):
            raise GradientsLostError(
                f"expert {self.name!r}: expected a step soon after the backward, got one when its gradients had "
                f"been let go (after {self.gathered.max_age_s:g} s, or as others had no room). Call zero_grad and "
                "repeat forward and backward."
            )
        gathered = self.gathered.get(client_id)
        if expected is not None and not (gathered or Gathered((), 0, 0)).may_be_of(expected):
            found = 0 if gathered is None else gathered.num_backwards
            got = f"{found}, others among them" if found >= expected.at_least else f"{found}"
            raise GradientsLostError(
                f"expert {self.name!r}: expected the gradients of {expected.at_least} backwards, got those of {got}. "
                "Most likely the server was restarted since; nothing was changed. Call zero_grad and repeat "
                "forward and backward."
            )
        if gathered is not None:
            self._update(gathered.grads)
            self.gathered.note_applied(client_id)

    def _update(self, grads: Gradients) -> None:
        """Apply one update; a parameter without a gradient is skipped, as in torch."""
        if all(grad is None for grad in grads):
            return
        check_late_hooks(self.name, self.parameters)
        if self.schedule_end is not None:
            raise ExpertFailedError(
                f"expert {self.name!r}: expected a schedule that goes on, got one that ended with update "
                f"{self.num_updates} ({self.schedule_end}). Nothing was changed. Configure a longer one."
            )
        if self.training.clip_grad_value is not None:
            grads = clipped_to_value(grads, self.training.clip_grad_value)
        if self.training.clip_grad_norm is not None:
            grads = clipped_to_norm(grads, self.training.clip_grad_norm)
        try:
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = laid_out_like(parameter, grad)
            self.training.optimizer.step()
        except Exception as error:
            raise ExpertFailedError(
                f"expert {self.name!r}: expected its optimizer to step, got {told(error)}. Some of "
                "the weights may have been changed: set them, or restart from a checkpoint."
            ) from error
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            torch.autograd.graph.increment_version(self.parameters)  # fused steps leave it
            self._after_update()
        self.num_updates += 1
        self.step_schedule()

    def step_schedule(self) -> None:
        """Go on to the next rate. Where there is none, this update has counted all the same; the next is refused."""
        schedule = self.training.schedule
        if schedule is None:
            return
        place = getattr(schedule, "last_epoch", None)  # which a `ChainedScheduler` leaves to its parts
        try:
            schedule.step()
        except Exception as error:  # `OneCycleLR` raises after `total_steps`
            if place is not None:  # this step is to come yet: after a restart a longer one may make it
                schedule.last_epoch = place
            self.schedule_end = told(error)
            logger.error("expert %r: its schedule has ended: %s", self.name, error)
