"""From a forward that was kept, and gradients of its outputs, to gradients of its inputs and of the weights.

At once; in two parts, the inputs' first; or those of several calls together. A graph that has gone is computed again,
with the same random numbers. Knows nothing of what is kept for how long, of clients, or of what becomes of gradients:
that is `hosted`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from experts_server.hosting.calling import ModuleCaller
from experts_server.hosting.calls import BackwardCall, on_cpu
from experts_server.hosting.checks import check_grad_outputs, check_same_shapes
from experts_server.hosting.gradients import Gradients, dense, differentiate
from experts_server.hosting.joining import Joiner
from experts_server.hosting.kept import KeptForward
from experts_server.hosting.ledger import Reply
from experts_server.hosting.randomness import BACKWARD, LATER
from moe_autograd.autograd.split_backward import split_backward
from moe_autograd.errors import InvalidCallError


class Differentiator:
    """Computes the gradients of one expert.

    Args:
        caller: of its module.
        joiner: for several calls.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, caller: ModuleCaller, joiner: Joiner) -> None:
        self._caller = caller
        self._joiner = joiner

    def __repr__(self) -> str:
        return f"<Differentiator of {self._caller.name!r}>"

    def at_once(
        self, call: BackwardCall, kept: KeptForward, parameters: Sequence[nn.Parameter]
    ) -> tuple[Reply, Gradients]:
        """Return the gradients of the inputs that are wanted, and of the parameters.

        Raises:
            ExpertFailedError: the module raised.
        """
        with self._caller.random.drawing(kept.random_seed, BACKWARD):
            roots, root_grads, wanted = self._starts_and_ends(call, kept)
            weights = _trained_now(parameters)
            targets = [*(kept.inputs[i] for i in wanted), *weights]
            if not roots or not targets:
                return (None,) * len(kept.inputs), [None] * len(parameters)
            try:
                found = differentiate(roots, root_grads, targets, retain_graph=call.keep_graph)
            except BaseException as error:
                raise self._caller.failure("backward", error) from error
        weight_grads = _of_all(parameters, weights, found[len(wanted) :])
        return _in_place_of(wanted, found, len(kept.inputs)), weight_grads

    def in_parts(
        self, call: BackwardCall, kept: KeptForward, parameters: Sequence[nn.Parameter]
    ) -> tuple[Reply, Callable[[], Gradients]]:
        """Return the gradients of the inputs, and what computes those of the parameters later.

        Raises:
            ExpertFailedError: the module raised.
        """
        seed, drawing = kept.random_seed, self._caller.random.drawing
        with drawing(seed, BACKWARD):
            roots, root_grads, wanted = self._starts_and_ends(call, kept)
            weights = _trained_now(parameters)
            try:
                found, pending = split_backward(roots, root_grads, [kept.inputs[i] for i in wanted], weights)
            except BaseException as error:
                raise self._caller.failure("backward", error) from error

        def weigh() -> Gradients:
            with drawing(seed, LATER):
                return _of_all(parameters, weights, pending.run())

        return _in_place_of(wanted, dense(found), len(kept.inputs)), weigh

    def joined(
        self, calls: Sequence[BackwardCall], kept: Sequence[KeptForward], parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Tensor, Callable[[], Gradients]]]:
        """Return, for each of several calls of equal key, what the joiner does.

        Raises:
            ExpertFailedError: they cannot be computed together.
            BaseException: what the module's backward raised.
        """
        if not calls:
            return []
        with self._caller.random.drawing():
            return self._joiner.differentiate(
                [forward.inputs[0] for forward in kept],
                [grad for call in calls for grad in call.grad_outputs if grad is not None],
                kept[0].evaluate,
                parameters,
            )

    def _starts_and_ends(
        self, call: BackwardCall, kept: KeptForward
    ) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return the outputs to start from, their gradients, and which inputs' gradients are wanted."""
        outputs = self._recomputed(call, kept) if kept.outputs is None else kept.outputs
        self._caller.set_mode(kept.evaluate)
        roots, root_grads = [], []
        is_on_cpu = self._caller.is_on_cpu
        for output, grad in zip(outputs, call.grad_outputs, strict=True):
            if grad is not None and output.requires_grad:
                roots.append(output)
                root_grads.append(grad if is_on_cpu and grad.dtype is output.dtype else grad.to(output))
        wants = call.wants_input_grads
        wanted = [i for i, x in enumerate(kept.inputs) if i < len(wants) and wants[i] and x.requires_grad]
        return roots, root_grads, wanted

    def _recomputed(self, call: BackwardCall, kept: KeptForward) -> tuple[Tensor, ...]:
        random = self._caller.random
        state = None if kept.random_seed else random.state()
        with torch.enable_grad():
            outputs = self._caller.call(kept.inputs, kept.evaluate, kept.random_seed)
        if random.has_moved_from(state):
            raise InvalidCallError(
                f"expert {self._caller.name!r}, backward: expected the random seed of a forward that is computed "
                "again, got none, and its module draws random numbers. Send one with the forward and with its inputs."
            )
        if kept.output_shapes is None:
            kept.output_shapes = outputs.shapes
            check_grad_outputs(self._caller.name, call, kept.output_shapes)
        check_same_shapes(self._caller.name, kept.output_shapes, outputs.shapes)
        return outputs.tensors


def _trained_now(parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """Return those that are not frozen: a forward may have changed which."""
    return [p for p in parameters if p.requires_grad]


def _of_all(parameters: Sequence[nn.Parameter], some: Sequence[nn.Parameter], grads: Gradients) -> Gradients:
    """Return a gradient for each parameter, `None` for those that are not among `some`, which are in their order."""
    if len(some) == len(parameters):
        return grads
    by_parameter = dict(zip(some, grads, strict=True))
    return [by_parameter.get(parameter) for parameter in parameters]


def _in_place_of(wanted: Sequence[int], found: Sequence[Tensor | None], num_inputs: int) -> Reply:
    """Return one gradient for each input, `None` for those that are not wanted."""
    by_input: list[Tensor | None] = [None] * num_inputs
    for index, grad in zip(wanted, found, strict=False):
        by_input[index] = None if grad is None else on_cpu(grad)
    return tuple(by_input)
