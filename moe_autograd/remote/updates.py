"""Updates of hosted experts: which gradients of ours are gathered where, and `Step` and `ZeroGrad` sent there.

::

    backward of ffn.3 at A  ──  note_backwards  ──▶  gathered["ffn.3"]["A"]: 1 to 1 backwards, with this digest
    step                    ──  send            ──▶  A: Step(ffn.3, of these)             once, under its number
    A is gone, ffn.3 at B   ──  send            ──▶  B: the same number: B knows whether it has them
    step raised, step       ──  send            ──▶  all: the same number, unless gradients came or went in between

An expert that has moved between two backwards of one step may have the gradients of both: they are counted at one place
before the step is sent.

A server that counts fewer backwards, or more, or has others, has been restarted in between from an older
checkpoint: it changes nothing and says so.

Mutable state: `_gathered`, and `_dropped`, which is replaced as a whole, under `_lock`.

Threads: any number of operations at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from moe_autograd._interrupts import uninterrupted, unwinding
from moe_autograd.errors import CorruptDataError, RemoteError
from moe_autograd.remote.asking import ask
from moe_autograd.remote.calls import without_name
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.delivery import Delivery
from moe_autograd.remote.fanout import raise_first
from moe_autograd.remote.jobs import Job
from moe_autograd.remote.numbering import Numbering
from moe_autograd.remote.operations import Operation, phase_of
from moe_autograd.remote.turns import Turns
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.gathered import MAX_UNSURE, digest_of
from moe_autograd.wire.heads import BackwardHead
from moe_autograd.wire.status import error_of


@dataclass
class _Gathered:
    """Gradients of ours that one server may have of one expert.

    Args:
        count: of how many backwards, and which.
        is_stale: whether they should have been forgotten, and their server could not be told.
    """

    count: pb.GatheredBackwards = field(default_factory=pb.GatheredBackwards)
    is_stale: bool = False

    def joined_by(self, other: _Gathered) -> _Gathered:
        """Count what `other` counted too, since it has moved here."""
        self.count.at_least += other.count.at_least
        self.count.at_most += other.count.at_most
        self.count.digest ^= other.count.digest
        self.count.unsure.extend(other.count.unsure)
        self.is_stale |= other.is_stale
        return self

    def note(self, sequence: int, *, is_certain: bool) -> None:
        """Count one backward."""
        self.count.at_most += 1
        if is_certain:
            self.count.at_least += 1
            self.count.digest ^= digest_of([sequence])
        elif len(self.count.unsure) <= MAX_UNSURE:
            self.count.unsure.append(sequence)


class Updates:
    """Sends updates to where gradients are.

    Args:
        delivery: finds servers and tries again.
        numbering: gives each update its number.
    """

    def __init__(self, delivery: Delivery, numbering: Numbering) -> None:
        self._delivery = delivery
        self._numbering = numbering
        self.turns = Turns()
        self._lock = threading.Lock()
        self._gathered: dict[str, dict[str, _Gathered]] = {}  # by expert and address
        self._dropped: Mapping[str, object] = {}

    def __repr__(self) -> str:
        return f"Updates({len(self._gathered)} experts with gathered gradients)"

    @property
    def dropped(self) -> Mapping[str, object]:
        """For each expert the last `ZeroGrad` that did not wait for its backwards; never changed."""
        return self._dropped

    def note_backwards(self, jobs: Iterable[Job], has_come_back: bool, dropped: Mapping[str, object]) -> None:
        """Count the backwards gathered at each server, which says if they are not; one that failed may have been.

        Args:
            jobs: the backwards.
            has_come_back: whether all have an outcome.
            dropped: what was so when they began: those before a `ZeroGrad` that did not wait for them are stale.
        """
        with self._lock:
            for job in jobs:
                if job.outcome.wants_no_step:
                    continue
                name = job.request.expert
                at = self._gathered.setdefault(name, {}).setdefault(job.address, _Gathered())
                assert isinstance(job.request.head, BackwardHead)
                at.note(job.request.head.sequence, is_certain=has_come_back and job.outcome.error is None)
                at.is_stale |= dropped.get(name) is not self._dropped.get(name)
                self._numbering.settle_steps([name])

    @unwinding
    def send(self, rpc: str, names: Sequence[str], failures: list[RemoteError] | None) -> None:
        """Send `Step` or `ZeroGrad` to where gradients of these experts are.

        Args:
            rpc: which of them.
            names: of the experts.
            failures: None: the first that failed raises. A list takes them instead, and an expert whose gradients
                could not be forgotten is not stepped before they are.
        """
        given: list[range] = []
        try:
            self._send(rpc, names, failures, given)
            for numbers in given:
                self._numbering.settle(names, numbers)
        except BaseException:
            for numbers in given:
                self._numbering.let_repeat(names, numbers)
            raise

    def _send(
        self, rpc: str, names: Sequence[str], failures: list[RemoteError] | None, given: list[range]
    ) -> None:
        """Do so, and note which numbers were given."""
        with (
            self._delivery.operations.begin() as operation,
            self.turns.turn(rpc, names, operation) as hindrance,
            self._numbering.sequences(1, names if rpc == "Step" and hindrance is None else ()) as (
                numbers,
                settled_below,
            ),
        ):
            given.append(numbers)
            if hindrance is None:
                once = partial(self._send_once, rpc, numbers[0], settled_below)
                gathered_at = self._gathered_at(rpc, names)
                if rpc == "Step" and self._join_moved(gathered_at, operation):
                    gathered_at = self._gathered_at(rpc, names)
                self._delivery.at_each(
                    rpc, gathered_at, once, operation, self._move_gathered, failures, is_patient=_has_news
                )
            elif failures is None:
                try:
                    raise hindrance
                finally:
                    del hindrance  # this frame is in the traceback
            else:
                failures.append(hindrance)
            if rpc == "ZeroGrad":
                self._drop(names, has_waited=hindrance is None)

    def _send_once(
        self,
        rpc: str,
        sequence: int,
        settled_below: int,
        channel: Channel,
        own: dict[str, _Gathered],
        operation: Operation,
    ) -> None:
        if rpc == "Step":  # those that are to be forgotten may be where an expert has moved to
            own = {name: gathered for name, gathered in own.items() if not gathered.is_stale}
            if not own:
                return
        request = pb.UpdateRequest(
            client_id=self._numbering.client_id,
            sequence=sequence,
            settled_below=settled_below,
            experts=own,
            gathered=[gathered.count for gathered in own.values()],
            kind=pb.STEP if rpc == "Step" else pb.ZERO_GRAD,
        )
        attempt_s = self._delivery.settings.retry.update_attempt_s
        reply = ask(channel, rpc, request, pb.UpdateReply, operation, attempt_s)
        check_updates(rpc, channel, own, reply, operation)
        if rpc == "ZeroGrad":
            with self._lock:
                for name in own:
                    self._gathered[name].pop(channel.address, None)

    def _drop(self, names: Sequence[str], *, has_waited: bool) -> None:
        """Let what has not been forgotten not be applied, nor what backwards will gather that nobody waited for."""
        self._numbering.settle_steps(names)
        with self._lock:
            if not has_waited:
                self._dropped = {**self._dropped, **dict.fromkeys(names, object())}
            for name in names:
                for gathered in self._gathered.get(name, {}).values():
                    gathered.is_stale = True

    def _gathered_at(self, rpc: str, names: Sequence[str]) -> dict[str, dict[str, _Gathered]]:
        """Return what is to be applied, or forgotten, by address and expert."""
        found: dict[str, dict[str, _Gathered]] = {}
        with self._lock:
            for name in names:
                for address, gathered in self._gathered.get(name, {}).items():
                    if rpc == "ZeroGrad" or not gathered.is_stale:
                        found.setdefault(address, {})[name] = gathered
        return found

    def _join_moved(self, gathered_at: Mapping[str, dict[str, _Gathered]], operation: Operation) -> bool:
        """Count at one place what experts have gathered before and after they moved; return whether any may have."""
        finding = self._delivery.finding
        places = Counter(name for own in gathered_at.values() for name in own)

        def has_left(name: str, address: str) -> bool:
            return places[name] > 1 and finding.placement.has_left(name, address)

        if not any(has_left(name, address) for address, own in gathered_at.items() for name in own):
            return False
        finding.look_briefly(operation)
        for address, own in gathered_at.items():
            self._move_gathered(address, {name: own[name] for name in own if has_left(name, address)})
        return True

    def _move_gathered(self, address: str, own: dict[str, _Gathered]) -> dict[str, dict[str, _Gathered]]:
        """Expect gradients of experts that have moved where those are now: their server knows whether it has them."""
        moved: dict[str, dict[str, _Gathered]] = {}
        with uninterrupted(), self._lock:  # or gradients would be expected nowhere
            for new, names in self._delivery.finding.moved(address, own).items():
                moved[new] = {name: own[name] for name in names}
                for name in names if new != address else ():
                    del self._gathered[name][address]
                    there = self._gathered[name].setdefault(new, _Gathered())
                    moved[new][name] = there.joined_by(own[name])
        return moved


def _has_news(own: Mapping[str, _Gathered]) -> bool:
    """Tell whether a server is asked for the first time; one that could not be told before will be asked again."""
    return not all(gathered.is_stale for gathered in own.values())


def check_updates(
    rpc: str, channel: Channel, names: Iterable[str], reply: pb.UpdateReply, operation: Operation
) -> None:
    """Raise the first failure of an update of these experts, or what says that it is not of them."""
    if (answered := [update.expert for update in reply.updates]) != (expected := list(names)):
        raise CorruptDataError(
            f"server at {channel.address}, {phase_of(rpc)}: expected answers for {expected}, "
            f"got {answered}. The server is broken, or of another version."
        )
    errors = []
    for update in reply.updates:
        if update.status.code != pb.OK:
            update.status.message = without_name(update.status.message, update.expert)
            place = operation.place(f"expert {update.expert!r} at {channel.address}", rpc)
            errors.append(error_of(update.status, place))
    raise_first(errors, "experts of this server")
