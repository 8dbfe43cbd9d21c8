"""Moves parts between memory and the store: those that are wished for, and those that were changed.

Two threads in the background do so (Rules 3 and 4 of `residency`); whoever cannot wait reads for himself. `Residency`
has the lock, and holds it where it calls anything here, but for `read`, `close`, and to ask whether all is closed.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from moe_autograd.autograd.offload.background import Mover
from moe_autograd.autograd.offload.guard import Guard
from moe_autograd.autograd.offload.parts import Part, Resident
from moe_autograd.autograd.offload.stores import Store
from moe_autograd.autograd.offload.to_write import ToWrite


class Transfers:
    """Reads and writes parts, which are marked meanwhile; the lock is not held then.

    Args:
        lock: guards the parts and all state here; told whenever a part is no longer marked.
        resident: the parts in memory.
        store: where the rest is.
        reader: its thread reads.
        writer: its thread writes.

    Attributes:
        is_closed: whether nothing is begun any more.
    """

    def __init__(
        self, lock: Guard, resident: Resident, store: Store, reader: Executor, writer: Executor
    ) -> None:
        self.to_write = ToWrite()
        self._wishes: OrderedDict[Part, None] = OrderedDict()
        self._lock, self._resident, self._store = lock, resident, store
        self.num_tries = 0  # to write a part, one after the other
        self._failed_try = 0  # the last that failed, as `num_tries` was then
        self._error: BaseException | None = None  # of that
        self.is_closed = False
        device = resident.buffers.device
        self._reader = Mover(reader, lock, self._next_wish, self._grant, device)
        self._writer = Mover(writer, lock, self._next_to_write, self._write, device)

    @property
    def is_moving(self) -> bool:
        """Whether any part is being read or written, or about to be written."""
        return self.is_any_busy or self._writer.is_moving

    @property
    def is_any_busy(self) -> bool:
        """Whether any part is being read or written."""
        return any(part.is_busy for part in self._resident)

    def check_is_open(self) -> None:
        """Raise `RuntimeError` for whoever uses experts that are closed, or just closing."""
        if self.is_closed:
            raise RuntimeError("OffloadedExperts: expected open experts, got closed ones. Build new ones.")

    def raise_error(self, since: int) -> None:
        """Tell of a write that failed, if it began after `num_tries` was so much.

        What began before anybody waited is tried again when somebody does: the disk may have room by then.
        """
        if self._failed_try > since:
            text, error = "OffloadedExperts: expected the store to take a part, got", self._error
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, f"{text} {error.strerror}", error.filename) from error
            raise OSError(f"{text} {error!r}.") from error

    def make_room(self, num_bytes: int, keep: Sequence[Part], spare_wished: bool) -> bool:
        """Free the least recently used until `num_bytes` more fit; start to write those that must be first."""
        if self._resident.has_room(num_bytes):
            return True
        for part in self._resident.make_room(num_bytes, keep, spare_wished):
            self.to_write.add_first(part)
        self.start_writing()
        return self._resident.has_room(num_bytes)

    def take_in(self, parts: Sequence[Part]) -> None:
        """Give parts buffers that are to be read into, all or none; there is room."""
        taken: list[Part] = []
        try:
            for part in parts:
                self._resident.take_in(part)
                part.is_reading = True
                taken.append(part)
        except BaseException:  # the system has no memory
            self.give_back(taken)
            raise

    def give_back(self, unread: Sequence[Part]) -> None:
        """Take such buffers away again: these are absent."""
        for part in unread:
            part.is_reading = False
            self._resident.put_out(part)
        self._lock.notify_all()

    def read(self, part: Part) -> None:
        """Fill a part that was taken in. If that fails it is absent again."""
        assert part.buffer is not None
        try:
            if part.is_stored:
                self._store.read(part.name, part.buffer)
            with self._lock:
                part.attach(part.buffer)
                part.same_as_stored()
                part.is_reading = False
                self._lock.notify_all()
        except BaseException:
            with self._lock:
                self.give_back([part])
            raise

    def wish(self, part: Part) -> None:
        """Read it when those before it are read and there is room."""
        if part.buffer is None:
            self._wishes[part] = None
        else:
            part.is_wished = True

    def withdraw(self, part: Part) -> None:
        """Take a wish back that was not granted, and treat one that was as used."""
        self._wishes.pop(part, None)
        part.is_wished = False

    def withdraw_all(self) -> None:
        """Take back all wishes that were not granted."""
        self._wishes.clear()

    def start_reading(self) -> None:
        """Read what is wished for, as long as there is room."""
        if self._wishes and not self.is_closed:
            self._reader.start()

    def _next_wish(self) -> Part | None:
        while self._wishes:
            part = next(iter(self._wishes))
            if part.buffer is None:
                if not self.make_room(part.layout.num_bytes, keep=(), spare_wished=True):
                    return None
                del self._wishes[part]
                # whoever needs it asks again, and is told
                with contextlib.suppress(RuntimeError, MemoryError):
                    self.take_in([part])
                    part.is_wished = True
                    return part
            else:
                del self._wishes[part]
        return None

    def _grant(self, part: Part) -> None:
        with contextlib.suppress(Exception):  # whoever needs it reads again, and is told
            self.read(part)

    def start_writing(self) -> None:
        """Write what is to be written now."""
        if self.to_write.has_next and not self.is_closed:
            self._writer.start()

    def write_all(self) -> None:
        """Write every changed part, also those that are held, and wait for that."""
        since = self.num_tries
        begun_before = [part for part in self._resident if part.is_writing]
        while any(part.is_writing for part in begun_before):  # one that fails is changed again then
            self._lock.wait_awhile()
            self._lock.let_through()
        for part in self._resident:
            if not part.is_reading and part.notice():
                self.to_write.add_though_held(part)
        self.start_writing()
        while self._failed_try <= since and (self.to_write.has_some_though_held or self.is_any_busy):
            if not self._writer.is_moving:  # nobody will write the rest, if all is closed
                self.check_is_open()
            self._lock.wait_awhile()
            self._lock.let_through()
        self.raise_error(since)

    def _next_to_write(self) -> Part | None:
        self.num_tries += 1
        try:
            return self.to_write.take_next()
        except BaseException as error:  # as no memory for it: whoever waits is told
            self._note_failure(error)
            return None

    def _write(self, part: Part) -> None:
        assert part.buffer is not None
        error: BaseException | None = None
        try:
            if part.num_holders and part.buffer.is_cuda:  # kernels that have changed it may not have ended
                torch.cuda.synchronize(part.buffer.device)
            self._store.write(part.name, part.layout, part.buffer)
        except BaseException as raised:  # whoever waits is told
            error = raised
        with self._lock:
            part.is_writing = False
            if error is None:
                part.is_stored = True
                self.start_reading()
            else:
                self._note_failure(error)
                part.is_changed = True
            self._lock.notify_all()

    def _note_failure(self, error: BaseException) -> None:
        self._failed_try = self.num_tries
        self._error = error.with_traceback(None)  # its frames know the buffer

    def begin_no_more(self) -> None:
        """Go on with what is being read and written, and with what is to be written at once."""
        self.is_closed = True
        self._wishes.clear()

    def close(self) -> None:
        """Finish what is being read and written, and end the threads."""
        self._reader.close()
        self._writer.close()
