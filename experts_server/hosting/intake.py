"""What calls do to an expert's training, each of them once: gradients that are taken in, steps, `zero_grad`.

Every such call has a line in the ledger. Who comes a second time, since its answer was lost on the way, gets the first
answer and changes nothing. The gradients of a backward and its line come together, or neither does.

An expert that is not trained has an intake as well: it takes in nothing, and knows nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from experts_server.hosting.calls import BackwardCall, UpdateCall
from experts_server.hosting.gradients import Gradients
from experts_server.hosting.later import LaterGradients, Left
from experts_server.hosting.ledger import Ledger, Reply
from experts_server.hosting.training import Trainer
from moe_autograd.errors import GradientsLostError


class Intake:
    """Takes in what one expert's calls give.

    Args:
        name: the expert's.
        trainer: `None`: the expert is not trained.
        ledger: of the calls that were applied.
        later: where backwards in two parts leave the second; `None`: they are in one.

    Threads: one at a time, as the expert itself.
    """

    def __init__(
        self, name: str, trainer: Trainer | None, ledger: Ledger, later: LaterGradients | None
    ) -> None:
        self._name, self._trainer, self._ledger, self._later = name, trainer, ledger, later

    def __repr__(self) -> str:
        return f"<Intake of {self._trainer or 'an expert that is not trained'}>"

    @property
    def num_updates(self) -> int:
        """How many updates the expert has had."""
        return 0 if self._trainer is None else self._trainer.num_updates

    def trained_by(self, calls: Sequence[BackwardCall]) -> Sequence[nn.Parameter]:
        """Return the parameters, if one of these calls gives them gradients; else none."""
        if self._trainer is not None and any(self.wants(call) for call in calls):
            return self._trainer.parameters
        return ()

    def wants(self, call: BackwardCall) -> bool:
        """Whether the gradients of the weights are wanted, and have not been taken in before."""
        if not call.wants_weight_grads or self._trainer is None:
            return False
        return self._ledger.find(call.client_id, call.sequence, call.settled_below) is None

    def known_answer(self, call: BackwardCall) -> Reply | None:
        """Return the answer to a call that has been applied before, if it was kept, and say whether it wants a step."""
        if not call.wants_weight_grads or self._trainer is None:
            return None
        applied = self._ledger.find(call.client_id, call.sequence, call.settled_below)
        if applied is not None:
            call.wants_no_step = applied.wants_no_step
            return applied.reply
        return None if self._later is None else self._later.answer_to(call)

    def take_in(self, call: BackwardCall, grads: Gradients, num_rows: int, answer: Reply) -> None:
        """Take in the gradients of a backward if they are wanted, together with the ledger's line."""
        if self._trainer is not None and self.wants(call):
            self._trainer.take_in(call.client_id, grads, num_rows, call.sequence)
            call.wants_no_step = self._trainer.training.update != "on_step"
            self._ledger.record(
                call.client_id, call.sequence, self.num_updates, answer, wants_no_step=call.wants_no_step
            )

    @property
    def is_in_parts(self) -> bool:
        """Whether backwards may leave their second part."""
        return self._later is not None

    def leave(self, left: Left) -> None:
        """Leave the second part of a backward for `finish`, which comes before anything else."""
        assert self._later is not None
        self._later.leave(left)

    @property
    def has_left(self) -> bool:
        """Whether a backward has its answer, and `finish` is to come."""
        return self._later is not None and not self._later.is_empty

    def finish(self) -> None:
        """Take in what was left."""
        if self._later is not None:
            self._later.finish()

    def update(self, call: UpdateCall) -> int:
        """Step, or forget gathered gradients; return the number of updates after it."""
        applied = self._ledger.find(call.client_id, call.sequence, call.settled_below)
        if applied is not None:
            return applied.num_updates
        if self._trainer is not None:
            if call.kind == "zero_grad":
                self._trainer.zero_grad(call.client_id)
                if self._later is not None:
                    self._later.forget(call.client_id)
            else:
                if self._later is not None:
                    self._later.check(call.client_id)
                self._trainer.step(call.client_id, call.gathered)
        elif call.kind == "step" and call.gathered is not None and call.gathered.at_least:
            raise GradientsLostError(
                f"expert {self._name!r}: expected the gradients of {call.gathered.at_least} backwards, got an expert "
                "that is not trained. The server was restarted since, without an optimizer for it; nothing was changed."
            )
        self._ledger.record(call.client_id, call.sequence, self.num_updates)
        return self.num_updates
