"""Computing several calls as one: which may be, and how each gets its own share of what comes of it.

Rows go after rows through one call of the module. What each call is owed is told apart like this:

- *Outputs and input gradients* are the call's own rows, as long as a row's result depends on no other row. A module
  that mixes rows (batch normalization, or `can_join = false`) is never joined. Of one that nobody knows, joined calls
  are computed alone as well, the first and the last, at the 1st, 2nd, 4th, 8th, ... time: if what they get is not what
  they got together, up to rounding, nothing of this expert is joined any more.
- *Random numbers* of a call cannot be told apart, and its backward has to draw the same again. So a module that draws
  some is found out, and from then on computed call by call in training.
- *Buffers* that a module changes (spectral normalization, moving averages) go on with each call. So a module that has
  buffers is computed alone the first time, also after hooks have come, and if it changed them, always. Calls that must
  not change them are joined with their like, should it change them after all.
- *Weight gradients* gather by client, while a joined backward gives their sum. They are told apart where `separating`
  knows how; elsewhere such backwards are computed one by one.
- *A backward that has its graph* is quicker alone. The others compute their forward again, which they may do as one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from experts_server.hosting.calling import ModuleCaller
from experts_server.hosting.calls import BackwardCall, ForwardCall, Outputs, on_cpu
from experts_server.hosting.gradients import Gradients
from experts_server.hosting.kept import KeptForward
from experts_server.hosting.separating import LinearTape, is_row_wise, is_separable
from experts_server.hosting.training import Training
from moe_autograd.errors import ExpertFailedError


class Joiner:
    """Computes calls of one expert as one.

    Args:
        caller: of the expert's module.
        training: how the expert is trained; `None`: it is not.
        can_join: whether a row's result depends on no other row.

    Threads: one at a time, as the expert itself; keys may be asked for from any.
    """

    def __init__(self, caller: ModuleCaller, training: Training | None, *, can_join: bool) -> None:
        self.can_join = can_join and caller.spec.width is not None and not _mixes_rows(caller.module)
        self.draws_random_numbers = False  # in training; found out
        self._is_known = is_row_wise(caller.module)  # as long as no hooks come
        self._had_late_hooks = False
        self._num_joined = 0
        self._caller = caller
        self._can_take_in = (
            training is not None and training.update == "on_step" and is_separable(caller.module)
        )
        self._is_trained = training is not None

    def __repr__(self) -> str:
        return f"<Joiner of {self._caller.name!r}, {'joins' if self.can_join else 'joins nothing'}>"

    # ---- which

    def forward_key(self, call: ForwardCall) -> object:
        """Return what is equal for forwards that may be computed as one; `None`: by itself."""
        rows = None if len(call.inputs) != 1 else self._row_key(call.inputs[0], call.evaluate)
        return rows and (rows, call.may_train or not self._caller.has_buffers)

    def backward_key(self, call: BackwardCall, kept: KeptForward | None) -> object:
        """Return what is equal for backwards that may be computed as one; `None`: by itself."""
        inputs = call.inputs if kept is None else kept.inputs
        if inputs is None or len(inputs) != 1 or len(call.grad_outputs) != 1 or call.grad_outputs[0] is None:
            return None
        takes_in = call.wants_weight_grads and self._is_trained
        has_graph = kept is not None and kept.outputs is not None
        if has_graph or (takes_in and not (self._can_take_in and not self._caller.late_hooks)):
            return None
        rows = self._row_key(inputs[0], call.evaluate if kept is None else kept.evaluate)
        grad = call.grad_outputs[0]
        if rows is None or grad.shape[:1] != inputs[0].shape[:1]:
            return None
        return rows, takes_in, grad.dtype, grad.shape[1:]

    def _row_key(self, x: Tensor, evaluate: bool) -> object:
        if not self.can_join or x.dim() < 2 or (self.draws_random_numbers and not evaluate):
            return None
        if self._caller.changes_buffers.get(evaluate, True):
            return None
        if self._caller.spec.mismatch(self._caller.name, x) is not None:
            return None
        return evaluate, x.dtype, x.shape[1:]

    # ---- how

    def call(self, inputs: Sequence[Tensor], evaluate: bool, *, wants_uses: bool = False) -> list[Outputs]:
        """Call the module once for the rows of several inputs; return what each would have got, without a graph.

        Raises:
            ExpertFailedError: they cannot be told apart.
        """
        sizes = [x.shape[0] for x in inputs]
        x = torch.cat(list(inputs))
        x.requires_grad_(wants_uses and (x.is_floating_point() or x.is_complex()))
        with torch.set_grad_enabled(wants_uses and not self._caller.knows_uses((x,), evaluate)):
            outputs = self._call_silently(x, evaluate)
        joined = outputs.detached()
        joined.uses = self._caller.uses_of(outputs, (x,), evaluate) if wants_uses else ()
        self._check_shares(x, joined, sizes, evaluate)
        shares = zip(*(torch.split(on_cpu(tensor), sizes) for tensor in joined.tensors), strict=True)
        return [Outputs(tensors, joined.is_sequence, uses=joined.uses) for tensors in shares]

    def differentiate(
        self,
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor],
        evaluate: bool,
        parameters: Sequence[nn.Parameter],
    ) -> list[tuple[Tensor, Callable[[], Gradients]]]:
        """Compute forward and backward at once; return each call's input gradient and what computes the weights'.

        Args:
            inputs: one for each call.
            grad_outputs: one for each call.
            evaluate: for all of them.
            parameters: whose gradients are wanted; if there are any, the module was separable as it was built.

        Raises:
            ExpertFailedError: they cannot be told apart.
            BaseException: whatever the module's backward raises; alone, each call finds out for itself.
        """
        if parameters and not is_separable(self._caller.module):
            raise ExpertFailedError(
                f"expert {self._caller.name!r}: expected the parts and weights that it was hosted with in a joined "
                "backward, got others. Nothing is lost: its calls are computed one by one."
            )
        x = torch.cat([x.detach() for x in inputs]).requires_grad_()
        tape = LinearTape(self._caller.module)
        with torch.enable_grad(), tape.recording() if parameters else contextlib.nullcontext():
            outputs = self._call_silently(x, evaluate)
        self._check_shares(x, outputs, [x.shape[0] for x in inputs], evaluate)
        (output,) = outputs.tensors
        x_grad, *layer_grads = torch.autograd.grad(
            output, [x, *tape.outputs], torch.cat(list(grad_outputs)).to(output), allow_unused=True
        )
        ends = list(itertools.accumulate(x.shape[0] for x in inputs))
        rows = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
        found = on_cpu(torch.zeros_like(x) if x_grad is None else x_grad)
        shares = [found[own].clone() for own in rows]
        return [
            (share, functools.partial(tape.separate, layer_grads, own, parameters))
            for share, own in zip(shares, rows, strict=True)
        ]

    def _check_shares(self, x: Tensor, joined: Outputs, sizes: Sequence[int], evaluate: bool) -> None:
        """Compute the first and the last call alone, from time to time, and raise where they would get something else.

        Raises:
            ExpertFailedError: a row's result depends on other rows. Nothing is joined any more.
        """
        has_late_hooks = self._caller.had_late_hooks  # just looked at
        if has_late_hooks is not self._had_late_hooks:  # what was found out may be so no more
            self._num_joined, self._had_late_hooks = 0, has_late_hooks
        self._num_joined += 1
        if self._num_joined & (self._num_joined - 1) or (self._is_known and not has_late_hooks):
            return
        for own in (slice(0, sizes[0]), slice(x.shape[0] - sizes[-1], x.shape[0])):
            with torch.no_grad():
                alone = self._caller.call((x[own].clone(),), evaluate)
            if not all(_are_close(y[own], z) for y, z in zip(joined.tensors, alone.tensors, strict=True)):
                self.can_join = False
                raise ExpertFailedError(
                    f"expert {self._caller.name!r}: expected results of rows that depend on no other row of a joined "
                    "call, got others. Nothing is lost: its calls are computed one by one. Set can_join = false."
                )

    def _call_silently(self, x: Tensor, evaluate: bool) -> Outputs:
        if not self._caller.keeps_buffers(evaluate):
            raise ExpertFailedError(
                f"expert {self._caller.name!r}: expected joined calls that are known to change no buffers, got some "
                "that do, or may since hooks have come. Nothing is lost: its calls are computed one by one."
            )
        random = self._caller.random
        state = random.state()
        outputs = self._caller.call((x,), evaluate)
        if random.has_moved_from(state):
            random.set_state(state)
            self.draws_random_numbers = True
            raise ExpertFailedError(
                f"expert {self._caller.name!r}: expected no random numbers in a joined call, got some. "
                "Nothing is lost: its calls are computed one by one."
            )
        for tensor in outputs.tensors:
            if tensor.shape[:1] != x.shape[:1]:
                raise ExpertFailedError(
                    f"expert {self._caller.name!r}: expected {x.shape[0]} rows for as many joined ones, got "
                    f"{tuple(tensor.shape)}. Set can_join = false."
                )
        return outputs


def _are_close(joined: Tensor, alone: Tensor) -> bool:
    """Whether rows are the same up to the rounding of other orders of summation."""
    if joined.shape != alone.shape or not alone.numel():
        return joined.shape == alone.shape
    if not (alone.is_floating_point() or alone.is_complex()):
        return torch.equal(joined, alone)
    tolerance = torch.finfo(alone.dtype).eps ** 0.5
    largest = float(alone.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(joined, alone, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _mixes_rows(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
