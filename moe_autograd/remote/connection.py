"""The experts of one `connect`, and what can be done with them: passes, updates, their weights.

All experts of one connection share it as their call group, so a map over them is one pass: one stream for each
server, all servers at the same time. How calls get there, and what is tried again, is `delivery`'s.

Mutable state: none of its own; it is guarded in `finding`, `updates` and the like.

Threads: any number of operations at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_autograd._interrupts import uninterrupted, unwinding
from moe_autograd._random import seeds_elsewhere
from moe_autograd.autograd.anchors import new_anchor
from moe_autograd.autograd.grouping import Failures
from moe_autograd.errors import CorruptDataError, RemoteError
from moe_autograd.remote.calls import Outcome
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.closing import close, close_apart
from moe_autograd.remote.compression import Compression
from moe_autograd.remote.delivery import Delivery, Settings
from moe_autograd.remote.expecting import Expectations
from moe_autograd.remote.expert import RemoteExpert
from moe_autograd.remote.finding import Finding
from moe_autograd.remote.inputs import (
    mismatch_of_grads,
    mismatch_of_outputs,
    on_devices_of,
    refusal_of,
    wait_until_made,
)
from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.remote.jobs import Job, note_failures, raise_if_unwanted, say_more
from moe_autograd.remote.leaving import LeftForwards
from moe_autograd.remote.nodes import call_experts
from moe_autograd.remote.numbering import Numbering
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.parts import BackwardPart, Call
from moe_autograd.remote.placement import HostedExpert
from moe_autograd.remote.requests import backward_request, forward_request
from moe_autograd.remote.servers import Servers
from moe_autograd.remote.state import State, as_hosted, fetch_states, send_states, tell_of_left_out
from moe_autograd.remote.updates import Updates, check_updates
from moe_autograd.wire import experts_pb2 as pb


class Connection:
    """The channels to some servers, and the experts found there.

    Args:
        servers: there are.
        settings: of all operations.
    """

    can_leave_out = True  # see `grouping`

    def __init__(self, servers: Servers, settings: Settings) -> None:
        self.numbering = Numbering()
        self.anchor = new_anchor()  # `nodes`, rule 1
        self._finding = Finding(servers, int.from_bytes(self.numbering.client_id[:4], "little"))
        self._delivery = Delivery(self._finding, settings)
        self._expectations = Expectations(self._delivery.expect)
        self.left_forwards = LeftForwards(partial(self._delivery.forget, self.numbering.client_id))
        self._updates = Updates(self._delivery, self.numbering)
        self._told_of_left_out: set[tuple[str, ...]] = set()
        # Where nobody holds it any more, nobody can close it. At exit grpc ends by itself.
        self._closing = weakref.finalize(self, close_apart, self._delivery, self.left_forwards)
        self._closing.atexit = False

    @property
    def hosted(self) -> Mapping[str, HostedExpert]:
        """What servers said of each expert when they were asked last, or of one that is gone, before."""
        return self._finding.hosted

    @property
    def addresses(self) -> tuple[str, ...]:
        """The servers known now."""
        return self._finding.servers.addresses

    @property
    def compression(self) -> Compression:
        """How tensors travel now."""
        return self._delivery.settings.encodings.compression

    def address_of(self, name: str) -> str:
        """Return the server that the next call of an expert goes to, as far as is known; not of a training."""
        return self._finding.hosts_of(name)[0]

    def ask(self, *, allow_missing: bool = False) -> dict[str, HostedExpert]:
        """Ask all servers what they host now; return what those say that answer, by name.

        Args:
            allow_missing: whether addresses may have no server, as long as one has.
        """
        with self._delivery.operations.begin() as operation:
            errors = self._finding.look(operation, may_miss=allow_missing)
            if errors and (not allow_missing or len(errors) == len(self._finding.servers.given)):
                try:
                    raise errors[0]
                finally:
                    errors.clear()  # this frame is in the traceback
        return self._finding.placement.experts(as_of_now=True)

    def check_inputs(self, name: str, inputs: tuple[Any, ...]) -> HostedExpert:
        """Refuse what an expert does not take, though its server is asked again; return what that says of it."""
        hosted = self.hosted[name]
        if (error := refusal_of(hosted, inputs)) is not None:
            with self._delivery.operations.begin() as operation:
                self._finding.look_briefly(operation)
            hosted = self.hosted[name]
            if (error := refusal_of(hosted, inputs)) is not None:
                say_more(error, self._finding.changes_of(name))
                try:
                    raise error
                finally:
                    del error  # this frame is in the traceback
        return hosted

    def close(self) -> None:
        """Cancel what is under way and disconnect from all servers. In a forked child: nothing to do.

        Returns at once. Where servers are to be told of forwards that have no backward any more, it disconnects a
        moment later (`closing`).
        """
        with interrupts_held_back():
            if self._closing.detach() is not None:
                close(self._delivery, self.left_forwards)

    def __repr__(self) -> str:
        return f"Connection({len(self.hosted)} experts at {', '.join(self.addresses)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        """Return the same: copies of what holds it share it."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r}: expected to stay in its process, got pickled. Connect again where you need it; "
            "`experts.state_dict()` has the weights."
        )

    # ---- passes

    def call_together(
        self,
        modules: Sequence[nn.Module],
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        *,
        failures: Failures | None = None,
    ) -> list[Any]:
        """Call remote experts of this connection in one pass, differentiably.

        Args:
            modules: remote experts; one may be there several times.
            inputs: the tensors for each.
            kwargs: empty: keyword arguments do not travel.
            failures: None: a call that fails raises. A list, or an `Attendance`: calls that fail are added to it,
                when they do, and left out: in the forward their result is None; in the backward, which may be on
                another thread, their inputs get no gradient.

        Returns:
            What each expert returned, in order.

        Raises:
            RemoteError: of the lowest failing call, with a note on how many others failed.
        """
        for module, named in zip(modules, kwargs, strict=True):
            if named:
                raise TypeError(
                    f"expert {getattr(module, 'name', module)!r}: expected positional tensors, "
                    f"got keyword arguments {sorted(named)}. Only positional tensors travel."
                )
        experts = [module for module in modules if isinstance(module, RemoteExpert)]
        assert len(experts) == len(modules), "a call group holds remote experts only"
        with self.left_forwards.passing():
            return call_experts(self, experts, inputs, failures)

    def run_forward(
        self, calls: Sequence[Call], inputs: Sequence[Sequence[Tensor]], failures: Failures | None
    ) -> list[Outcome]:
        """Make the forwards; note in each call where it was made and what it gave."""
        self.left_forwards.tell()
        may_draw = [self.hosted[call.expert].may_draw for call in calls]
        with seeds_elsewhere(may_draw) as (seeds, note_drawn):
            for call, seed in zip(calls, seeds, strict=True):
                call.random_seed = seed
            jobs = self._deliver_forwards(calls, inputs, failures)
            if any(job.outcome.has_drawn for job in jobs):
                note_drawn()
        for call, args, job in zip(calls, inputs, jobs, strict=True):
            call.address = job.address
            call.replica = self._finding.placement.replica_of(call.expert, job.address)
            call.keep_graph = call.keep_graph and job.outcome.error is None
            call.is_kept = call.keep_graph
            call.num_outputs, call.is_sequence = len(job.outcome.tensors), job.outcome.is_sequence
            call.uses = job.outcome.uses
            if not args[0].is_cpu:
                job.outcome.tensors = on_devices_of([args[0]] * call.num_outputs, job.outcome.tensors)
        return [job.outcome for job in jobs]

    def will_train(self, names: Iterable[str]) -> None:
        """Note experts that somebody is going to train: all their forwards are those of a training from now on."""
        self._finding.trained.update(names)

    def _is_training(self, call: Call) -> bool:
        """Whether a forward is one of a training; so is, once there was such a one, each without gradients.

        A checkpoint, or an autograd function, may make one of those first, and the same again with gradients.
        """
        if not self.hosted[call.expert].is_trained:
            return False
        if call.keep_graph:
            self._finding.trained.add(call.expert)
        return call.expert in self._finding.trained

    def _deliver_forwards(
        self, calls: Sequence[Call], inputs: Sequence[Sequence[Tensor]], failures: Failures | None
    ) -> list[Job]:
        wait_until_made(x for args in inputs for x in args)
        encoding = self._delivery.settings.encodings.encoding("Forward")
        jobs = []
        for call, args in zip(calls, inputs, strict=True):
            call.encoding = encoding
            request = forward_request(self.numbering.client_id, call, args, encoding)
            is_training = self._is_training(call)
            address = self._finding.home_of(call.expert) if is_training else self.address_of(call.expert)
            jobs.append(Job(request, address, index=call.index, is_training=is_training))
        is_whole = False  # Ctrl-C may end it anywhere
        try:
            with self._delivery.operations.begin() as operation:
                self._delivery.deliver("Forward", jobs, operation, failures)
                raise_if_unwanted(jobs, "forward", operation.cancellation)
            for job in jobs:
                _check_outputs(job)
            note_failures(jobs, "forward", failures)
            is_whole = True
        finally:
            self.left_forwards.note_failed(jobs, is_whole=is_whole)
        return jobs

    def prepare_backward(self, calls: Sequence[Call], results: Sequence[Any]) -> None:
        """Let servers know in time what the backward through these results will need after them."""
        if any(expert.wants_hints for expert in self.hosted.values()):
            called = [(call.address, call.expert) for call in calls if self.hosted[call.expert].wants_hints]
            self._expectations.note_pass(called, results)

    def run_backward(
        self,
        parts: Sequence[BackwardPart],
        failures: Failures | None,
        *,
        wants_weight_grads: bool,
        keep_graph: bool,
    ) -> dict[int, list[Tensor | None]]:
        """Make the backwards that anybody wants; return the gradients of each call's inputs by its `call_id`."""
        self.left_forwards.tell()
        for part in parts:
            part.wants_weight_grads = wants_weight_grads and self._is_trained(part.call)
        wanted = [part for part in parts if part.wants_weight_grads or any(part.wants_input_grads)]
        jobs = self._deliver_backwards(wanted, failures, keep_graph)
        for part, job in zip(wanted, jobs, strict=True):
            if job.outcome.error is None:
                part.call.is_kept = keep_graph
                place = f"expert {part.call.expert!r} at {part.call.address}, backward"
                grads = job.outcome.tensors
                job.outcome.error = mismatch_of_grads(place, part.inputs, part.wants_input_grads, grads)
        note_failures(jobs, "backward", failures)
        return {
            part.call.call_id: list(on_devices_of(part.inputs, job.outcome.tensors))
            for part, job in zip(wanted, jobs, strict=True)
            if job.outcome.error is None
        }

    def _is_trained(self, call: Call) -> bool:
        return call.is_trained and self.hosted[call.expert].is_trained and not call.freeze.is_on

    @unwinding
    def _deliver_backwards(
        self, parts: Sequence[BackwardPart], failures: Failures | None, keep_graph: bool
    ) -> list[Job]:
        """Send backwards under numbers of their own, in the turn of their experts, and count what is gathered."""
        wait_until_made(x for part in parts for x in (*part.grad_outputs, *part.inputs))
        encoding = self._delivery.settings.encodings.encoding("Backward")
        gives = [part.wants_weight_grads for part in parts]
        given = itertools.compress([part.call.expert for part in parts], gives)
        names = [name for name in given if self.hosted[name].update == "on_step"]
        with (
            self._delivery.operations.begin() as operation,
            self._updates.turns.turn("Backward", names, operation) as hindrance,
            self.numbering.sequences(len(parts)) as (sequences, settled_below),
        ):
            if hindrance is not None and failures is None:
                try:
                    raise hindrance
                finally:
                    del hindrance  # this frame is in the traceback
            jobs = []
            for part, sequence in zip(parts, sequences, strict=True):
                update = self.numbering.client_id, sequence, settled_below
                request = backward_request(update, part, keep_graph, encoding)
                jobs.append(Job(request, part.call.address, Outcome(error=hindrance), part.call.index))
            has_come_back, dropped = False, self._updates.dropped  # Ctrl-C may end it anywhere
            with uninterrupted() as section:  # or the next step would not know of what servers have
                try:
                    with section.opened():
                        # The last first, as in a loop's backward: one expert may be updated by several.
                        self._delivery.deliver("Backward", jobs[::-1], operation, failures)
                    has_come_back = True
                finally:
                    if hindrance is None:
                        self._updates.note_backwards(itertools.compress(jobs, gives), has_come_back, dropped)
            raise_if_unwanted(jobs, "backward", operation.cancellation)
        return jobs

    # ---- updates

    def update(self, rpc: str, names: Sequence[str], failures: list[RemoteError] | None = None) -> None:
        """Send `Step` or `ZeroGrad` to where gradients of these experts are; see `Updates.send`."""
        self._updates.send(rpc, names, failures)

    # ---- weights

    def fetch_states(self, names: Sequence[str]) -> dict[str, State]:
        """Return the `state_dict` of each named expert, by name."""
        names_at: dict[str, list[str]] = {}
        for name in names:
            is_trained = self.hosted[name].is_trained
            address = self._finding.home_of(name) if is_trained else self.address_of(name)
            names_at.setdefault(address, []).append(name)

        def once(channel: Channel, own: list[str], operation: Operation) -> dict[str, State]:
            layouts = {name: self.hosted[name].layout for name in own}
            try:
                return fetch_states(channel, layouts, operation)
            except CorruptDataError:  # a server that was started anew may have other layouts
                self._finding.look_briefly(operation)
                raise

        with self._delivery.operations.begin() as operation:
            found = self._delivery.at_each("GetState", names_at, once, operation, self._finding.moved)
        tell_of_left_out([self.hosted[name] for name in names], self._told_of_left_out)
        return {name: states[name] for states in found for name in states}

    @unwinding
    def send_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the `state_dict` of these experts on every server that hosts them; for each server all or none."""
        wait_until_made(x for state in states.values() for x in state.values())
        names_at: dict[str, list[str]] = {}
        for name in states:
            for address in self._finding.hosts_of(name):
                names_at.setdefault(address, []).append(name)
        with self.numbering.sequences(1) as ((sequence,), settled_below):
            update = pb.StateUpdate(
                client_id=self.numbering.client_id, sequence=sequence, settled_below=settled_below
            )

            def once(channel: Channel, own: list[str], operation: Operation) -> None:
                fitting = {n: as_hosted(states[n], self._layout_at(channel.address, n)) for n in own}
                reply = send_states(channel, fitting, update, operation)
                check_updates("SetState", channel, own, reply, operation)

            with self._delivery.operations.begin() as operation:
                moved = partial(self._finding.moved, to_all=True)
                self._delivery.at_each("SetState", names_at, once, operation, moved)

    def _layout_at(self, address: str, name: str) -> pb.StateLayout:
        """Return that of an expert's state on one server, as that said last: replicas may have other dtypes."""
        layout = self._finding.placement.layout_at(address, name)
        return self.hosted[name].layout if layout is None else layout


def _check_outputs(job: Job) -> None:
    """Let a forward fail whose outputs cannot be an expert's."""
    outcome = job.outcome
    if outcome.error is None and (
        wrong := mismatch_of_outputs(outcome.tensors, outcome.uses, is_sequence=outcome.is_sequence)
    ):
        place = f"expert {job.request.expert!r} at {job.address}, forward"
        job.outcome = Outcome(error=CorruptDataError(f"{place}: {wrong}"))
