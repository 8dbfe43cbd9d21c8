"""Forwards that wait for their backward: their inputs and, while it is still true, their graph.

What may happen to a kept forward, and what its backward then does:

1. *Nothing*: the backward uses the graph.
2. *Its graph goes*, because the expert's weights were updated since, or there never was one, because the forward was
   joined with another client's or its expert recomputes: the backward computes the forward again from the kept inputs.
3. *All of it goes*, oldest first when the memory budget is full, or after the time limit: the server answers
   INPUTS_NEEDED and the client sends the inputs again; then as in 2.

What is counted is what is held: the graph, and inputs, which are at least half of the memory that they keep alive.
Small ones weigh little beside autograd's own records of them (`RECORD_BYTES`, `SAVED_BYTES`).

One store is shared by all experts of a server, and each sees its own part of it. Threads: any; one lock, held for no
computation.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experts_server.hosting.calls import num_rows

# Measured beside the elements of tensors, as growth of the process for 20,000 kept forwards of 3 rows: 5.5 kB for a
# linear layer, whose graph saves two tensors, and 9.4 kB for two layers and a GELU, which save five.
RECORD_BYTES = 2048
SAVED_BYTES = 1536  # for each tensor that the graph saves

FIRST_LOOK_AT = 16  # graphs of an expert, for those that have gone; then at twice as many as are left

Key = tuple[str, bytes, int]  # expert, client, the client's name for the forward


@dataclass(slots=True)
class KeptForward:
    """One forward. `outputs` holds the graph; `None` once that has gone."""

    inputs: tuple[Tensor, ...]  # leaves
    outputs: tuple[Tensor, ...] | None
    output_shapes: tuple[torch.Size, ...] | None  # `None`: not known yet
    evaluate: bool
    random_seed: int  # 0: nobody gave it one, and it drew nothing here
    input_bytes: int = 0
    graph_bytes: int = 0
    kept_at: float = 0.0

    @property
    def num_rows(self) -> int:
        """How many its first input has."""
        return num_rows(self.inputs[0])

    @property
    def num_bytes(self) -> int:
        """How much of the budget it takes."""
        return RECORD_BYTES + self.input_bytes + (self.graph_bytes if self.outputs is not None else 0)


class KeptForwards:
    """The store.

    Args:
        max_bytes: of inputs and graphs together.
        max_age_s: how long a forward waits for its backward.
        clock: seconds that only grow.
    """

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, KeptForward] = OrderedDict()  # oldest first
        self._num_bytes = 0
        self.num_let_go = 0

    def __repr__(self) -> str:
        return f"<KeptForwards {len(self._kept)} of {self._num_bytes} bytes, {self.num_let_go} let go>"

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What is in use of the budget."""
        return self._num_bytes

    def put(self, key: Key, kept: KeptForward) -> None:
        """Keep a forward; older ones go if there is no room. One larger than the whole budget is not kept."""
        kept.kept_at = self._clock()
        with self._lock:
            self._remove(key)
            if kept.num_bytes > self.max_bytes:
                kept.outputs = None  # its inputs alone may fit
            if kept.num_bytes > self.max_bytes:
                self.num_let_go += 1
                return
            self._kept[key] = kept
            self._num_bytes += kept.num_bytes
            while self._num_bytes > self.max_bytes:
                self._let_go_oldest()

    def get(self, key: Key) -> KeptForward | None:
        """Return the forward, which stays, or `None` if it has gone."""
        with self._lock:
            return self._kept.get(key)

    def remove(self, key: Key) -> None:
        """Forget the forward, if it is there."""
        with self._lock:
            self._remove(key)

    def remove_graph(self, key: Key) -> None:
        """Keep only the inputs of the forward, if it is there."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.outputs is not None:
                self._num_bytes -= kept.graph_bytes
                kept.outputs = None

    def let_go_expired(self) -> None:
        """Let go of forwards older than the time limit; called from time to time."""
        oldest_allowed = self._clock() - self.max_age_s
        with self._lock:
            while self._kept and next(iter(self._kept.values())).kept_at < oldest_allowed:
                self._let_go_oldest()

    def _let_go_oldest(self) -> None:
        self._remove(next(iter(self._kept)))
        self.num_let_go += 1

    def _remove(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes


class OwnForwards:
    """The kept forwards of one expert.

    Args:
        name: of the expert.
        store: shared with the others.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, name: str, store: KeptForwards) -> None:
        self._name = name
        self._store = store
        self._graphs: set[Key] = set()  # some may have gone from the store
        self._look_at = FIRST_LOOK_AT  # so many of them

    def __repr__(self) -> str:
        return f"<OwnForwards of {self._name!r}, up to {len(self._graphs)} graphs in {self._store!r}>"

    def put(self, client_id: bytes, call_id: int, kept: KeptForward) -> None:
        """Keep a forward."""
        key = (self._name, client_id, call_id)
        self._store.put(key, kept)
        if kept.outputs is not None:
            self._graphs.add(key)
            if len(self._graphs) >= self._look_at:
                self._graphs = {key for key in self._graphs if self._store.get(key) is not None}
                self._look_at = 2 * len(self._graphs) + FIRST_LOOK_AT

    def get(self, client_id: bytes, call_id: int) -> KeptForward | None:
        """Return a forward, which stays, or `None` if it has gone."""
        return self._store.get((self._name, client_id, call_id))

    def remove(self, client_id: bytes, call_id: int) -> None:
        """Forget a forward, if it is there."""
        key = (self._name, client_id, call_id)
        self._store.remove(key)
        self._graphs.discard(key)

    def let_go(self, client_id: bytes, call_id: int) -> None:
        """Forget a forward, if it is there; from any thread."""
        self._store.remove((self._name, client_id, call_id))

    def remove_graph(self, client_id: bytes, call_id: int) -> None:
        """Keep only the inputs of a forward, if it is there."""
        self._store.remove_graph((self._name, client_id, call_id))

    def remove_graphs(self) -> None:
        """Keep only the inputs of all of them."""
        while self._graphs:
            self._store.remove_graph(self._graphs.pop())
