"""Which numbered changes of which client an expert has applied, so that each counts once.

Rules, from which exactly-once follows:

1. What changes an expert carries (client id, sequence number). It is written down here in the same turn in which
   it is applied, and turns of one expert never overlap: either both have happened or neither.
2. A pair that is written down is answered from here and not applied again.
3. A number below the client's `settled_below` is refused: the client has the answer already, or has given up, so
   this is a copy that went astray. Hence such numbers can be forgotten. Of a client that never settles anything the
   last `MAX_UNSETTLED` are remembered, and lower ones are refused likewise.
4. A checkpoint of the expert holds its ledger, taken in a turn like any other: weights and ledger are of one
   moment.

An answer's tensors are kept within a budget; where there was no room, the pair is known and the answer is
computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from experts_server.budget import Budget
from moe_autograd.errors import InvalidCallError

MAX_CLIENT_ID_BYTES = 256  # ours have 16; each is remembered, for thousands of clients
MAX_UNSETTLED = 1 << 16  # many times what a client can have under way

REPLY_BYTES = 1024  # what a kept answer weighs in Python beside the elements of its tensors

Reply = tuple[Tensor | None, ...]


@dataclass(slots=True)
class Entry:
    """One applied change.

    Args:
        num_updates: of the expert, just after it.
        wants_no_step: of a backward: whether its gradients were applied without a step.
        reply: `None` if there is none to give, or it was not kept.
        reply_bytes: what it weighs.
    """

    num_updates: int
    wants_no_step: bool = False
    reply: Reply | None = None
    reply_bytes: int = 0


@dataclass(slots=True)
class _Client:
    settled_below: int = 0
    applied: dict[int, Entry] = field(default_factory=dict)


class Ledger:
    """The applied changes of one expert.

    Args:
        max_clients: the least recently heard of is forgotten beyond these.
        reply_budget: the memory that kept answers of all experts share.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, max_clients: int, reply_budget: Budget) -> None:
        self.max_clients = max_clients
        self._reply_budget = reply_budget
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def find(self, client_id: bytes, sequence: int, settled_below: int) -> Entry | None:
        """Return what was written down for this pair, and forget what the client has settled.

        Raises:
            InvalidCallError: the pair itself is settled.
        """
        client = self._client(client_id)
        if settled_below > client.settled_below:
            self._settle(client, settled_below)
        if sequence < client.settled_below:
            raise InvalidCallError(
                f"sequence: expected at least {client.settled_below}, got {sequence}. "
                "The client has settled it before; this is a late copy and changes nothing."
            )
        return client.applied.get(sequence)

    def record(
        self,
        client_id: bytes,
        sequence: int,
        num_updates: int,
        reply: Reply | None = None,
        *,
        wants_no_step: bool = False,
    ) -> None:
        """Write down that a change has been applied, and its answer."""
        entry = Entry(num_updates, wants_no_step)
        num_bytes = REPLY_BYTES + sum(grad.nbytes for grad in reply or () if grad is not None)
        if reply is not None and self._reply_budget.try_take(num_bytes):
            entry.reply, entry.reply_bytes = reply, num_bytes
        client = self._client(client_id)
        client.applied[sequence] = entry
        if len(client.applied) > MAX_UNSETTLED:
            self._settle(client, sorted(client.applied)[MAX_UNSETTLED // 2])

    def to_plain(self) -> list[dict[str, Any]]:
        """Return what a checkpoint holds of it."""
        return [
            {
                "client": client_id.hex(),
                "settled_below": client.settled_below,
                "applied": {
                    str(sequence): [entry.num_updates, entry.wants_no_step]
                    for sequence, entry in client.applied.items()
                },
            }
            for client_id, client in self._clients.items()
        ]

    def load_plain(self, plain: list[dict[str, Any]]) -> None:
        """Become what `to_plain` returned, for one that is empty yet; answers are not part of it."""
        for item in plain:
            applied = {int(sequence): Entry(*told) for sequence, told in item["applied"].items()}
            self._clients[bytes.fromhex(item["client"])] = _Client(int(item["settled_below"]), applied)

    def _client(self, client_id: bytes) -> _Client:
        client = self._clients.get(client_id)
        if client is None:
            if len(client_id) > MAX_CLIENT_ID_BYTES:
                raise InvalidCallError(
                    f"client_id: expected at most {MAX_CLIENT_ID_BYTES} bytes, got {len(client_id)}. "
                    "Choose a shorter one."
                )
            client = self._clients[client_id] = _Client()
            while len(self._clients) > self.max_clients:  # a checkpoint may hold more
                _, forgotten = self._clients.popitem(last=False)
                self._settle(forgotten, 1 << 64)
        self._clients.move_to_end(client_id)
        return client

    def _settle(self, client: _Client, below: int) -> None:
        client.settled_below = below
        for sequence in [number for number in client.applied if number < below]:
            self._reply_budget.give_back(client.applied.pop(sequence).reply_bytes)
