"""Weight gradients that are computed after the answer: a backward in two parts, in two turns of the expert.

    backward ──▶ input gradients ──▶ answer leaves ─ ─ ─ ─ weight gradients ──▶ taken in, ledger's line
               first turn                    │  others' turns │            second turn
                                             └ `LaterGradients` holds what is left

The second turn comes after the turns that wait for a worker by then: of a layer whose calls have arrived, the first
parts of all experts come before the second part of any. (An offloaded expert would keep its memory
meanwhile; its second part comes at once.)

What an answered backward promises, then:

1. Its gradients are taken in before anything else happens to the expert: an update, a checkpoint and every other call
   wait for the second turn. They are taken in once, with the ledger's line, as without this.
2. If they cannot be (the module fails, they are not finite, there is no room), nothing has changed, and the client's
   next step raises `GradientsLostError` with the reason and changes nothing, until the client's `zero_grad`.
3. If the server is killed in between, they are lost like all that came after the last checkpoint, and the step says so.

There is a step to say it only with `update = "on_step"`; where a backward is an update itself, it is not split.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from experts_server.hosting.calls import BackwardCall
from experts_server.hosting.failing import FailureLog
from experts_server.hosting.gradients import Gradients, dense
from experts_server.hosting.ledger import Ledger, Reply
from experts_server.hosting.training import Trainer
from moe_autograd.errors import GradientsLostError
from moe_autograd.wire.status import told

MAX_REFUSED = 4096  # clients; a step of one that is forgotten fails for its count of backwards


@dataclass(frozen=True)
class Left:
    """What is left of a backward that has its answer."""

    call: BackwardCall
    num_rows: int
    answer: Reply
    compute: Callable[[], Gradients]
    hold: ExitStack  # keeps the expert in memory


class LaterGradients:
    """The second parts of one expert's backwards.

    Args:
        name: the expert's.
        trainer: takes the gradients in.
        ledger: writes down that it has.
        failures: of all experts of a server.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, name: str, trainer: Trainer, ledger: Ledger, failures: FailureLog) -> None:
        self.name = name
        self._trainer = trainer
        self._ledger = ledger
        self._left: list[Left] = []
        self._failures = failures
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # by client: why

    def __repr__(self) -> str:
        return f"<LaterGradients of {self.name!r}, {len(self._refused)} clients with refused gradients>"

    def leave(self, left: Left) -> None:
        """Leave the second part for `finish`, which comes before anything else."""
        self._left.append(left)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return not self._left

    def answer_to(self, call: BackwardCall) -> Reply | None:
        """Return the answer to a call whose copy beside it was the first, and is left here."""
        key = call.client_id, call.sequence
        return next(
            (one.answer for one in self._left if (one.call.client_id, one.call.sequence) == key), None
        )

    def finish(self) -> None:
        """Compute what was left and take it in, if anything was; what goes wrong waits for the client's step."""
        while self._left:
            self._finish(self._left.pop(0))

    def _finish(self, left: Left) -> None:
        call = left.call
        try:
            with left.hold:
                self._trainer.take_in(call.client_id, dense(left.compute()), left.num_rows, call.sequence)
                self._ledger.record(call.client_id, call.sequence, self._trainer.num_updates, left.answer)
        except BaseException as error:
            self._failures.warn(self.name, "gradients of an answered backward were refused", error)
            self._refused[call.client_id] = told(error)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def check(self, client_id: bytes) -> None:
        """Raise `GradientsLostError` at the step of a client whose gradients were refused after the answer."""
        reason = self._refused.get(client_id)
        if reason is not None:
            raise GradientsLostError(
                f"expert {self.name!r}: expected the gradients of every answered backward, got some that were refused "
                f"after the answer ({reason}). Nothing was changed. Call zero_grad and repeat forward and backward."
            )

    def forget(self, client_id: bytes) -> None:
        """Let the client begin anew, as it wished."""
        self._refused.pop(client_id, None)
