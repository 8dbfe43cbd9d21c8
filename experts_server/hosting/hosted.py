"""One expert as the server holds it: a module that can be called, and trained once for each call that says so.

Rules:

1. *One at a time.* Whoever calls the methods here does so from one thread at a time (`batching` sees to it), so
   there is no lock, and an update never meets a forward.
2. *Gradients gather by client.* A step applies the gradients that the same client sent since its last
   `zero_grad`, as `torch.optim` does with `.grad`: the number of updates is the number of steps, whatever the
   timing between clients. A client that gave none makes no update.
3. *All or nothing.* A call is checked before it changes anything; new gradients are computed aside and take
   their place together, with the ledger's line. A refused call leaves every bit as it was.
4. *A graph is true until the next update.* Weights change in place, so an update lets go of the expert's kept
   graphs; a backward after it computes the forward again with the weights of now (asynchronous training), with
   the same random numbers.
5. *Joined calls are told apart.* Calls with equal `join_key` may be computed as one: rows after rows, and each call
   gets its own rows' outputs, input gradients and weight gradients. What is refused, is refused alone.

Here is the order of things. Modules are called in `calling`, gradients computed in `differentiating`, calls joined in
`joining`, what came of them taken in, once, in `intake`, and applied in `training`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from experts_server.budget import Budget
from experts_server.configuration.config import SAVING_NOTHING, MemoryConfig
from experts_server.hosting.calling import ModuleCaller
from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, Outputs, UpdateCall
from experts_server.hosting.checks import check_finite, check_grad_outputs, check_inputs, check_replica
from experts_server.hosting.differentiating import Differentiator
from experts_server.hosting.failing import FailureLog
from experts_server.hosting.gradients import Gradients
from experts_server.hosting.intake import Intake
from experts_server.hosting.joining import Joiner
from experts_server.hosting.kept import KeptForward, KeptForwards, OwnForwards
from experts_server.hosting.later import LaterGradients, Left
from experts_server.hosting.ledger import Ledger, Reply
from experts_server.hosting.offloading import Lodger, OffloadMemory
from experts_server.hosting.own_memory import OwnMemory, apart
from experts_server.hosting.training import Trainer, Training
from experts_server.spec import InputSpec
from moe_autograd.autograd.contents.compiled import is_compiled
from moe_autograd.autograd.in_turn import is_small
from moe_autograd.errors import InputsNeededError, RemoteError
from moe_autograd.wire import experts_pb2 as pb


@dataclass(frozen=True)
class SharedMemory:
    """What all experts of a server share: the forwards they keep and the memory they may use."""

    kept: KeptForwards
    gathered: Budget
    replies: Budget
    max_clients: int = 4096
    max_gathered_age_s: float = 3600.0
    offload: OffloadMemory | None = None


class HostedExpert:
    """A module that can be called and trained.

    Args:
        name: what clients call it.
        module: changed in place by training.
        training: `None`: the weights stay as they are; input gradients are computed all the same.
        memory: shared with the server's other experts.
        can_join: whether rows of several clients may be computed in one call of the module.
        eval_only: the module always computes as after `eval()`.
        saving: how it trades memory, time and waiting.
        failures: where they are logged; of all experts of a server, by default of this one.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        training: Training | None,
        memory: SharedMemory,
        *,
        can_join: bool = True,
        eval_only: bool = False,
        saving: MemoryConfig = SAVING_NOTHING,
        failures: FailureLog | None = None,
    ) -> None:
        self.name = name
        self.replica = secrets.randbits(63) | 1  # which of those of its name; goes with its state
        self.module = module
        self.failures = failures or FailureLog()
        self.caller = ModuleCaller(name, module, eval_only=eval_only, is_trained=training is not None)
        self.joiner = Joiner(self.caller, training, can_join=can_join)
        self._differentiator = Differentiator(self.caller, self.joiner)
        self.kept = OwnForwards(name, memory.kept)
        self.ledger = Ledger(memory.max_clients, memory.replies)
        self.trainer = None if training is None else self._make_trainer(training, memory)
        self._updates_at_once = training is not None and training.update == "on_backward"
        self._saving = saving
        later = None
        if saving.split_backward and self.trainer is not None:
            later = LaterGradients(name, self.trainer, self.ledger, self.failures)
        self._intake = Intake(name, self.trainer, self.ledger, later)
        self._lodger: Lodger | None = None
        if saving.offload and memory.offload is not None:
            self._lodger = Lodger(name, module, training.optimizer if training else None, memory.offload)
        self._may_compile = any(map(is_compiled, module.modules()))  # for seconds, at a call of another shape
        self._is_own = (self._lodger or OwnMemory(module)).holds

    def __repr__(self) -> str:
        return f"<HostedExpert {self.name!r} {self.trainer or 'not trained'}>"

    @property
    def training(self) -> Training | None:
        """How it is trained; `None`: it is not."""
        return None if self.trainer is None else self.trainer.training

    @property
    def spec(self) -> InputSpec:
        """What it takes, as far as its module tells."""
        return self.caller.spec_now

    @property
    def num_updates(self) -> int:
        """How many updates it has had."""
        return self._intake.num_updates

    def _make_trainer(self, training: Training, memory: SharedMemory) -> Trainer:
        return Trainer(
            self.name,
            training.weights_of(self.module),
            training,
            memory.gathered,
            max_age_s=memory.max_gathered_age_s,
            after_update=self.kept.remove_graphs,  # rule 4
            untrained=training.untrained_of(self.module),
        )

    # ---- memory

    def in_memory(self, *, for_update: bool) -> contextlib.AbstractContextManager[None]:
        """Be in memory inside; whatever uses the module's tensors, or the optimizer's for an update, does so inside."""
        return self._lodger.in_memory(for_update=for_update) if self._lodger else contextlib.nullcontext()

    def in_memory_for(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Be in memory inside, as far as a call uses what comes and goes."""
        for_update = not isinstance(call, ForwardCall)
        match call:
            case UpdateCall(kind="zero_grad") | BackwardCall(wants_nothing=True):
                return contextlib.nullcontext()
            case BackwardCall():
                for_update = self.training is not None and self.training.update != "on_step"
        return self.in_memory(for_update=for_update)

    @property
    def comes_and_goes(self) -> bool:
        """Whether it is not always in memory."""
        return self._lodger is not None

    @property
    def wants_hints(self) -> bool:
        """Whether it gains by knowing that it will be called soon."""
        return self._lodger is not None and self._saving.prefetch

    def prefetch(self) -> None:
        """Expect to be called soon; from any thread, returns at once."""
        if self._lodger is not None and self._saving.prefetch:
            self._lodger.prefetch()

    @property
    def has_left(self) -> bool:
        """Whether a backward has its answer, and `finish` is to come before anything else."""
        return self._intake.has_left

    def finish(self) -> None:
        """Do what was left for after the answers."""
        self._intake.finish()

    def check(self, call: ForwardCall | BackwardCall) -> None:
        """Raise `InvalidCallError` if this call cannot be right; nothing has changed then.

        Cheap, and called by whoever takes the call in; values are looked at when its turn comes.
        """
        check_inputs(self.name, self.caller.spec, call, self.module)

    def is_small(self, call: Call) -> bool:
        """Whether a call takes less time than a worker costs: it only computes, and its answer travels as it is."""
        given: Sequence[torch.Tensor | None] = ()
        evaluate = False
        if isinstance(call, ForwardCall):
            given, evaluate = call.inputs, call.evaluate
        elif isinstance(call, BackwardCall) and not (self._updates_at_once and call.wants_weight_grads):
            kept = self.kept.get(call.client_id, call.call_id)
            if len(call.grad_outputs) == 1:  # which may be small where inputs are large
                given = call.inputs or (() if kept is None else kept.inputs)
            evaluate = call.evaluate if kept is None else kept.evaluate
        is_here = self.caller.is_on_cpu and self._lodger is None and not self._may_compile
        is_at_once = is_here and not self._intake.is_in_parts and call.reply_encoding == pb.RAW
        if not is_at_once or not self.caller.is_in_mode(evaluate):
            return False  # in the other mode it may draw random numbers
        # Without rows it is as large as one row: its backward, too, has gradients of all weights.
        rows = [x if x.numel() else x.new_empty(x.shape[-1:]) for x in given if x is not None]
        return len(rows) == len(given) and is_small(self.module, rows)

    # ---- joining

    def join_key(self, call: Call) -> object:
        """Return what is equal for calls that may be computed as one; `None`: by itself."""
        if isinstance(call, ForwardCall):
            return self.joiner.forward_key(call)
        if isinstance(call, BackwardCall) and not call.wants_nothing:
            return self.joiner.backward_key(call, self.kept.get(call.client_id, call.call_id))
        return None

    # ---- forward

    def forward(self, calls: Sequence[ForwardCall]) -> list[Outputs]:
        """Compute one call, or several of equal `join_key`."""
        for call in calls:
            if not call.is_finite:
                check_finite(self.name, call.inputs, "input")
        if any(call.may_train for call in calls) or not self.caller.may_get_buffers:
            answers = self._forwards(calls)
        else:
            with self.caller.on_copies_of_buffers(calls[0].evaluate):
                answers = self._forwards(calls)
        for answer in answers:
            answer.tensors = apart(answer.tensors, self._is_own)
        return answers

    def _forwards(self, calls: Sequence[ForwardCall]) -> list[Outputs]:
        return [self._forward_alone(calls[0])] if len(calls) == 1 else self._forward_joined(calls)

    def _forward_alone(self, call: ForwardCall) -> Outputs:
        if not call.keep_graph:
            with torch.set_grad_enabled(False):  # as `no_grad`, and sooner
                answer = self.caller.call(call.inputs, call.evaluate, call.random_seed).detached()
            answer.has_drawn = self.caller.random.has_drawn
            return answer
        leaves = self.caller.leaves(call.inputs, call.input_requires_grad)
        seed = call.random_seed or self.caller.random.next_seed()
        knew = self.caller.changes_inputs
        if self._saving.recompute:
            # the first of its kind has its graph for a moment, which shows the `uses`
            with torch.set_grad_enabled(not self.caller.knows_uses(leaves, call.evaluate)):
                outputs = self.caller.call(leaves, call.evaluate, seed)
            kept = KeptForward(leaves, None, outputs.shapes, call.evaluate, seed)
        else:
            outputs, graph_bytes = self.caller.call_and_weigh(leaves, call.evaluate, seed)
            kept = KeptForward(leaves, outputs.tensors, outputs.shapes, call.evaluate, seed, 0, graph_bytes)
        answer = outputs.detached()
        answer.has_drawn = self.caller.random.has_drawn
        answer.uses = self.caller.uses_of(outputs, leaves, call.evaluate)
        if knew == self.caller.changes_inputs:  # else there are none to keep, and they will be sent again
            self._keep(call, kept)
        return answer

    def _forward_joined(self, calls: Sequence[ForwardCall]) -> list[Outputs]:
        has_backwards = any(call.keep_graph for call in calls)
        inputs = [call.inputs[0] for call in calls]
        shares = self.joiner.call(inputs, calls[0].evaluate, wants_uses=has_backwards)
        for call, outputs in zip(calls, shares, strict=True):
            if call.keep_graph:
                leaves = self.caller.leaves(call.inputs, call.input_requires_grad)
                self._keep(call, KeptForward(leaves, None, outputs.shapes, call.evaluate, call.random_seed))
        return shares

    def _keep(self, call: ForwardCall, kept: KeptForward) -> None:
        if call.is_cancelled:  # meanwhile; of one that is given up later its client says so
            return
        kept.input_bytes = call.num_bytes
        self.kept.put(call.client_id, call.call_id, kept)

    # ---- backward

    def backward(self, call: BackwardCall) -> Reply:
        """Return the gradients of the inputs; take in those of the weights where the call wants it."""
        if call.wants_nothing:
            self.kept.remove(call.client_id, call.call_id)
            return (None,) * len(call.wants_input_grads)
        if (known := self._intake.known_answer(call)) is not None:
            return known
        kept = self._kept_for(call)
        try:
            parameters = self._intake.trained_by([call])
            if self._intake.is_in_parts and not call.keep_graph and parameters:
                with contextlib.ExitStack() as hold:
                    hold.enter_context(self.in_memory(for_update=False))
                    answer, weigh = self._differentiator.in_parts(call, kept, parameters)
                    answer = apart(answer, self._is_own)
                    left = Left(call, kept.num_rows, answer, weigh, hold.pop_all())
                return self._answer_first(left)
            input_grads, weight_grads = self._differentiator.at_once(call, kept, parameters)
            return self._settle(call, kept, apart(input_grads, self._is_own), weight_grads)
        except BaseException:
            self.kept.remove_graph(call.client_id, call.call_id)  # its buffers may be used up
            raise

    def backward_joined(self, calls: Sequence[BackwardCall]) -> list[Reply | BaseException]:
        """Compute calls of equal `join_key`; return the answer, or the refusal, of each.

        Raises:
            ExpertFailedError: they cannot be computed together. Nothing has changed.
            BaseException: what the module's backward raised; likewise.
        """
        answers: dict[int, Reply | BaseException] = {}
        kept: dict[int, KeptForward] = {}
        for index, call in enumerate(calls):
            try:
                known = self._intake.known_answer(call)
                if known is None:
                    kept[index] = self._kept_for(call)
                else:
                    answers[index] = known
            except RemoteError as refusal:
                answers[index] = refusal
        those = [calls[index] for index in kept]
        found = self._differentiator.joined(those, list(kept.values()), self._intake.trained_by(those))
        for index, (input_grad, weigh) in zip(kept, found, strict=True):
            call = calls[index]
            try:
                answers[index] = self._answer_joined(call, kept[index], input_grad, weigh)
            except RemoteError as refusal:
                answers[index] = refusal
        return [answers[index] for index in range(len(calls))]

    def _answer_joined(
        self, call: BackwardCall, kept: KeptForward, input_grad: torch.Tensor, weigh: Callable[[], Gradients]
    ) -> Reply:
        """Return the answer to one of several calls; take in its share of what was computed together."""
        if (known := self._intake.known_answer(call)) is not None:  # a copy beside it was the first
            return known
        is_wanted = call.wants_input_grads[:1] == (True,) and kept.inputs[0].requires_grad
        share = (input_grad if is_wanted else None,)
        if self._intake.is_in_parts and self._intake.wants(call):
            return self._answer_first(Left(call, kept.num_rows, share, weigh, contextlib.ExitStack()))
        return self._settle(call, kept, share, weigh())

    def _kept_for(self, call: BackwardCall) -> KeptForward:
        """Return the forward that `call` is the backward of; the call's gradients fit it."""
        kept = self.kept.get(call.client_id, call.call_id) or self._kept_from(call)
        check_grad_outputs(self.name, call, kept.output_shapes)
        return kept

    def _settle(
        self, call: BackwardCall, kept: KeptForward, input_grads: Reply, weight_grads: Gradients
    ) -> Reply:
        """Take in what is not taken in yet, together with the ledger's line (rule 3); return the answer."""
        self._intake.take_in(call, weight_grads, kept.num_rows, input_grads)
        if not call.keep_graph:
            self.kept.remove(call.client_id, call.call_id)
        return input_grads

    def _kept_from(self, call: BackwardCall) -> KeptForward:
        """Make of the inputs that came again with a backward what would have been kept."""
        if call.inputs is None:
            raise InputsNeededError(
                f"expert {self.name!r}: expected a kept forward {call.call_id}, got none. Send its inputs again."
            )
        check_replica(self.name, self.replica, call)
        if not call.is_finite:
            check_finite(self.name, call.inputs, "input")
        leaves = self.caller.leaves(call.inputs, call.wants_input_grads)
        return KeptForward(leaves, None, None, call.evaluate, call.random_seed)

    def _answer_first(self, left: Left) -> Reply:
        self._intake.leave(left)
        if not left.call.keep_graph:
            self.kept.remove(left.call.client_id, left.call.call_id)
        return left.answer

    # ---- weights

    def update(self, call: UpdateCall) -> int:
        """Step, or forget gathered gradients; return the number of updates after it."""
        return self._intake.update(call)
