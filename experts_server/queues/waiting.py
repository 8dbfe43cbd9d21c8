"""The calls that wait for one expert: who is next, and which calls go with it (rules 2 to 4 of `batching`).

        epochs     the first is next; an `InspectCall` begins one, so nothing passes it by
        clients    in each epoch; the first is next, and goes behind the others when it has given a call
        calls      of each client, in the order they came

Threads: no lock here. Whoever calls a method holds the queue's.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from experts_server.hosting.calls import Call, InspectCall

_Epoch = OrderedDict[bytes, deque[Call]]


class Taken(NamedTuple):
    """What leaves the queue.

    Args:
        batch: the calls to be computed together; empty: none waited.
        late: those before them that nobody waits for any more.
    """

    batch: list[Call]
    late: list[Call]


class WaitingCalls:
    """Calls of several clients for one expert.

    Args:
        join_key: what is equal for calls that may be computed as one; of a call by itself `None`.
        max_batch_tokens: of calls computed as one.

    Attributes:
        num_calls: how many wait.
        num_tokens: how many rows these have.
    """

    def __init__(self, join_key: Callable[[Call], object], max_batch_tokens: int) -> None:
        self._join_key = join_key
        self._max_batch_tokens = max_batch_tokens
        self._epochs: deque[_Epoch] = deque([OrderedDict()])
        self.num_calls = 0
        self.num_tokens = 0

    def add(self, call: Call) -> None:
        """Let a call wait behind the others of its client."""
        if isinstance(call, InspectCall):
            self._epochs.append(OrderedDict())
        epoch = self._epochs[-1]
        queue = epoch.get(call.client_id)
        if queue is None:
            queue = epoch[call.client_id] = deque()
        queue.append(call)
        self.num_calls += 1
        self.num_tokens += call.num_tokens

    def take(self) -> Taken:
        """Take the next call, and those that can be joined with it.

        Who gave a call goes behind all others; who had none that fits keeps his place, and is first soon.
        """
        taken = Taken([], [])
        while self.num_calls and not taken.batch:
            while not self._epochs[0]:
                self._epochs.popleft()
            epoch = self._epochs[0]
            client_id = next(iter(epoch))
            call = self._next_of(epoch, client_id, taken.late)
            if call is not None:
                self._remove_first(epoch, client_id)
                taken.batch.append(call)
        if taken.batch and self.num_calls and (key := self._join_key(taken.batch[0])) is not None:
            self._join(self._epochs[0], taken, key)
        return taken

    def take_late(self) -> list[Call]:
        """Take all calls that nobody waits for any more."""
        late: list[Call] = []
        for epoch in self._epochs:
            for client_id, queue in list(epoch.items()):
                alive: deque[Call] = deque()
                for call in queue:
                    (late if is_in_vain(call) else alive).append(call)
                epoch[client_id] = alive
                if not alive:
                    del epoch[client_id]
        self.num_calls -= len(late)
        self.num_tokens -= sum([call.num_tokens for call in late])
        self._epochs = deque([epoch for epoch in self._epochs if epoch] or [OrderedDict()])
        return late

    def take_all(self) -> list[Call]:
        """Take all calls, in no order."""
        calls = [call for epoch in self._epochs for queue in epoch.values() for call in queue]
        self._epochs = deque([OrderedDict()])
        self.num_calls = self.num_tokens = 0
        return calls

    def _join(self, epoch: _Epoch, taken: Taken, key: object) -> None:
        """Add to the batch what has the same key and fits, one call of each client a round."""
        room = self._max_batch_tokens - taken.batch[0].num_tokens
        clients = list(epoch)
        while clients and room > 0:
            givers = []
            for client_id in clients:
                call = self._next_of(epoch, client_id, taken.late)
                if call is None or call.num_tokens > room or self._join_key(call) != key:
                    continue
                self._remove_first(epoch, client_id)
                taken.batch.append(call)
                room -= call.num_tokens
                if client_id in epoch:
                    givers.append(client_id)
            clients = givers

    def _next_of(self, epoch: _Epoch, client_id: bytes, late: list[Call]) -> Call | None:
        """Return the client's first call that is not in vain; those before it become `late`."""
        while client_id in epoch:
            call = epoch[client_id][0]
            if not is_in_vain(call):
                return call
            self._remove_first(epoch, client_id, keeps_place=True)
            late.append(call)
        return None

    def _remove_first(self, epoch: _Epoch, client_id: bytes, *, keeps_place: bool = False) -> None:
        """Take out the client's first call; the turn goes to the next client."""
        queue = epoch[client_id]
        self.num_tokens -= queue.popleft().num_tokens
        self.num_calls -= 1
        if not queue:
            del epoch[client_id]
        elif not keeps_place:
            epoch.move_to_end(client_id)


def is_in_vain(call: Call) -> bool:
    """Whether nobody waits for the call any more."""
    return call.is_cancelled or (call.deadline is not None and time.monotonic() >= call.deadline)
