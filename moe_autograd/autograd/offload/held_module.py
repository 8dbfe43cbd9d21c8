"""A module whose parameters and buffers come and go.

It keeps them, but while their part is absent there is nothing behind them: weights keep their shape and read as NaN.
Attaching points them into the part's buffer, detaching takes them out of it again. Whoever uses them holds the part.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd.autograd.contents.in_objects import notes_on, put_on
from moe_autograd.autograd.notes import add_note
from moe_autograd.autograd.offload.casts import caching_no_casts
from moe_autograd.autograd.offload.checks import check_not_cached, check_values
from moe_autograd.autograd.offload.flat import Layout, is_same, kind_of, lies_in
from moe_autograd.autograd.offload.kept_views import KeptViews, is_run_of_bytes
from moe_autograd.autograd.offload.misfits import expected, fits
from moe_autograd.autograd.offload.owners import check_own, note_successor
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency

# Its operator changes buffers and leaves their versions as they are. Torch means to part with it.
_FUSED_OBSERVER: type[nn.Module] | tuple[()] = getattr(
    getattr(torch.ao, "quantization", None), "FusedMovingAvgObsFakeQuantize", ()
)

# By name: which tensor it is, its version and its shape.
_Versions = Mapping[str, tuple[int, int, tuple[int, ...]]]


class HeldModule:
    """A module and the part of its parameters and buffers, which is not in the residency yet.

    Args:
        name: in the store.
        module: its tensors are taken over.
        residency: where the part is to come and go.

    Attributes:
        parameters: by name.
        tensors: what comes and goes, by name.
        saved_by_place: by the name of a tensor, what calls have saved of it for their backwards.
        weights: the part.

    Threads: whoever holds the part; several may call the module at once.
    """

    def __init__(self, name: str, module: nn.Module, residency: Residency) -> None:
        self.name, self.module, self.residency = name, module, residency
        self.parameters = dict(module.named_parameters())
        tensors = self._tensors()
        check_values(name, tensors, residency.device)
        self.tensors = dict(tensors)
        # of each name that a tensor has in the module, the one that it has here
        self._own_names = self._all_names(tensors)
        self._kept_views = KeptViews(module, self.tensors)
        # what calls have put into the cache of `parametrize.cached()`, by its keys there, if it has a graph
        self._in_cache: dict[object, weakref.ref[Tensor]] = {}
        self._changes_unseen = any(isinstance(part, _FUSED_OBSERVER) for part in module.modules())
        self._keeping_changes = threading.Lock()  # guards the next two
        self._num_inside = 0  # of `noticing_changes`: calls and backwards
        self._is_changed = False  # by those who have left since nobody was inside
        self.saved_by_place: dict[str, weakref.WeakSet[Any]] = {name: weakref.WeakSet() for name in tensors}
        self.weights = Part(
            f"{name}.weights", Layout.of(tensors), self.attach, self._detach, self._own_versions
        )
        check_own(name, tensors, residency.places)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def _all_names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return under which names the module has some of its tensors, which parts may share, and theirs here."""
        own_names = {id(tensor): name for name, tensor in tensors.items()}
        parameters = nn.Module.named_parameters(self.module, remove_duplicate=False)
        buffers = nn.Module.named_buffers(self.module, remove_duplicate=False)
        return {n: own_names[id(t)] for n, t in (*parameters, *buffers) if id(t) in own_names}

    def attach(self, flat: Tensor) -> None:
        """Point the module's tensors into the part's buffer."""
        with torch.inference_mode(False):
            for name, view in self.weights.layout.fixed_views(flat).items():
                self.tensors[name].data = view
            self._kept_views.put_into(flat)

    def _detach(self) -> None:
        assert self.weights.buffer is not None
        with torch.inference_mode(False):
            for tensor in (*self._kept_views.take_out(self.weights.buffer), *self.tensors.values()):
                tensor.data = _nothing_of_shape(tensor.data)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose weights are held; tensors that it returns do not lie in their buffer."""
        if not parametrize._cache_enabled:
            return self._call(args, kwargs)
        check_not_cached(self.name, self._in_cache)
        before = dict(parametrize._cache)
        try:
            return self._call(args, kwargs)
        finally:
            self._part_from_cache(before)

    def _call(self, args: Any, kwargs: Any) -> Any:
        with self.noticing_changes(), caching_no_casts(self.residency.device):
            result = self.module(*args, **kwargs)
            return tree_map_only(Tensor, functools.partial(self._owned, self._replacing()), result)

    def _replacing(self) -> list[Tensor]:
        """Return what the module has in the place of buffers."""
        if len(self.tensors) == len(self.parameters):  # without buffers, there is nothing to look for
            return []
        own = {id(tensor) for tensor in self.tensors.values()}
        return [tensor for tensor in self.module.buffers() if id(tensor) not in own]

    def _owned(self, replacing: Sequence[Tensor], returned: Tensor) -> Tensor:
        """Return what a call may hand out: a copy of what lies in the buffer, or is about to.

        While somebody is inside, nobody puts another in its place. A tensor in the memory of what replaces a buffer,
        which it may follow into the part, is handed out as a view, which stays.
        """
        if self.is_borrowed(returned) or any(returned is own for own in self.tensors.values()):
            handed_out = returned.clone()
        elif any(_share_memory(returned, tensor) for tensor in replacing):
            handed_out = returned.view_as(returned)
        else:
            return returned
        put_on(handed_out, notes_on(returned))
        return handed_out

    def _part_from_cache(self, before: Mapping[Any, Tensor | None]) -> None:
        """Take what lies in memory that will be used again out of `parametrize.cached()`; note what has a graph.

        By what a call puts there, since keys are of the module that others, which are now experts, were copied from.
        """
        for key, value in [*parametrize._cache.items()]:
            if value is not None and before.get(key) is not value:
                if self.is_borrowed(value):
                    del parametrize._cache[key]
                elif value.requires_grad:
                    self._in_cache[key] = weakref.ref(value)

    @unwindable
    def noticing_changes(self) -> Iterator[None]:
        """Run the module inside, or its backward; notice if that changes what is held (batch norm's statistics).

        Other threads inside may still read a buffer that the module replaces, or be about to save its place. So nothing
        is put there before the last of them leaves; until then the module has the new one as in a plain call.
        """
        before = _versions(self._tensors())
        with uninterrupted() as section:
            with self._keeping_changes:
                self._num_inside += 1
            try:
                with section.opened():
                    yield
            except BaseException as error:  # so a second run ends early
                self._leave(before, error)
                raise
            self._leave(before)

    def _leave(self, before: _Versions, error: BaseException | None = None) -> None:
        with self._keeping_changes:
            self._num_inside -= 1
            if self._num_inside:
                # the last may put others in the place of what was used, on a stream of its own
                self.residency.finish_kernels()
            tensors = self._tensors()
            has_changed = self._changes_unseen or _versions(tensors) != before or self._has_others(tensors)
            self._is_changed = self._is_changed or has_changed
            if not self._is_changed:
                return
            with torch.inference_mode(False):
                if has_changed:
                    tensors = self._fitting(tensors, error)
                if not self._num_inside:
                    self._is_changed = False
                    self._keep_changes(tensors)

    def settle(self) -> None:
        """Take into the part what was put in the place of a buffer outside of calls, as by a hook of a step."""
        if self._has_others(self._tensors()):
            with self.residency.hold([self.weights]), self.noticing_changes():
                pass

    def _has_others(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether others, for which its part has room, are in the place of tensors that come and go."""
        for name, tensor in tensors.items():
            if tensor is not self.tensors.get(name) and self._fits(name, tensor):
                return True
        return False

    def forget_others(self) -> None:
        """Let the module have its own tensors again, whatever was put in their place; they are to be read anew."""
        for name, own_name in self._own_names.items():
            self._put(name, self.tensors[own_name])

    def check_settled(self) -> None:
        """Raise `RuntimeError` if the part lacks what calls have put in the place of buffers: it waits for others."""
        if self._num_inside and self._is_changed:
            raise RuntimeError(
                f"{self.name}: expected checkpoint() where no forward or backward runs, got one that runs, while "
                "buffers that others have replaced wait for its end. Call it then."
            )

    def is_borrowed(self, tensor: Tensor) -> bool:
        """Whether a tensor lies, or may lie, in the weights' buffer, which is held now and will be used again."""
        assert self.weights.buffer is not None
        return tensor.layout is not torch.strided or lies_in(tensor, self.weights.buffer)

    def _own_versions(self) -> list[int]:
        """Return what tells of changes in place, by anybody, of what comes and goes."""
        return [_version_of(tensor) for tensor in self.tensors.values()]

    def _keep_changes(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what the module put in the place of a tensor, or gave other memory, into the part, which changed.

        A graph may have what was put there, and what was there before: the one stays as it is, the other is copied.
        So may the module: its views of the one follow it into the part, those of the other leave. So do those of the
        memory that it gave and of the one before.
        """
        assert self.weights.buffer is not None
        views = self.weights.layout.fixed_views(self.weights.buffer)
        moved = {n: t for n, t in tensors.items() if t is self.tensors[n] and not is_same(t, views[n])}
        replaced = {n: t for n, t in tensors.items() if t is not self.tensors[n]}
        same = {name: t for name, t in replaced.items() if self._goes_on_as(name, t, views[name])}
        for name, own_name in self._all_names(same).items():
            self._put(name, self.tensors[own_name])
        replaced = {name: tensor for name, tensor in replaced.items() if name not in same}
        values = {name: tensors[name].detach().clone() for name in (*moved, *replaced)}
        for saved in [saved for name in replaced for saved in self.saved_by_place[name]]:
            saved.keep()
        moves = list[tuple[Tensor, Tensor]]()
        for name, tensor in replaced.items():
            if name not in self.parameters:
                moves += self._succeed(name, tensor, views[name])
        for name, tensor in moved.items():
            moves += self._moves(tensor, views[name])
        for name, value in values.items():
            views[name].copy_(value)
        for name, tensor in moved.items():
            tensor.data = views[name]
        # of parts that share one, all have the new one
        for name, own_name in self._all_names(replaced).items():
            self._put(name, self.tensors[own_name])
        self._kept_views.move(moves, self.weights.buffer)
        self.residency.changed(self.weights)

    def _goes_on_as(self, name: str, tensor: Tensor, view: Tensor) -> bool:
        """Let a buffer go on as what replaces it if that is but another object (`detach()`); return whether it does."""
        own = self.tensors[name]
        has_history = own.grad_fn is not None  # of a change in place, which `detach` ends
        if not is_same(tensor, view) or (has_history and own._is_view()):
            return False
        if has_history:
            own.detach_()
        put_on(own, notes_on(tensor))
        return True

    def _keep_other_memory(self) -> None:
        """Take weights that were given other memory (`weight.data = ...`), or other strides, into their part.

        Raises:
            RuntimeError: one has another shape or dtype; it is as it was before.
        """
        assert self.weights.buffer is not None
        views = self.weights.views()
        replaced = {name: t.detach() for name, t in self.tensors.items() if not is_same(t, views[name])}
        if not replaced:
            return
        fits = [name for name, value in replaced.items() if kind_of(value) == kind_of(views[name])]
        # All first: two may have changed places.
        values = {
            name: replaced[name].clone() if self.is_borrowed(replaced[name]) else replaced[name]
            for name in fits
        }
        for name, value in values.items():
            views[name].copy_(value)
        self.attach(self.weights.buffer)
        self.residency.changed(self.weights)
        for name in [name for name in replaced if name not in values]:
            (shape, dtype), (new_shape, new_dtype) = kind_of(views[name]), kind_of(replaced[name])
            raise RuntimeError(
                f"{self.name}: expected {name} to stay of shape {shape} and {dtype}, got {new_shape} and {new_dtype}. "
                "Build OffloadedExperts of modules whose weights have the shapes and dtypes that they are to have."
            )

    def _succeed(self, name: str, tensor: Tensor, view: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Let what was put in the place of a buffer come and go, and the buffer before it have memory of its own.

        Returns:
            From where to where views of the two move.
        """
        before, moves = self.tensors[name], self._moves(tensor, view)
        (_, left), *of_new = moves
        now = tensor.detach() if of_new and not tensor.is_inference() else before.data
        before.data, now.data = left, view
        put_on(now, notes_on(tensor))
        self.tensors[name] = now
        note_successor(before, now)
        return moves

    def _moves(self, tensor: Tensor, view: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return from where to where views move, if a tensor is copied into this view of the part.

        First those of what is there: to a copy of it. Then those of the tensor, where that is a run of its own.
        """
        is_new = not self.is_borrowed(tensor) and is_run_of_bytes(tensor)
        return [(view, view.clone()), *([(tensor.detach(), view)] if is_new else [])]

    def _put(self, name: str, tensor: Tensor | None) -> None:
        """Let the module have a tensor that comes and goes under this name; `None`, where there was none."""
        path, _, own_name = name.rpartition(".")
        part = self.module.get_submodule(path)
        if own_name in part._parameters and not isinstance(
            tensor, nn.Parameter | None
        ):  # in a buffer's place
            del part._parameters[own_name]
            part.register_buffer(own_name, None)
        setattr(part, own_name, tensor)

    def _fitting(self, tensors: dict[str, Tensor], error: BaseException | None) -> dict[str, Tensor]:
        """Return the module's tensors, which its part has room for.

        What ends by an `error` may end between two changes that belong together. So what does not fit is put back, and
        parts that share a buffer have what one of them was given. A note of the error tells what was resized in place.

        Raises:
            RuntimeError: the module has others; not where there is an error.
        """
        names = {**self.tensors, **tensors}
        misfits = [name for name in names if not self._fits(name, tensors.get(name))]
        if not misfits:
            return tensors
        name = misfits[0]
        own_name, field = self._own_names.get(name, name), self.weights.layout.fields.get(name)
        text = f"{self.name}: {expected(name, own_name, field, self.module, tensors)}"
        own, given = {id(tensor) for tensor in self.tensors.values()}, dict[str, Tensor]()
        for name, tensor in tensors.items() if error is not None else ():
            own_name = self._own_names.get(name, name)
            if id(tensor) not in own and self._fits(own_name, tensor):
                given[own_name] = tensor
        for name in {**self._own_names, **tensors}:
            own_name = self._own_names.get(name, name)
            self._put(name, given.get(own_name, self.tensors.get(own_name)))
        has_resized = self._give_shapes_back()
        if error is None:
            raise RuntimeError(text)
        if has_resized:
            add_note(error, text)
        return self._tensors()

    def _fits(self, name: str, tensor: Tensor | None) -> bool:
        return fits(self.weights.layout.fields.get(name), self.tensors.get(name), tensor)

    def _give_shapes_back(self) -> bool:
        """Give what was resized in place the shape that it has in its part; whether there is any."""
        assert self.weights.buffer is not None
        views = self.weights.layout.fixed_views(self.weights.buffer)
        resized = [name for name, tensor in self.tensors.items() if not self._fits(name, tensor)]
        for name in resized:
            self.tensors[name].data = views[name]
        return bool(resized)


def _versions(tensors: Mapping[str, Tensor]) -> _Versions:
    """Return what tells of changes; the shapes, as `resize_` leaves versions as they are."""
    return {name: (id(tensor), _version_of(tensor), tensor.shape) for name, tensor in tensors.items()}


def _version_of(tensor: Tensor) -> int:
    """Return its version; one that is made in inference mode has none, and is another one anyway."""
    return -1 if tensor.is_inference() else tensor._version


def _nothing_of_shape(tensor: Tensor) -> Tensor:
    """Return what takes no memory, cannot be written to, and shows wherever it is read by mistake."""
    if tensor.dtype is torch.float4_e2m1fn_x2:  # which torch only moves
        return tensor.new_zeros(1, dtype=torch.uint8).view(tensor.dtype)[0].expand(tensor.shape)
    filler = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.new_full((), filler).expand(tensor.shape)


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    if not tensor.layout is other.layout is torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
