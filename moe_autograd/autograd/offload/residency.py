"""Keep parts in memory up to a limit; the rest waits in a store. Knows bytes, never autograd.

A part is one run of bytes: an expert's weights, its gradients, its optimizer state, the activations of a
micro-batch. It is in one of these states::

                 hold, prefetch                    the least recently used leave
      absent ───────────────────▶ resident ────────────────────────────────────▶ absent
                (read the store)      │  ▲        (at once, when the store has the same)
                                hold  ▼  │ let go
                                    held             a part that was changed is written to
                                 (by any number)     the store first, and may be held meanwhile

Rules:

1. The buffers of all parts and the spare ones together never exceed the limit.
2. Whoever holds parts got all of them at once, and lets go before he asks for more. So nobody waits for memory while
   he keeps some, and there is no deadlock. (A checkpoint inside a backward may have to ask for more. If all who hold
   something wait for something, one of them is told instead.)
3. One thread in the background reads what was wished for (`prefetch`), another writes what was changed. A wish is
   granted only from memory that nobody holds and no earlier wish was granted; who needs a part now goes first.
4. When not everything fits, a changed part is written as soon as it is let go, so that room is made without
   waiting. Nobody waits for that: a part that is needed again before its turn comes is not written, one that is
   changed while it is written is written once more. Who changes a part says so (`changed`), or is found before it
   leaves or is flushed (`Part.notice`).
5. Whenever a sixteenth of the limit has come in, memory that others have freed in the meantime is given back to the
   system: what computes between the moves is not counted, but should not pile up.

State (`_lock` guards all of it, and the fields of all parts): `_resident`, `_transfers`, `holders`, `_passing`,
`_known_bytes`. Reading and writing happen with the lock released, on parts that are marked so. Ctrl-C waits while
somebody has the lock, and while he takes parts or lets go of them (`_interrupts`). Its handler may hold parts: it runs
when no part is marked by its own thread, and no lock held.

Which parts are in memory and who leaves first is in `parts`, which go with a graph in `passing`, what is read and
written in `transfers`, in which order in `to_write`, who waits for whom in `holders`, the threads in `background`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd.autograd.offload.apart_streams import on_stream
from moe_autograd.autograd.offload.background import Apart, begun_threads
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory
from moe_autograd.autograd.offload.guard import Guard
from moe_autograd.autograd.offload.holders import Holders
from moe_autograd.autograd.offload.owners import Places
from moe_autograd.autograd.offload.parts import Part, Resident
from moe_autograd.autograd.offload.passing import Passing
from moe_autograd.autograd.offload.stores import Store
from moe_autograd.autograd.offload.transfers import Transfers

T = TypeVar("T")


class Residency:
    """Parts in memory, up to a limit.

    Args:
        limit_bytes: for all buffers together.
        store: where the rest is.
        device: of the buffers.

    Attributes:
        places: where the tensors lay that were taken over.
        holders: who holds parts; whether this thread does may be asked without the lock.

    Raises:
        RuntimeError: the system has no thread to give.

    Threads: any thread may call anything; `hold` blocks until there is room.
    """

    def __init__(self, limit_bytes: int, store: Store, device: torch.device) -> None:
        self.limit_bytes, self.store, self.device = limit_bytes, store, device
        self.places: Places = WeakKeyDictionary()
        self._known_bytes = 0
        self._lock = Guard()
        reader, writer, updater = begun_threads("offload-read", "offload-write", "offload-update")
        self._resident = Resident(limit_bytes, device)
        self._transfers = Transfers(self._lock, self._resident, store, reader, writer)
        self.holders = Holders()
        self._passing = Passing()
        self._apart = Apart(updater)

    def __repr__(self) -> str:
        used = f"{self._resident.buffers.used_bytes} of {self.limit_bytes} bytes"  # no lock: so a fork has a repr, too
        return f"Residency({used}, {len(self._resident)} parts resident)"

    def check_is_open(self) -> None:
        """Raise `RuntimeError` if it is closed, and its folder may belong to another by now; also in a fork."""
        with self._lock:
            self._transfers.check_is_open()

    def check_fits(self, parts: Sequence[Part]) -> None:
        """Raise `ValueError` if these parts can never be held together."""
        needed = sum(part.layout.num_bytes for part in parts)
        if not needed <= self.limit_bytes:  # so is a limit that is NaN
            sizes = ", ".join(f"{part.name}: {part.layout.num_bytes}" for part in parts)
            raise ValueError(
                f"OffloadedExperts: expected max_resident_bytes of at least {needed}, what one expert needs at once "
                f"({sizes}), got {self.limit_bytes}. Allow more, or make experts or micro-batches smaller."
            )

    def add(self, part: Part) -> Part:
        """Count a part among those that want room."""
        with self._lock:
            self._known_bytes += part.layout.num_bytes
        return part

    @property
    def known_bytes(self) -> int:
        """What all parts would take, resident or not."""
        with self._lock:
            self._put_lost_away()
            return self._known_bytes

    @property
    def resident_bytes(self) -> int:
        """What all buffers take, the spare ones included."""
        with self._lock:
            self._put_lost_away()
            return self._resident.buffers.taken_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that all buffers have taken so far."""
        return self._resident.buffers.peak_bytes

    @unwindable
    def hold(self, parts: Sequence[Part]) -> Iterator[None]:
        """Make all of them resident, and keep them so inside.

        A part that was never stored comes with undefined bytes. Whoever changes one says so (`changed`).

        Raises:
            ValueError: together they exceed the limit.
            RuntimeError: all who hold something, this thread among them, wait for room.
            OSError: the store failed.
        """
        only_raises = _has_absent(parts) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with uninterrupted() as section:
            # another handler may want what is being read, which its own thread would never have read
            self._acquire(parts, section.opened if only_raises else nullcontext)
            try:
                with section.opened():
                    yield
            finally:
                self._let_go(parts)

    def fill(self, part: Part, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors into a part that has nothing yet, and let go of them: the given dictionary is emptied.

        Becoming resident may attach those very tensors to the part, so what they had is looked up before.
        """
        copies = {name: tensor.detach() for name, tensor in tensors.items()}
        with self.hold([part]):
            for name, view in part.views().items():
                view.copy_(copies[name])
            self.changed(part)
        del copies
        tensors.clear()
        self.freed(part.layout.num_bytes)

    def changed(self, part: Part) -> None:
        """Say that a held part no longer is what the store has."""
        with self._lock:
            part.changed()

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Wish for parts, those needed first before the others. Returns at once; where all is closed, in vain."""
        if self._transfers.is_closed:
            return
        with self._lock:
            for part in parts:
                self._transfers.wish(part)
            self._transfers.start_reading()

    def forget_wishes(self, parts: Iterable[Part] | None = None) -> None:
        """Withdraw wishes (`None`: all) that were not granted, and treat those granted as used."""
        with self._lock:
            if parts is None:
                self._transfers.withdraw_all()
            for part in [*self._resident] if parts is None else parts:
                self._transfers.withdraw(part)

    def not_soon(self, parts: Iterable[Part]) -> None:
        """Say that others are needed before these, so that these leave first."""
        with self._lock:
            for part in parts:
                self._resident.not_soon(part)

    def void(self, part: Part) -> None:
        """Let a part forget its bytes, as `discard` does, though somebody may hold it."""
        with self._lock:
            part.is_stored = part.is_changed = False
            self._transfers.withdraw(part)
        self.not_soon([part])

    def discard(self, part: Part) -> None:
        """Let a part that nobody holds forget its bytes; the store keeps the place for the next."""
        with self._lock:
            self._wait_until_free(part, also_of_holders=False)
            self._put_away(part)

    def forget(self, part: Part) -> None:
        """Discard a part for good."""
        self.discard(part)
        self.store.remove(part.name)
        with self._lock:
            self._known_bytes -= part.layout.num_bytes

    def add_passing(self, layout: Layout) -> Part:
        """Add a part that will be lost; it gets the name of one that was, which the store can write over."""
        while (name := self._needless_name()) is not None:
            self.store.remove(name)
        with self._lock:
            part = self._passing.new(layout)
        return self.add(part)

    def lose_passing(self, part: Part) -> None:
        """Discard such a part for good, but for its place in the store. Waits for nothing, not even for the lock."""
        self._passing.lose(part)
        if self._lock.enter_if_free():
            try:
                self._put_lost_away()
            finally:
                self._lock.__exit__()

    def _needless_name(self) -> str | None:
        with self._lock:
            self._put_lost_away()
            return self._passing.take_needless()

    def _put_lost_away(self) -> None:
        for part in self._passing.take_lost():
            self._known_bytes -= part.layout.num_bytes
            self._put_away(part)

    def _put_away(self, part: Part) -> None:
        if part.buffer is not None:
            self._resident.put_out(part)
        part.is_stored = part.is_changed = False
        self._lock.notify_all()

    def adopt(self, part: Part, place: Callable[[str], None], instead_of: Part | None = None) -> None:
        """Let `place` put other bytes under a part's name into the store; if that raises, all is as before.

        Nobody takes the part in meanwhile, nor the one that it comes `instead_of`. Threads that hold it are waited for:
        not to be called by one that holds any.
        """
        with self._lock:
            before = instead_of or part
            self._wait_until_free(before, also_of_holders=True)
            place(part.name)
            self._put_away(before)
            self._known_bytes -= instead_of.layout.num_bytes if instead_of else 0
            part.is_stored = True

    def _wait_until_free(self, part: Part, *, also_of_holders: bool) -> None:
        self._transfers.withdraw(part)
        while part.is_busy or (also_of_holders and part.num_holders):
            self._lock.wait_awhile()
            self._lock.let_through()

    def flush(self) -> None:
        """Write every changed part to the store."""
        self._transfers.check_is_open()
        with self._lock:
            self._transfers.write_all()

    def freed(self, num_bytes: int) -> None:
        """Say that as much memory beside the buffers was let go of (Rule 5)."""
        with self._lock:
            self._resident.come_in_bytes += num_bytes
            if self._resident.come_in_bytes <= self.limit_bytes / 16:
                return
            self._resident.come_in_bytes = 0
        give_back_freed_memory()

    def run_apart(self, function: Callable[[], T]) -> T:
        """Call a function on a thread of its own, outside of the caller's modes and random numbers; one at a time.

        The function waits for no room, and has ended when this returns or raises. On a GPU it uses the caller's stream.
        """
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        caller = threading.get_ident()

        def run() -> T:
            with self.holders.standing_for(caller), on_stream(stream):
                returned = function()
                self.finish_kernels()
                return returned

        return self._apart.run(run)

    def finish_kernels(self) -> None:
        """Wait for what this thread has started on the device, and may still use buffers."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Finish what is being read and written, and end the threads. In a forked child: nothing to do."""
        if self._lock.is_in_fork:
            return
        with self._lock:
            self._transfers.begin_no_more()
            self._lock.notify_all()
        self._transfers.close()
        self._apart.close()

    def _acquire(
        self, parts: Sequence[Part], while_reading: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.check_fits(parts)
        self._transfers.check_is_open()
        with self._lock:
            self._put_lost_away()
            since = self._transfers.num_tries
            while not self._try_to_take(parts):
                self._transfers.check_is_open()
                self._transfers.raise_error(since)
                with self.holders.waiting(self._lock.num_news):
                    self._check_for_deadlock(parts)
                    self._lock.wait_awhile()
                self._lock.let_through()
            self.holders.begin()
            missing = [part for part in parts if part.is_reading]
        try:
            while missing:
                with while_reading():
                    self._transfers.read(missing[-1])
                missing.pop()
        except BaseException:
            with self._lock:
                self._transfers.give_back([part for part in missing if part.is_reading])
            self._let_go(parts)
            raise

    def _check_for_deadlock(self, parts: Sequence[Part]) -> None:
        """Rule 2's exception."""
        if not self._transfers.is_moving and self.holders.all_wait(self._lock.num_news):
            needed = sum(part.layout.num_bytes for part in parts if part.buffer is None)
            held = sum(part.layout.num_bytes for part in self._resident if part.num_holders)
            raise RuntimeError(
                f"OffloadedExperts: expected {needed} more bytes (for {', '.join(part.name for part in parts)}), got "
                f"{held} of {self.limit_bytes} held by calls that all wait for more. Raise max_resident_bytes, or "
                "do not checkpoint around experts with num_microbatches."
            )

    def _try_to_take(self, parts: Sequence[Part]) -> bool:
        """Rule 2: take all parts, and buffers for those that are absent, which the caller reads."""
        if any(part.is_reading for part in parts):
            return False
        absent = [part for part in parts if part.buffer is None]
        num_bytes = sum(part.layout.num_bytes for part in absent)
        if not self._transfers.make_room(num_bytes, keep=parts, spare_wished=False):
            return False
        self._transfers.take_in(absent)
        for part in parts:
            part.num_holders += 1
            self._resident.used(part)
            self._transfers.withdraw(part)
        return True

    def _let_go(self, parts: Sequence[Part]) -> None:
        self.finish_kernels()
        with self._lock:
            self.holders.end()
            for part in parts:
                part.num_holders -= 1
                if part.notice() and self._known_bytes > self.limit_bytes:
                    self._transfers.to_write.add(part)  # Rule 4
            self._transfers.start_writing()
            self._transfers.start_reading()
            self._lock.notify_all()
        self.freed(0)


def prefetch_in_each(wanted: Iterable[tuple[Residency, Sequence[Part]]]) -> None:
    """Let each residency read its parts, those needed first before the others; layers may have one each."""
    of_each: dict[Residency, list[Part]] = {}
    for residency, parts in wanted:
        of_each.setdefault(residency, []).extend(parts)
    for residency, parts in of_each.items():
        residency.prefetch(parts)


def _has_absent(parts: Sequence[Part]) -> bool:
    """Whether some are to be read; without the lock, so one may leave just now. To ask for the handler is slow."""
    return any(part.buffer is None for part in parts)
