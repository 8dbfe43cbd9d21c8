"""More experts than memory: a sequence of modules whose weights, gradients and optimizer state come and go.

What is in memory during a step of four experts, where the limit lets two in (w weights, g gradients, s state)::

                 forward                        backward                   step
    expert 0   w───┐                                        w g──┐       w g s───┐
    expert 1     w─┼─┐                              w g───┐  ·   │          w g s┼──┐
    expert 2       w─┼──┐                     w g───┐ ·   │      │               w g s──┐
    expert 3         w──┼───────────────  w g───┐ · │     │      │                  w g s──┐
               time ▶    the next is read while one computes; what was changed is written behind it

The same expert is last in a forward and first in the backward, so it is not read again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_autograd._interrupts import unwinding
from moe_autograd._random import running, take_places
from moe_autograd.autograd.anchors import anchor_of_call, new_anchor
from moe_autograd.autograd.hooks import before_backward
from moe_autograd.autograd.offload.call import OffloadedCall
from moe_autograd.autograd.offload.checks import (
    check_hooks,
    check_memory,
    check_training,
    each_module,
    refuse_gradients_from_elsewhere,
    refuse_late_state,
)
from moe_autograd.autograd.offload.drawing import drawing_in_backwards
from moe_autograd.autograd.offload.expert import OffloadedExpert
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import prefetch_in_each
from moe_autograd.autograd.offload.shared import SharedResidency
from moe_autograd.autograd.offload.stores import Store
from moe_autograd.autograd.uncompiled import uncompiled


class OffloadedExperts(Sequence[OffloadedExpert]):
    """A sequence of experts of which only some are in memory.

    Weights, gradients and optimizer state live in a store. They come in for a forward, a backward or an update and
    leave again, least recently used first. Results and gradients are those of the plain modules; the gradients are
    gathered here and not in `.grad`, and `step` here updates the weights.

    Args:
        experts: modules; give a generator if they don't fit into memory together. They are emptied.
        optimizer: a function from parameters to a `torch.optim.Optimizer`, called once for each expert; `None` if
            they are not trained. State of an earlier training is loaded in it, before it returns.
        max_resident_bytes: for weights, gradients, optimizer state and moved activations together. What one
            expert needs for an update has to fit: weights, gradients and state.
        store: "ram" for host memory (pinned, for experts on a GPU), a folder for files, or a `Store`.
        beside: share limit and store with another layer's experts, instead of `max_resident_bytes` and `store`.
            Their checkpoints are one.
        num_microbatches: call experts on so many slices of their rows in turn; what a slice saved for its backward
            moves to the store too. Only for experts that treat rows alone (no batch norm). Every tensor with as many
            rows as the call's first one is cut: give one that has no rows a first size of 1 (`scale[None]`), or keep it
            in the module. `None`: activations stay in memory and are not counted.
        update: "on_step" when `step` is called; "on_backward": in every backward, each expert as soon as its gradients
            are complete. They never go to the store then, and reading and writing for the update hide behind the
            backward; but nothing can be done with them before (clipping, adding up those of several backwards).
        device: move the experts there; `None` leaves them on theirs.

    Raises:
        ValueError: an expert exceeds the limit (state that its optimizer makes later: at the first step), or hooks of
            a weight wait for `.grad`. Options that do not fit together. `store` is another spelling of "ram", or
            begins with "~".
        TypeError: an expert is no module, or has a tensor that is sparse, or of a dtype that safetensors has not
            (complex128); `optimizer` is no function, but an optimizer, for one, or returns none, or one that wants a
            closure or sparse gradients (LBFGS, SparseAdam), or has state that shares memory; `store` is none; `beside`
            is something else.
        RuntimeError: other experts use the folder, in this process or another; or the system has no thread to give.

    Autograd: an expert is one node of the graph. What it saves goes to the caller's saved-tensor hooks, if there
    are any, except for weights, which are found again by place. `step` between a forward and its backward makes
    that backward raise, and so does a gradient that comes to a weight by another use. The gradient is not
    differentiable a second time. Hooks run as ever, but for tensor hooks on weights: these run once for each call
    (and slice of its rows), with what that call adds to the gradient.

    Threads: any thread may call experts, also one expert from several; `step`, `zero_grad` and `checkpoint` belong
    where no forward or backward runs. With `update="on_backward"` a backward is a `step`, too.

    Example:
        >>> experts = OffloadedExperts(
        ...     (torch.nn.Linear(8, 8) for _ in range(100)),
        ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     max_resident_bytes=2048,
        ... )
        >>> x = torch.randn(4, 8)
        >>> sum(expert(x) for expert in experts).sum().backward()
        >>> experts.step()
        >>> experts.resident_bytes <= 2048
        True
    """

    def __init__(
        self,
        experts: Iterable[nn.Module],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        *,
        max_resident_bytes: int | None = None,
        store: Literal["ram"] | str | Path | Store = "ram",
        beside: OffloadedExperts | None = None,
        num_microbatches: int | None = None,
        update: Literal["on_step", "on_backward"] = "on_step",
        device: torch.device | str | None = None,
    ) -> None:
        check_training(optimizer, num_microbatches, update)
        check_memory(max_resident_bytes, beside, store)
        if not isinstance(beside, OffloadedExperts | None):
            raise TypeError(
                f"OffloadedExperts: expected beside to be the OffloadedExperts of another layer, got "
                f"{type(beside).__name__}. Of a layer that is made of them, pass those."
            )
        self._num_microbatches = num_microbatches
        self._anchor = new_anchor() if optimizer else None
        modules = (module if device is None else module.to(device) for module in each_module(experts))
        first = next(modules, None)
        if first is None:
            raise ValueError("OffloadedExperts: expected at least one expert, got none.")
        if max_resident_bytes is not None:
            self._shared = SharedResidency(max_resident_bytes, store, _device_of(first))
        elif beside is not None:
            self._shared = beside._shared
        self.residency = self._shared.residency
        self._held: list[HeldExpert] = []
        try:
            for module in itertools.chain([first], modules):
                self._take_in(module, optimizer, update == "on_backward")
        except BaseException:
            self._shared.give_up(self._held)
            if beside is None:
                self._shared.close()
            raise
        self._experts = [OffloadedExpert(self, held) for held in self._held]
        self._last_called: Sequence[HeldExpert] = self._held
        self._below: OffloadedExperts | None = None
        self._above: OffloadedExperts | None = None

    def _take_in(
        self,
        module: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
        updates_on_backward: bool,
    ) -> None:
        name = f"expert-{len(self._shared.held):05}"
        check_hooks(name, dict(module.named_parameters()))
        held = HeldExpert(name, module, optimizer, self.residency, updates_on_backward)
        if held.optimizer is not None:
            refuse_late_state(name, held.optimizer)
            refuse_gradients_from_elsewhere(name, held.parameters)
        self._held.append(held)
        self._shared.held.append(held)

    def __len__(self) -> int:
        return len(self._experts)

    @overload
    def __getitem__(self, index: int) -> OffloadedExpert: ...
    @overload
    def __getitem__(self, index: slice) -> list[OffloadedExpert]: ...
    def __getitem__(self, index: int | slice) -> OffloadedExpert | list[OffloadedExpert]:
        return self._experts[index]

    __hash__ = object.__hash__  # a group is told from another by identity

    def __repr__(self) -> str:
        return f"OffloadedExperts({len(self)} experts, {self.residency!r})"

    def __enter__(self) -> OffloadedExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def resident_bytes(self) -> int:
        """What is in memory now."""
        return self.residency.resident_bytes

    @property
    def optimizers(self) -> list[Optimizer]:
        """The experts' optimizers, for schedules and hooks of their steps.

        Their tensors are empty while absent; their own `step` and `load_state_dict` raise.
        """
        return [held.optimizer for held in self._held if held.optimizer]

    def close(self) -> None:
        """End the threads that read and write. The experts, and those beside them, can't be called any more."""
        self._shared.close()

    # calls

    def call_together(
        self,
        modules: Sequence[nn.Module],
        inputs: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """Call some of the experts one after the other, while the next is read; all those of a layer, or one."""
        experts = cast(Sequence[OffloadedExpert], modules)
        called = [expert._held for expert in experts]
        if len(called) > 1:
            self._forget_wishes_beside(called)
        self.residency.prefetch([held.weights for held in called])
        if (above := self._above) is not None:  # closed or not, which is no business of these
            above.residency.prefetch([held.weights for held in above._last_called])
        results = []
        drawing_of = drawing_in_backwards()
        own_index, indices = running.index, take_places(len(called))
        try:
            for i, expert in enumerate(experts):  # in the order given: random numbers may depend on it
                running.index = indices[i]
                call = OffloadedCall(
                    called[i],
                    self._num_microbatches,
                    _backward_order(called[:i]),
                    expert._recompute,
                    drawing_of(indices[i]),
                )
                anchor = anchor_of_call(self._anchor, expert.is_trained)
                results.append(call.apply(inputs[i], kwargs[i], anchor))
        finally:
            running.index = own_index
        self._last_called = called
        if (below := self._below) is not None:
            wanted = [(layer.residency, _backward_order(layer._last_called)) for layer in (self, below)]
            before_backward(results, functools.partial(prefetch_in_each, wanted))
        return results

    def _forget_wishes_beside(self, called: Sequence[HeldExpert]) -> None:
        """Let what was read ahead for experts that are not called this time give room."""
        names = {held.name for held in called}
        self.residency.forget_wishes(held.weights for held in self._held if held.name not in names)

    def prefetch(self) -> None:
        """Start to read the experts called last, as far as there is room; `RuntimeError` if they are closed."""
        self.residency.check_is_open()
        self.residency.prefetch([held.weights for held in self._last_called])

    # training

    @uncompiled
    @unwinding
    def step(self) -> None:
        """Update every expert that has gradients, as its optimizer does; those in memory first.

        Repeat it if it raises: it goes on where it stopped, and updates no expert twice by the same gradients. So it
        leaves out one whose optimizer raised (a note of the exception names it): that may have updated some weights.

        Raises:
            ValueError: an expert's state, which its optimizer makes in its first step, exceeds the limit.
            TypeError: a tensor of that state shares memory with another that the optimizer keeps.
            OSError: the store failed.
            RuntimeError: the experts are closed, or this process is a fork.
            Exception: whatever an optimizer, or a hook of its step, raises.
        """
        self.residency.check_is_open()
        for held in self._held:
            held.make_room_for_state()
        order = self._to_update()
        above = self._above._to_update() if self._above is not None else []
        prefetch_in_each((held.residency, held.parts_to_update()) for held in (*order, *above))
        for held in order:
            held.step()
        for held in self._held:
            held.is_updated = False

    def _to_update(self) -> list[HeldExpert]:
        """Those with gradients: those in memory, then the others from last to first, which the next forward wants."""
        order = [held for held in reversed(self._held) if held.is_to_be_updated]
        return sorted(order, key=lambda held: held.weights.buffer is None)

    @uncompiled
    def zero_grad(self) -> None:
        """Forget all gradients, and what a `step` that raised has left to do.

        Raises:
            RuntimeError: the experts are closed, or this process is a fork.
        """
        self.residency.check_is_open()
        self.residency.forget_wishes()
        for held in self._held:
            held.forget_gradients()

    @unwinding
    def gradients(self, index: int) -> dict[str, Tensor | None]:
        """Return a copy of what was gathered for an expert's parameters, by name.

        To change gradients, as clipping does, register a hook of the steps of `optimizers`: it sees them in `.grad`.

        Returns:
            Tensors of the parameters' shapes, of their `grad_dtype`, on the CPU; `None` where nothing was gathered.

        Raises:
            OSError: the store failed.
            RuntimeError: the experts are closed, or this process is a fork.
        """
        self.residency.check_is_open()
        return self._held[index].copy_of_gradients()

    @unwinding
    def state_dict(self, index: int) -> dict[str, Any]:
        """Return a copy of an expert's parameters and buffers, as the plain module's `state_dict` has them.

        Returns:
            Tensors on the CPU; what `get_extra_state` returns as it is; versions of parts, where torch has them.

        Raises:
            OSError: the store failed.
            RuntimeError: the experts are closed, or this process is a fork.
        """
        return self._held[index].copy_of_weights()

    # checkpoints

    @unwinding
    def checkpoint(self, note: Any = None) -> Path:
        """Save weights, buffers and optimizers to the folder; gradients are not saved.

        Args:
            note: what `restore` is to return, made of what JSON knows; for example the number of the step.

        Returns:
            The checkpoint: a folder of safetensors files, whole whenever this process or machine stops.

        Raises:
            CheckpointError: the store is no folder, or an optimizer's state holds something beside tensors of its
                parameters and plain values, or an expert's `get_extra_state` returns another, or its `state_dict` has
                more than tensors and that. Nothing is saved.
            TypeError: the note holds something else, such as a tensor.
            ValueError: an expert's state, for which a `step` that raised found no room, exceeds the limit.
            OSError: the store failed, or the folder. Nothing is saved.
            RuntimeError: closed experts, or a fork; one in the midst of another; or new buffers wait for a call to end.
        """
        return self._shared.checkpoint(note)

    @unwinding
    def restore(self) -> Any:
        """Go back to the newest checkpoint in the folder; gradients are forgotten.

        Returns:
            The checkpoint's note.

        Raises:
            CheckpointError: there is none, it does not fit these experts, or a file of it is missing or cut. Nothing
                has changed; but experts have, if one does not take what its class saved before it raised `_version`.
            OSError: the store failed, or the folder. Repeat it: mostly nothing has changed, at worst some experts have.
            ValueError, RuntimeError: it exceeds the limit; as from `checkpoint`, or within a call. Nothing has changed.
        """
        return self._shared.restore()


def read_ahead(*layers: OffloadedExperts) -> None:
    """Let each layer read the experts of its neighbours ahead, while it computes.

    In a forward a layer starts to read the experts that the layer above called last time, in an update those that the
    layer above is about to update. In a backward, just before its own begins, it starts to read those that the layer
    below is about to need.

    Args:
        layers: in the order of the forward. It pays where they share memory (`beside`): the later layers' experts
            put out those of the first, which the backward needs last.

    Raises:
        TypeError: one of them is something else: a list of layers, or a `MixtureOfExperts` made of one.

    Threads: any, where no forward, backward or `step` of these layers runs.
    """
    for index, layer in enumerate(layers):
        if not isinstance(layer, OffloadedExperts):
            raise TypeError(
                f"read_ahead: expected OffloadedExperts, got {type(layer).__name__} (index={index}). Write "
                "read_ahead(first, second); of a layer that is made of them, pass the OffloadedExperts."
            )
    for below, above in itertools.pairwise(layers):
        below._above, above._below = above, below


def _backward_order(experts: Sequence[HeldExpert]) -> list[Part]:
    """Return what the backward of these calls will need, first things first."""
    return [part for held in reversed(experts) for part in held.parts_for_backward()]


def _device_of(module: nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
