"""One expert as the server holds it: a module, its optimizer, and when the optimizer steps.

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
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from experts_server.budget import Budget
from experts_server.calls import BackwardCall, ForwardCall, Outputs, UpdateCall
from experts_server.gathered import GatheredGradients
from experts_server.gradients import (
    Gradients,
    GraphWeigher,
    added,
    clipped,
    first_not_finite,
    is_finite,
)
from experts_server.kept import KeptForward, KeptForwards, Key
from experts_server.ledger import Ledger, Reply
from experts_server.randomness import RandomStream
from experts_server.spec import infer_spec
from moe_autograd.errors import (
    ExpertFailedError,
    GradientsLostError,
    InputsNeededError,
    InvalidCallError,
    RemoteError,
)

MAX_KNOWN_SHAPES = 1024


@dataclass(frozen=True)
class Training:
    """How an expert is trained.

    Args:
        optimizer: made of the expert's parameters.
        update: `on_step`: gradients gather until the client's step; `on_backward`: each is applied at once.
        schedule: stepped once for each update.
        clip_grad_norm: the largest total norm of an update's gradients; `None`: any.
    """

    optimizer: torch.optim.Optimizer
    update: Literal["on_step", "on_backward"] = "on_step"
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    clip_grad_norm: float | None = None


@dataclass(frozen=True)
class SharedMemory:
    """What all experts of a server share: the forwards they keep and the memory they may use."""

    kept: KeptForwards
    gathered: Budget
    replies: Budget
    max_clients: int = 4096
    max_gathered_age_s: float = 3600.0


class HostedExpert:
    """A module that can be called and trained.

    Args:
        name: what clients call it.
        module: changed in place by training.
        training: `None`: the weights stay as they are; input gradients are computed all the same.
        memory: shared with the server's other experts.
        can_join: whether rows of several clients may be computed in one call of the module.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        training: Training | None,
        memory: SharedMemory,
        *,
        can_join: bool = True,
    ) -> None:
        self.name = name
        self.module = module
        self.training = training
        self.spec = infer_spec(module)
        self.can_join = can_join and self.spec.width is not None
        self.num_updates = 0
        self.parameters = [p for p in module.parameters() if p.requires_grad] if training else []
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._is_on_cpu = self.device.type == "cpu"
        self.ledger = Ledger(memory.max_clients, memory.replies)
        self.gathered = GatheredGradients(memory.gathered, memory.max_gathered_age_s)
        self._memory = memory
        self._kept_graphs: OrderedDict[Key, None] = OrderedDict()  # ours in memory.kept; may have gone there
        self._graph_bytes_per_row: dict[torch.Size, float] = {}  # by the shape of a row
        self.random = RandomStream(module)

    def __repr__(self) -> str:
        update = self.training.update if self.training else "not trained"
        return f"<HostedExpert {self.name!r} {update}, {self.num_updates} updates, {len(self.gathered)} gathering>"

    # ---- checking

    def check(self, call: ForwardCall | BackwardCall) -> None:
        """Raise `InvalidCallError` if this call cannot be right; nothing has changed then.

        Cheap, and called by whoever takes the call in; values are looked at when its turn comes.
        """
        inputs = call.inputs
        if inputs is None:
            return
        if not inputs:
            raise InvalidCallError(
                f"expert {self.name!r}: expected at least one tensor, got none. Pass its inputs."
            )
        if self.spec.is_certain:
            mismatch = self.spec.mismatch(self.name, inputs)
            if mismatch is not None:
                raise mismatch
        if isinstance(call, ForwardCall) and any(
            needs and not (x.is_floating_point() or x.is_complex())
            for x, needs in zip(inputs, call.input_requires_grad, strict=False)
        ):
            raise InvalidCallError(
                f"expert {self.name!r}: expected floating inputs where gradients are wanted, got "
                f"{[str(x.dtype) for x in inputs]}. Only floating tensors have gradients."
            )

    # ---- forward

    def forward(self, calls: Sequence[ForwardCall]) -> list[Outputs]:
        """Compute one call, or several whose rows are joined (see `batching`)."""
        for call in calls:
            self._check_finite(call.inputs, "input")
        return [self._forward_alone(calls[0])] if len(calls) == 1 else self._forward_joined(calls)

    def _forward_alone(self, call: ForwardCall) -> Outputs:
        if not call.keep_graph:
            with torch.no_grad():
                return self._call_module(call.inputs, call.evaluate)
        leaves = self._leaves(call.inputs, call.input_requires_grad)
        random_state = self.random.state()
        outputs, graph_bytes = self._call_and_weigh(leaves, call.evaluate)
        kept = KeptForward(leaves, outputs.tensors, outputs.shapes, call.evaluate, random_state)
        kept.input_bytes, kept.graph_bytes = call.num_bytes, graph_bytes
        key = (self.name, call.client_id, call.call_id)
        self._memory.kept.put(key, kept)
        self._note_graph(key)
        return outputs.detached()

    def _forward_joined(self, calls: Sequence[ForwardCall]) -> list[Outputs]:
        random_state = self.random.state()
        rows = [call.inputs[0].shape[0] for call in calls]
        with torch.no_grad():
            joined = self._call_module((torch.cat([call.inputs[0] for call in calls]),), calls[0].evaluate)
        pieces = zip(*(torch.split(tensor, rows) for tensor in joined.tensors), strict=True)
        results = [Outputs(tensors, joined.is_sequence) for tensors in pieces]
        for call, outputs in zip(calls, results, strict=True):
            if call.keep_graph:
                leaves = self._leaves(call.inputs, call.input_requires_grad)
                kept = KeptForward(leaves, None, outputs.shapes, call.evaluate, random_state)
                kept.input_bytes = call.num_bytes
                self._memory.kept.put((self.name, call.client_id, call.call_id), kept)
        return results

    def _leaves(self, inputs: tuple[Tensor, ...], requires_grad: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """Make leaves of tensors that are ours alone."""
        if not self._is_on_cpu:
            inputs = tuple(x.to(self.device) for x in inputs)
        for x, needs in zip(inputs, requires_grad, strict=False):
            if needs:
                x.requires_grad_()
        return inputs

    def _call_and_weigh(self, leaves: tuple[Tensor, ...], evaluate: bool) -> tuple[Outputs, int]:
        """Call the module with gradients on; return also how many bytes its graph holds.

        They are measured for the first call of a shape and scaled by the number of rows for later ones:
        measuring costs more than a small expert.
        """
        shape = leaves[0].shape
        row_shape, num_rows = shape[1:], max(1, shape[0]) if shape else 1
        known = self._graph_bytes_per_row.get(row_shape)
        if known is not None:
            return self._call_module(leaves, evaluate), int(known * num_rows)
        weigher = GraphWeigher([*self.module.parameters(), *self.module.buffers(), *leaves])
        with weigher.weighing():
            outputs = self._call_module(leaves, evaluate)
        if len(self._graph_bytes_per_row) >= MAX_KNOWN_SHAPES:
            self._graph_bytes_per_row.clear()
        self._graph_bytes_per_row[row_shape] = weigher.num_bytes / num_rows
        return outputs, weigher.num_bytes

    def _note_graph(self, key: Key) -> None:
        """Remember the kept graph, to let go of it at the next update; most recent last."""
        self._kept_graphs[key] = None
        if len(self._kept_graphs) > 2 * len(self._memory.kept) + 16:  # the oldest have gone from there
            self._kept_graphs.popitem(last=False)

    # ---- backward

    def backward(self, call: BackwardCall) -> Reply:
        """Return the gradients of the inputs; take in those of the weights where the call wants it."""
        takes_in = call.wants_weight_grads and self.training is not None
        if takes_in:
            applied = self.ledger.find(call.client_id, call.sequence, call.settled_below)
            if applied is not None and applied.reply is not None:
                return applied.reply
            takes_in = applied is None
        key = (self.name, call.client_id, call.call_id)
        kept = self._memory.kept.get(key) or self._kept_from(call)
        self._check_grad_outputs(call, kept)
        try:
            input_grads, weight_grads = self._differentiate(call, kept, takes_in)
            if takes_in:
                self._take_in(call, weight_grads)
                self.ledger.record(call.client_id, call.sequence, self.num_updates, input_grads)
        except BaseException:
            self._memory.kept.remove_graph(key)  # its buffers may be used up; the inputs stay for another try
            raise
        if not call.keep_graph:
            self._memory.kept.remove(key)
            self._kept_graphs.pop(key, None)
        return input_grads

    def _kept_from(self, call: BackwardCall) -> KeptForward:
        """Make of the inputs that came again with a backward what would have been kept."""
        if call.inputs is None:
            raise InputsNeededError(
                f"expert {self.name!r}: expected a kept forward {call.call_id}, got none. Send its inputs again."
            )
        self._check_finite(call.inputs, "input")
        return KeptForward(self._leaves(call.inputs, call.wants_input_grads), None, None, call.evaluate, None)

    def _check_grad_outputs(self, call: BackwardCall, kept: KeptForward) -> None:
        grads, shapes = call.grad_outputs, kept.output_shapes
        if shapes is not None:
            if len(grads) != len(shapes):
                raise InvalidCallError(
                    f"expert {self.name!r}: expected {len(shapes)} grad_outputs, one for each output, "
                    f"got {len(grads)}."
                )
            for index, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
                if grad is not None and grad.shape != shape:
                    raise InvalidCallError(
                        f"expert {self.name!r}: expected grad_outputs[{index}] of the output's shape "
                        f"{tuple(shape)}, got {tuple(grad.shape)} (dtype={grad.dtype})."
                    )
        self._check_finite(grads, "grad_outputs")

    def _differentiate(
        self, call: BackwardCall, kept: KeptForward, wants_weights: bool
    ) -> tuple[Reply, Gradients]:
        outputs = self._recomputed(call, kept) if kept.outputs is None else kept.outputs
        roots, root_grads = [], []
        for output, grad in zip(outputs, call.grad_outputs, strict=True):
            if grad is not None and output.requires_grad:
                roots.append(output)
                root_grads.append(grad if grad.dtype == output.dtype and self._is_on_cpu else grad.to(output))
        wants = call.wants_input_grads
        wanted = [i for i, x in enumerate(kept.inputs) if i < len(wants) and wants[i] and x.requires_grad]
        targets = [kept.inputs[i] for i in wanted]
        if wants_weights:
            targets += self.parameters
        by_input: list[Tensor | None] = [None] * len(kept.inputs)
        if not roots or not targets:
            return tuple(by_input), [None] * len(self.parameters)
        try:
            found = torch.autograd.grad(
                roots, targets, root_grads, retain_graph=call.keep_graph, allow_unused=True
            )
        except Exception as error:
            raise ExpertFailedError(_failure(self.name, "backward", error)) from error
        for index, grad in zip(wanted, found, strict=False):
            by_input[index] = grad
        return tuple(by_input), found[len(wanted) :]

    def _recomputed(self, call: BackwardCall, kept: KeptForward) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self.random.replaying(kept.random_state):
            outputs = self._call_module(kept.inputs, kept.evaluate)
        if kept.output_shapes is None:
            kept.output_shapes = outputs.shapes
            self._check_grad_outputs(call, kept)
        return outputs.tensors

    # ---- weights

    def _take_in(self, call: BackwardCall, new: Gradients) -> None:
        assert self.training is not None
        if self.training.update == "on_backward":
            self._check_finite(new, "weight gradient")
            self._update(new)
            return
        total = added(self.gathered.get(call.client_id), new)
        self._check_finite(total, "gathered weight gradient")
        self.gathered.put(call.client_id, total)

    def update(self, call: UpdateCall) -> int:
        """Step, or forget gathered gradients; return the number of updates after it."""
        applied = self.ledger.find(call.client_id, call.sequence, call.settled_below)
        if applied is not None:
            return applied.num_updates
        if call.kind == "zero_grad":
            self.gathered.forget(call.client_id)
        else:
            self._step(call)
        self.ledger.record(call.client_id, call.sequence, self.num_updates)
        return self.num_updates

    def _step(self, call: UpdateCall) -> None:
        if self.gathered.has_lost(call.client_id):
            raise GradientsLostError(
                f"expert {self.name!r}: expected a step within {self.gathered.max_age_s:g} s of the backward, got one "
                "later, when its gradients had been let go. Repeat the backward."
            )
        least, most = call.gathered or (0, math.inf)
        num_backwards = self.gathered.num_backwards(call.client_id)
        if not least <= num_backwards <= most:
            raise GradientsLostError(
                f"expert {self.name!r}: expected the gradients of {least} backwards, got those of {num_backwards}. "
                "The server was restarted since; nothing was changed. Call zero_grad and repeat forward and backward."
            )
        gathered = self.gathered.get(call.client_id)
        if gathered is not None:
            self._update(gathered)

    def _update(self, grads: Gradients) -> None:
        """Apply one update; a parameter without a gradient is skipped, as in torch."""
        assert self.training is not None
        if all(grad is None for grad in grads):
            return
        if self.training.clip_grad_norm is not None:
            grads = clipped(grads, self.training.clip_grad_norm)
        try:
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = grad
            self.training.optimizer.step()
            if self.training.schedule is not None:
                self.training.schedule.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            self.let_go_of_graphs()
        self.num_updates += 1

    def let_go_of_graphs(self) -> None:
        """Forget the kept graphs, because the weights have changed (rule 4); their inputs stay."""
        while self._kept_graphs:
            self._memory.kept.remove_graph(self._kept_graphs.popitem()[0])

    # ---- the module

    def _call_module(self, inputs: tuple[Tensor, ...], evaluate: bool) -> Outputs:
        module = self.module
        if module.training is evaluate:
            module.train(not evaluate)
        if not self._is_on_cpu:
            inputs = tuple(x.to(self.device) for x in inputs)
        try:
            if self.random.is_silent:
                result = module(*inputs)
            else:
                with self.random.drawing():
                    result = module(*inputs)
        except Exception as error:
            raise self._explain(inputs, error) from error
        if isinstance(result, Tensor):
            return Outputs((result,), is_sequence=False)
        if isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
            return Outputs(tuple(result), is_sequence=True)
        raise ExpertFailedError(
            f"expert {self.name!r}, forward: expected a tensor or a sequence of tensors from its module, got "
            f"{type(result).__name__}."
        )

    def _explain(self, inputs: tuple[Tensor, ...], error: Exception) -> RemoteError:
        if isinstance(error, RemoteError):
            return error
        return self.spec.mismatch(self.name, inputs) or ExpertFailedError(
            _failure(self.name, "forward", error)
        )

    def _check_finite(self, tensors: Gradients, what: str) -> None:
        if is_finite(tensors):
            return
        index = first_not_finite(tensors)
        bad = None if index is None else tensors[index]
        assert bad is not None, "the same values as a line above"
        num_bad = int((~bad.isfinite()).sum())
        raise InvalidCallError(
            f"expert {self.name!r}, {what} {index}: expected finite values, got {num_bad} of "
            f"{bad.numel()} that are not (shape={tuple(bad.shape)}). Nothing was changed."
        )


def _failure(name: str, phase: str, error: Exception) -> str:
    return f"expert {name!r}, {phase}: its module raised {type(error).__name__}: {error}"
