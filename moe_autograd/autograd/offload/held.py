"""One offloaded expert: a module (`held_module`), its gradients and its optimizer (`held_optimizer`)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from moe_autograd._interrupts import uninterrupted, unwindable, unwinding
from moe_autograd._metadata import metadata_of, with_metadata
from moe_autograd.autograd.hooks import at_end_of_backward
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.offload.checks import check_gathered, check_optimizer, check_trained
from moe_autograd.autograd.offload.extra_state import ExtraState
from moe_autograd.autograd.offload.flat import Layout, tensors_in
from moe_autograd.autograd.offload.held_module import HeldModule
from moe_autograd.autograd.offload.held_optimizer import HeldOptimizer
from moe_autograd.autograd.offload.owners import note_owner
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import SUFFIX, FolderStore
from moe_autograd.autograd.walks import gradient_edge
from moe_autograd.errors import CheckpointError


class HeldExpert(HeldModule):
    """An expert's module, gradients and optimizer, each a part.

    Args:
        name: in the store, such as `expert-00003`.
        module: its tensors are taken over.
        optimizer: a function from parameters to an optimizer; `None` if the expert is not trained.
        residency: where its parts come and go.
        updates_on_backward: whether a backward ends with an update; whoever runs it sees to that.

    Threads: `gather` may be called from several threads at once; `step` by one, when no backward runs.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
        residency: Residency,
        updates_on_backward: bool = False,
    ) -> None:
        super().__init__(name, module, residency)
        self._extra_state = ExtraState(name, module)
        self.updates_on_backward = updates_on_backward
        self.open_calls: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose backward may still come
        self.with_gradient: set[str] = set()  # parameters whose gradients are defined
        self.num_updates = 0
        # by all that was gathered, as far as its optimizer came, in a `step` that is not over
        self.is_updated = False
        self._is_updating = False  # just now
        self._at_end: Callable[[], Callable[[], None] | None] = lambda: None  # of the backward that gathers
        self._lock = threading.Lock()
        lay = {tensor_name: tensor.detach() for tensor_name, tensor in self.tensors.items()}
        self.gradients = Part(f"{name}.gradients", Layout.of_gradients(self.parameters))
        residency.check_fits([self.weights, self.gradients])
        self._optimizer: HeldOptimizer | None = None
        if optimizer and self.parameters:  # an optimizer wants at least one parameter
            for parameter in self.parameters.values():
                parameter.data = parameter.data.contiguous()  # as in its part: Adagrad lays out state at once
            made = optimizer(list(self.parameters.values()))
            check_optimizer(name, made)
            self._optimizer = HeldOptimizer(f"{name}.optimizer", made, self.parameters, residency)
        note_owner(name, self.tensors, lay, residency.places)
        residency.add(self.weights)
        residency.add(self.gradients)
        try:
            residency.fill(self.weights, dict(self.tensors))  # which it empties
            self.make_room_for_state()  # some make it at once, and some have loaded it
        except BaseException:
            self.forget()
            raise

    @property
    def optimizer(self) -> Optimizer | None:
        """What updates the weights; `None`: the expert is not trained."""
        return None if self._optimizer is None else self._optimizer.optimizer

    @property
    def state(self) -> Part | None:
        """The optimizer's tensors, once there are any."""
        return None if self._optimizer is None else self._optimizer.part

    @property
    def is_to_be_updated(self) -> bool:
        """Whether it is trained, and has gradients that no `step` has updated it by."""
        return self._optimizer is not None and bool(self.with_gradient) and not self.is_updated

    def check_weights(self, num_updates: int) -> None:
        """Raise `RuntimeError` unless the weights are still those after so many updates."""
        if self.num_updates != num_updates:
            raise RuntimeError(
                f"{self.name}: expected the weights of the forward in its backward, got weights that were "
                f"updated {self.num_updates - num_updates} times since. Call backward before step."
            )

    @unwindable
    def in_memory(self, *, for_update: bool) -> Iterator[None]:
        """Hold weights and buffers, for an update the optimizer's state as well; what is changed inside is kept.

        For an owner that calls the module and steps the optimizer itself; gradients are its own business.
        """
        hold = self._hold if for_update else self.residency.hold
        with hold([self.weights, *([self.state] if for_update and self.state else [])]):
            try:
                with self.noticing_changes():
                    yield
            finally:
                if for_update and self._optimizer is not None:
                    self._keep_update()

    def apply(self, function: Callable[[nn.Module], None]) -> None:
        """Call a function on the module and each of its parts, and keep what it changes of them."""
        with self._changing():
            self.module.apply(function)

    @unwindable
    def _changing(self) -> Iterator[None]:
        """Hold weights and buffers, and keep what is changed of them inside, however that is done."""
        with self.in_memory(for_update=False):
            try:
                yield
            finally:  # by `weight.data`, nobody would notice
                self.residency.changed(self.weights)
                self._keep_other_memory()

    @unwindable
    def _hold(self, parts: Sequence[Part]) -> Iterator[None]:
        """Hold parts for an update; what the optimizer makes and its part has no room for gets a new part."""
        try:
            with self.residency.hold(parts):
                yield
        finally:  # an update that raises has come as far as it has
            self.make_room_for_state()

    def make_room_for_state(self) -> None:
        """Give what the optimizer has made a part, also where an update before found no room for it.

        Raises:
            ValueError: with what an update needs beside it, it exceeds the limit.
            OSError: the store failed.
        """
        if self._optimizer is not None and self._optimizer.wants_part:
            self._optimizer.move_into_a_part(beside=[self.weights, self.gradients])

    def require_gradients(self, requires_grad: bool) -> None:
        """Freeze or thaw the weights; `RuntimeError` for those that have no place for a gradient."""
        if requires_grad:
            check_trained(self.name, self.parameters, self.gradients.layout.fields)
        self.module.requires_grad_(requires_grad)

    def trained(self, edges: dict[str, GradientEdge]) -> dict[str, GradientEdge]:
        """Return those of `weight_edges` whose weights are not frozen since; as in torch, a backward asks as well."""
        return {name: edge for name, edge in edges.items() if self.parameters[name].requires_grad}

    def weight_edges(self) -> dict[str, GradientEdge]:
        """Return where the gradients of the weights arrive, in the graph of a call that is being built."""
        edges = {n: gradient_edge(p) for n, p in self.parameters.items() if p.requires_grad}
        dtypes = self.gradients.layout.dtypes()
        check_gathered(self.name, self.parameters, dtypes, is_trained=self._optimizer is not None)
        return edges

    def gather(self, grads: dict[str, Tensor | None]) -> None:
        """Add gradients to those gathered so far; the part is held."""
        with self._lock, torch.no_grad():
            if self.updates_on_backward:
                self._update_in_this_backward()
            views = self.gradients.views()
            for name, grad in grads.items():
                if grad is None:
                    continue
                if name in self.with_gradient:
                    views[name] += grad
                else:
                    views[name].copy_(grad.to_dense() if grad.is_sparse else grad)
                    self.with_gradient.add(name)
            self.is_updated = False
            self.residency.changed(self.gradients)
            self.residency.finish_kernels()  # the next to gather may use another stream

    def _update_in_this_backward(self) -> None:
        """Let this backward update by what it gathers, at its end at the latest; it is forgotten if the backward fails.

        A backward that fails says so to nobody, but lets go of what it would have called at its end.
        """
        at_end = self._at_end()
        if at_end is None:
            at_end = functools.partial(self._update_by_the_rest)
            self._at_end = weakref.ref(at_end, lambda _: self.with_gradient.clear())
        at_end_of_backward(at_end)

    @unwinding
    def _update_by_the_rest(self) -> None:
        """Update at the end of a backward; what that raises waits for the experts that are still to be updated."""
        if not self.with_gradient:
            return
        try:
            self.update_on_backward()
        except Exception as error:
            at_end_of_backward(functools.partial(_raise, error))

    def check_settled(self) -> None:
        """Raise `RuntimeError` also in the midst of an update: parts have nothing yet of what its optimizer makes."""
        super().check_settled()
        if self._is_updating:
            raise RuntimeError(
                f"{self.name}: expected checkpoint() between updates, got one within its optimizer's step. "
                "Set a flag there, and save after the step."
            )

    def parts_to_update(self) -> list[Part]:
        """Return what `step` needs at once."""
        return [self.weights, self.gradients, *([self.state] if self.state else [])]

    def parts_for_backward(self) -> list[Part]:
        """Return what a backward needs at once, as far as it is in the store."""
        return [self.weights, *([self.state] if self.updates_on_backward and self.state else [])]

    def step(self) -> None:
        """Update the weights by the gathered gradients."""
        with self._hold(self.parts_to_update()):
            self._update()
        self._put_away()

    def _update(self) -> None:
        assert self._optimizer is not None
        views = self.gradients.views()
        with uninterrupted() as section:  # else what an optimizer has made could be lost, and nobody be told
            self.is_updated = True  # also if it raises: nobody knows how far it came
            self._is_updating = True
            try:
                with section.opened():
                    self._optimizer.step({name: views[name] for name in self.with_gradient})
            except BaseException as error:
                add_note(
                    error,
                    f"step: raised by the optimizer of {self.name}, whose weights and state are as that left them. "
                    "These gradients update it no more.",
                )
                raise
            finally:
                self._is_updating = False
                self.residency.changed(self.weights)
                self.num_updates += 1
                self._keep_update()

    def _keep_update(self) -> None:
        """Take what an update made into the parts: of weights, and of the optimizer's state."""
        assert self._optimizer is not None
        self._keep_other_memory()
        self._optimizer.keep()
        self.settle()

    def _put_away(self) -> None:
        """Let what an update alone needs leave before the rest."""
        self.residency.not_soon(self.parts_to_update()[1:])

    @unwindable
    def updating(self) -> Iterator[None]:
        """Hold what a backward and an update need; update after what comes inside, and start to gather anew.

        So gradients that are gathered inside never go to the store. If anything raises, the backward has failed.
        """
        try:
            with self._hold(self.parts_to_update()):
                yield
                if self.with_gradient:
                    self.residency.run_apart(self._update)
                self.residency.void(self.gradients)
        finally:
            self.with_gradient.clear()
            self.is_updated = False
        self._put_away()

    def update_on_backward(self) -> None:
        """Update by what was gathered, and start to gather anew."""
        with self.updating():
            pass

    def forget_gradients(self) -> None:
        """Start to gather anew."""
        self.with_gradient.clear()
        self.is_updated = False
        self.residency.discard(self.gradients)

    def copy_of_weights(self) -> dict[str, Any]:
        """Return the module's `state_dict`, on the CPU."""
        with self.residency.hold([self.weights]):
            state = self.module.state_dict()
            copies = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), dict(state))
            return with_metadata(copies, metadata_of(state))

    def copy_of_gradients(self) -> dict[str, Tensor | None]:
        """Return what was gathered, on the CPU, `None` where nothing was."""
        if not self.with_gradient:
            return dict.fromkeys(self.parameters)
        with self.residency.hold([self.gradients]):
            views = self.gradients.views()
            return {n: views[n].cpu().clone() if n in self.with_gradient else None for n in self.parameters}

    def forget_cleared_state(self) -> None:
        """Let go of what somebody has cleared of the optimizer's state."""
        if self._optimizer is not None:
            self._optimizer.forget_cleared()

    def options(self) -> dict[str, Any]:
        """Return what a checkpoint says about module and optimizer beside their tensors."""
        options = {} if self._optimizer is None else self._optimizer.options()
        options["versions"] = self._extra_state.versions
        if self._extra_state.may_be_some:
            with self.residency.hold([self.weights]):
                assert self.weights.buffer is not None
                options["extra_state"] = self._extra_state.to_save(self.weights.buffer)
        return options

    def forget(self) -> None:
        """Leave the residency, for good."""
        for part in (self.weights, self.gradients):
            self.residency.forget(part)
        if self._optimizer is not None:
            self._optimizer.forget_part()

    def check_checkpoint(self, folder: Path, options: dict[str, Any]) -> None:
        """Raise `CheckpointError` unless a checkpoint fits and is whole; `ValueError` if it exceeds the limit."""
        layout, _ = Layout.read(folder / f"{self.weights.name}{SUFFIX}")
        if layout.kinds() != self.weights.layout.kinds():
            raise CheckpointError(
                f"{folder}: expected {self.name} with {_described(self.weights.layout)}, got {_described(layout)}."
            )
        self._extra_state.check(folder, options.get("extra_state", {}))
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        saved = options.get("groups", [])
        if groups and len(groups) != len(saved):
            raise CheckpointError(
                f"{folder}: {self.name}: expected an optimizer with {len(groups)} group(s) of parameters, got one with "
                f"{len(saved)} (0: not trained). Build the optimizer as the one that was saved."
            )
        kind = type(self.optimizer).__name__
        if groups and options["optimizer"] != kind:
            raise CheckpointError(
                f"{folder}: {self.name}: expected the state of {kind}, got that of {options['optimizer']}. "
                "Build the optimizer as the one that was saved."
            )
        if self._optimizer is not None:
            self._optimizer.check_checkpoint(folder, options, beside=[self.weights, self.gradients])

    def restore(self, folder: Path, options: dict[str, Any], store: FolderStore) -> None:
        """Take the files of a checkpoint that fits, which the store has linked; the rest is for `restore_contents`."""
        if Layout.read(folder / f"{self.weights.name}{SUFFIX}")[0] == self.weights.layout:
            self.residency.adopt(self.weights, store.take_link)
        self.num_updates += 1  # no backward of before fits any more
        if self._optimizer is not None:
            self._optimizer.restore(folder, options, store)

    def restore_contents(self, folder: Path, options: dict[str, Any]) -> None:
        """Take what of a checkpoint that was restored is to be copied, or told to the module."""
        if Layout.read(path := folder / f"{self.weights.name}{SUFFIX}")[0] != self.weights.layout:
            with self._changing():  # they are in another order, as in files of versions before
                for name, tensor in tensors_in(path).items():
                    self.tensors[name].data.copy_(tensor)
        if self._extra_state.is_in(options):
            with self._changing():
                self._extra_state.restore(options)


def _raise(error: Exception) -> None:
    raise error


def _described(layout: Layout) -> str:
    return ", ".join(f"{name} {field.shape} {str(field.dtype)[6:]}" for name, field in layout.fields.items())
