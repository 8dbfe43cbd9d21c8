"""Calling an expert's module: in its mode, on its device, with its own random numbers, and with its errors explained.

Knows nothing of clients, gradients that gather, or what is kept: it makes `Outputs` of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experts_server.hosting.calls import Outputs, num_rows
from experts_server.hosting.checks import check_calls, check_reached, check_weights
from experts_server.hosting.gradients import GraphWeigher
from experts_server.hosting.kept import SAVED_BYTES
from experts_server.hosting.randomness import RandomStream
from experts_server.hosting.separating import LateHooks, is_its_class, is_row_wise
from experts_server.spec import InputSpec, infer_spec
from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.modules.computed_from import uses_of
from moe_autograd.autograd.walks import gradient_edge
from moe_autograd.errors import ExpertFailedError, InvalidCallError, RemoteError
from moe_autograd.wire.status import told
from moe_autograd.wire.tensors import check_can_travel

MAX_KNOWN_SHAPES = 1024


class _Weight(NamedTuple):
    """What the graph and the outputs of a call of so many rows hold."""

    num_rows: int
    num_bytes: int


class ModuleCaller:
    """Calls one module.

    Args:
        name: the expert's, for errors.
        module: set to training or evaluation as each call wants it.
        eval_only: it always evaluates, whatever a call wants.
        is_trained: whether its weights get gradients.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self, name: str, module: nn.Module, *, eval_only: bool, is_trained: bool) -> None:
        self.name = name
        self._is_trained = is_trained
        self.eval_only = eval_only
        self.module = module
        self._modes: list[tuple[nn.Module, bool]] = []  # of all its parts, as they were when it last trained
        check_calls(f"expert {name!r}", module)
        check_weights(f"expert {name!r}", module)
        self.spec = infer_spec(module)  # as it was hosted
        self.random = RandomStream(name, module)
        self.changes_inputs = False  # in place; found out
        # By `evaluate`: whether it changes its buffers, as spectral normalization does; found out at the first call.
        self._with_buffers = _with_buffers(module)  # as of the last call
        self.changes_buffers = {} if self._with_buffers else {True: False, False: False}
        tensors = chain(module.parameters(), module.buffers())
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.is_on_cpu = self.device.type == "cpu"
        # Of the smallest and the largest call, by `evaluate` and the shape of a row.
        self._weights: dict[tuple[bool, torch.Size], tuple[_Weight, _Weight]] = {}
        # Which outputs were computed from which others, by the kind of a call, as the first graph of each has shown.
        self._uses: dict[object, tuple[int, ...]] = {}
        self._is_row_wise = is_row_wise(module)
        self._registers_none = self._is_row_wise or all(map(_registers_none, module.modules()))
        self.late_hooks = LateHooks(module)
        self.had_late_hooks = bool(self.late_hooks)  # as of the last look

    def __repr__(self) -> str:
        return f"<ModuleCaller of {self.name!r}, {type(self.module).__name__} on {self.device}>"

    @property
    def spec_now(self) -> InputSpec:
        """What the module takes, as far as it tells: as it was hosted, or with hooks that have come since."""
        return infer_spec(self.module) if self.late_hooks else self.spec

    @property
    def has_buffers(self) -> bool:
        """Whether there is something that a call might change."""
        return bool(self._with_buffers)

    @property
    def may_get_buffers(self) -> bool:
        """Whether there is such, or a call may register it, or a hook has."""
        return self.has_buffers or not self._registers_none or bool(self.late_hooks)

    def keeps_buffers(self, evaluate: bool) -> bool:
        """Whether calls are known to change no buffers, with the hooks that there are now.

        Those that have come since the last look may have brought some. Asked before joined calls only, as it takes a
        hundredth of a small call.
        """
        if bool(self.late_hooks) is not self.had_late_hooks:
            self.had_late_hooks = not self.had_late_hooks
            self._with_buffers, self.changes_buffers = _with_buffers(self.module), {}
        return not self.changes_buffers.get(evaluate, True)

    @property
    def _has_one_output(self) -> bool:
        return self._is_row_wise and not self.late_hooks

    def is_in_mode(self, evaluate: bool) -> bool:
        """Whether the module trains or evaluates as a call wants it."""
        return self.module.training is not (evaluate or self.eval_only)

    def knows_uses(self, inputs: Sequence[Tensor], evaluate: bool) -> bool:
        """Whether no graph is needed to say of a call which outputs were computed from which others."""
        return self._has_one_output or _kind_of_call(inputs, evaluate) in self._uses

    def uses_of(self, outputs: Outputs, inputs: Sequence[Tensor], evaluate: bool) -> tuple[int, ...]:
        """Return which outputs were computed from which others, as `Outputs` has it.

        Without a graph: as the first call with such inputs has shown. That one is also checked.

        Raises:
            ExpertFailedError: its graph leads to experts that are trained elsewhere.
        """
        if self._has_one_output:
            return ()
        kind = _kind_of_call(inputs, evaluate)
        edges = [gradient_edge(y)[:2] if y.requires_grad else None for y in outputs.tensors]
        if any(edges):
            if self._is_trained and kind not in self._uses:
                check_reached(f"expert {self.name!r}, forward", [edge for edge in edges if edge])
            if len(self._uses) >= MAX_KNOWN_SHAPES:
                self._uses.clear()
            pairs = [(place, used) for place, below in uses_of(edges).items() for used in below]
            self._uses[kind] = tuple(chain.from_iterable(pairs))
        uses = self._uses.get(kind, ())
        return uses if all(place < len(edges) for place in uses) else ()

    def set_mode(self, evaluate: bool) -> None:
        """Let the module train or evaluate; what it computes again by itself in a backward asks for that, too.

        A part that evaluated while the module trained, such as a frozen batch norm, does so again: no client's `eval()`
        is to change what others compute.
        """
        if self.is_in_mode(evaluate):
            return
        if self.module.training:
            self._modes = [(part, part.training) for part in self.module.modules()]
            self.module.eval()
            return
        self.module.train()
        for part, trains in self._modes:  # each before its own parts
            if part.training is not trains:
                part.train(trains)
        for part, trains in self._modes:  # a part of several has been set with each of them
            part.training = trains

    def call(self, inputs: tuple[Tensor, ...], evaluate: bool, seed: int = 0) -> Outputs:
        """Return the module's outputs; with a `seed`, of the random numbers that follow it.

        A module may change its inputs in place. That they are changed here as well happens at its first call at most:
        from then on it is given copies, as it is at once where autograd does not let it change leaves.

        Raises:
            InvalidCallError: it raised, and the inputs are not what it takes.
            ExpertFailedError: it raised, or returned something else than tensors that can be sent.
        """
        self.set_mode(evaluate)
        own = inputs
        if not self.is_on_cpu:
            own = tuple(x.to(self.device) for x in inputs)
        if self.changes_inputs:  # those that were there already
            own = tuple([x.clone() if x is given else x for x, given in zip(own, inputs, strict=True)])
        versions = _versions_of(inputs)
        looks = not self.changes_buffers.get(evaluate)
        buffers = self._buffers_now() if looks else {}
        try:
            if self.random.is_silent:
                result = self.module(*own)
            else:
                with self.random.drawing(seed):
                    result = self.module(*own)
        except BaseException as error:  # also `sys.exit`: it ends this call, and no worker
            is_refused = type(error) is RuntimeError and "in-place operation" in str(error)
            if not is_refused or self.changes_inputs or versions != _versions_of(inputs):
                raise self._explain(inputs, error) from error
            self.changes_inputs = True
            return self.call(inputs, evaluate, seed)
        finally:
            if self.had_late_hooks or not self._registers_none:
                self._with_buffers = _with_buffers(self.module)
        if versions != _versions_of(inputs):
            self.changes_inputs = True
        if looks:
            self.changes_buffers[evaluate] = buffers != self._buffers_now()
        return self._outputs_of(result)

    @contextmanager
    def on_copies_of_buffers(self, evaluate: bool) -> Iterator[None]:
        """Let the module change copies of its buffers inside; afterwards it has those from before, bit for bit.

        Whatever it does to them (in place, also by `.data`, or another one in its place) and also if it raises. As they
        are not written to, graphs that have saved them stay true. Torch's own modules without hooks change none in
        evaluation, and keep theirs; of others that is not known: they may do so at any call, though they have not
        before.
        """
        self.set_mode(evaluate)
        parts = [
            part
            for part in self.module.modules()
            if (part.training or not _is_torchs(part)) and (part._buffers or not _registers_none(part))
        ]
        # By `items` and one by one: the buffers of what `torch.jit` has scripted are in no dictionary.
        before = [(part._buffers, dict(part._buffers.items())) for part in parts]
        copies = {b: b.detach().clone() for _, own in before for b in own.values() if b is not None}
        try:
            for buffers, own in before:
                for key, b in own.items():
                    buffers[key] = None if b is None else copies[b]
            yield
        finally:
            for buffers, own in before:
                for key in [key for key, _ in buffers.items() if key not in own]:
                    del buffers[key]
                for key, b in own.items():
                    buffers[key] = b

    def _buffers_now(self) -> dict[Tensor, int]:
        """Return what is another after each change of a buffer. Held, a tensor leaves its place to no other."""
        found = (b for part in self._with_buffers for b in part._buffers.values() if b is not None)
        return {buffer: buffer.is_inference() or buffer._version for buffer in found}

    def _outputs_of(self, result: object) -> Outputs:
        if isinstance(result, Tensor):
            outputs = Outputs((result,), is_sequence=False)
        elif isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
            outputs = Outputs(tuple(result), is_sequence=True)
        else:
            raise ExpertFailedError(
                f"expert {self.name!r}, forward: expected a tensor or a sequence of tensors from its module, got "
                f"{_kind_of(result)}. Let it return those alone."
            )
        try:
            for tensor in outputs.tensors:
                check_can_travel(tensor)
        except TypeError as error:
            raise ExpertFailedError(
                f"expert {self.name!r}, forward, an output of its module: {error}"
            ) from error
        return outputs

    def call_and_weigh(self, leaves: tuple[Tensor, ...], evaluate: bool, seed: int) -> tuple[Outputs, int]:
        """Call the module with gradients on; return also how many bytes its graph and its outputs hold.

        Measuring costs more than a small expert. So it is done for calls that have more rows, or fewer, than any of
        this shape before; what is between two measured ones is taken from the straight line between them. That is
        never too little: what a graph holds is there for any number of rows, grows with them, or, as in attention,
        faster than they do.
        """
        kind, rows = (evaluate, leaves[0].shape[1:]), num_rows(leaves[0])
        known = self._weights.get(kind)
        # on, whatever a module has left on this thread (`torch.set_grad_enabled(False)` in its file)
        with torch.set_grad_enabled(True):  # as `enable_grad`, and sooner
            if known is not None and known[0].num_rows <= rows <= known[1].num_rows:
                return self.call(leaves, evaluate, seed), _between(*known, rows)
            weigher = GraphWeigher([*self.module.parameters(), *self.module.buffers(), *leaves])
            with weigher.weighing():
                outputs = self.call(leaves, evaluate, seed)
        for tensor in outputs.tensors:
            weigher.weigh(tensor)
        if len(self._weights) >= MAX_KNOWN_SHAPES:
            self._weights.clear()
        weight = _Weight(rows, weigher.num_bytes + SAVED_BYTES * weigher.num_saved)
        weights = [weight, *(known or ())]
        self._weights[kind] = min(weights), max(weights)
        return outputs, weight.num_bytes

    def leaves(self, inputs: tuple[Tensor, ...], requires_grad: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """Make leaves of tensors that are ours alone."""
        if not self.is_on_cpu:
            inputs = tuple(x.to(self.device) for x in inputs)
        for x, needs in zip(inputs, requires_grad, strict=False):
            if needs:
                x.requires_grad_()
        return inputs

    def failure(self, phase: str, error: BaseException) -> ExpertFailedError:
        """Return what says that the module raised `error`."""
        return ExpertFailedError(f"expert {self.name!r}, {phase}: its module raised {told(error)}")

    def _explain(self, inputs: tuple[Tensor, ...], error: BaseException) -> RemoteError:
        failure = self.failure("forward", error)
        spec = self.spec_now
        likely = None if spec.width is None else spec.mismatch(self.name, inputs[0])
        return failure if likely is None else InvalidCallError(f"{likely} Its module raised {told(error)}")


def _kind_of_call(inputs: Sequence[Tensor], evaluate: bool) -> object:
    """Return what is equal for calls in which the same outputs are computed from the same others, most likely."""
    return evaluate, *[(x.requires_grad, x.shape[1:]) for x in inputs]


def _versions_of(tensors: tuple[Tensor, ...]) -> list[int]:
    """Return what grows with each change in place."""
    return [tensor._version for tensor in tensors]


def _with_buffers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if part._buffers]


def _registers_none(part: nn.Module) -> bool:
    return _is_torchs(part) or isinstance(part, torch.jit.ScriptModule)  # which cannot


def _is_torchs(part: nn.Module) -> bool:
    is_bare = type(part) is nn.Module  # whatever somebody has put into it
    return type(part).__module__.startswith("torch.nn.modules.") and not is_bare and is_its_class(part)


def _between(fewest: _Weight, most: _Weight, num_rows: int) -> int:
    """Return the bytes that the straight line between two weights has at `num_rows`."""
    more_rows = max(1, most.num_rows - fewest.num_rows)
    return fewest.num_bytes + (most.num_bytes - fewest.num_bytes) * (num_rows - fewest.num_rows) // more_rows


def _kind_of(result: object) -> str:
    """Name what a module returned; of a sequence, what is in it."""
    kind = type(result).__name__
    if not isinstance(result, (tuple, list)):
        return kind
    return f"a {kind} of {', '.join(dict.fromkeys(type(item).__name__ for item in result))}"
