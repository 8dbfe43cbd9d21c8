"""Views of its own tensors that a module keeps from call to call, such as a transposed weight.

Their part's buffer will hold other weights. So they leave it and are found again by place in the next one, as weights.

What has the memory of a buffer that a call has made anew follows that into the part. Others may have it as well: a
program that keeps it, a hook. So it has the bytes of the buffer also while that is absent, in memory of its own.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from moe_autograd.autograd.contents.in_objects import HOLDS_NOTHING
from moe_autograd.autograd.offload.flat import Place, lies_in

_NOT_LOOKED_INTO = (*HOLDS_NOTHING, Node)
_OFFLOADING = __name__.rpartition(".")[0]
_MOST_LOOKED_INTO = 4096  # objects, of each part of the module; they may lead to a whole program


class KeptViews:
    """What a module keeps in attributes, and in containers, objects and closures there, while its part is absent.

    Args:
        module: the expert.
        own: its parameters and buffers of the moment, which come and go anyway.
    """

    def __init__(self, module: nn.Module, own: Mapping[str, Tensor]) -> None:
        self._module, self._own = module, own
        self._kinds = {Tensor, nn.Parameter, *map(type, own.values())}
        self._absent: list[tuple[weakref.ref[Tensor], Place, bool]] = []  # and whether of inference mode
        self._followed: list[weakref.ref[Tensor]] = []  # those that have come with new buffers

    def take_out(self, flat: Tensor) -> list[Tensor]:
        """Remember the places of those in a buffer, and return those that have nothing meanwhile."""
        followed = [tensor for tensor in self._that_followed() if lies_in(tensor, flat)]
        seen = set(map(id, followed))
        found = [t for t in self._kept() if id(t) not in seen and t is not flat and lies_in(t, flat)]
        for tensor in (*found, *followed):
            self._absent.append((weakref.ref(tensor), Place.of(tensor, flat), tensor.is_inference()))
        self._followed = [*map(weakref.ref, followed)]
        for tensor in followed:
            _point(tensor, tensor.data.clone(), tensor.is_inference())
        return found

    def put_into(self, flat: Tensor) -> None:
        """Point them to the same places in a buffer."""
        absent, self._absent = self._absent, []
        for ref, place, is_inference in absent:
            if (tensor := ref()) is not None:
                _point(tensor, place.find(flat), is_inference)

    def move(self, moves: Sequence[tuple[Tensor, Tensor]], flat: Tensor) -> None:
        """Point those that lie in the first of two runs of bytes to the same places in the second.

        Args:
            moves: the two runs, one of which lies in the buffer.
            flat: the buffer.
        """
        if not moves:
            return
        followed = {id(tensor): tensor for tensor in self._that_followed()}
        for tensor in (followed | {id(tensor): tensor for tensor in self._kept()}).values():
            for before, after in moves:
                if _lies_wholly_in(tensor, before):
                    place, whole = Place.of(tensor, before), _whole_storage(after)
                    start = place.start + after.data_ptr() - whole.data_ptr()
                    _point(tensor, place._replace(start=start).find(whole), tensor.is_inference())
                    followed[id(tensor)] = tensor
                    break
        self._followed = [weakref.ref(tensor) for tensor in followed.values() if lies_in(tensor, flat)]

    def _that_followed(self) -> list[Tensor]:
        return [tensor for ref in self._followed if (tensor := ref()) is not None]

    def _kept(self) -> Iterator[Tensor]:
        """Yield each once. They are looked for as the garbage collector does: nobody's own code runs."""
        own, parts = {id(tensor) for tensor in self._own.values()}, [*self._module.modules()]
        seen = {*map(id, parts)}
        for part in parts:
            to_visit: list[object] = [vars(part)]
            for holder in to_visit:  # grows
                for held in _held_by(holder):
                    if (
                        not gc.is_tracked(held)
                        or id(held) in seen
                        or issubclass(type(held), _NOT_LOOKED_INTO)
                        or _is_of_offloading(type(held))
                    ):
                        continue
                    seen.add(id(held))
                    if type(held) in self._kinds and id(held) not in own:
                        yield held
                    if len(to_visit) < _MOST_LOOKED_INTO:
                        to_visit.append(held)


def _point(tensor: Tensor, place: Tensor, is_inference: bool) -> None:
    """Let a tensor lie where another does. One of inference mode stays such a one: it has no version to count."""
    if is_inference:
        with torch.inference_mode():
            own = torch.empty(0, dtype=place.dtype, device=place.device)
            own.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
            own = own.conj() if place.is_conj() else own
            place = torch._neg_view(own) if place.is_neg() else own
    tensor.data = place


def _held_by(holder: object) -> list[Any]:
    if type(holder) is types.FunctionType:  # without the names of its file
        return gc.get_referents(holder.__closure__, holder.__defaults__, holder.__kwdefaults__)
    # Since 3.13 the garbage collector finds the values of `vars(object)` by the object.
    if isinstance(holder, dict):
        return [*dict.keys(holder), *dict.values(holder)]
    return gc.get_referents(holder)


def _is_of_offloading(kind: type) -> bool:
    """Whether a class is of this room, or derived from one that is: its objects lead to the buffers themselves."""
    modules = [one.__dict__.get("__module__") for one in kind.__mro__]
    return any(isinstance(module, str) and module.startswith(_OFFLOADING) for module in modules)


def is_run_of_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is what lies in its memory, in that order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _lies_wholly_in(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a part of another one, and not what that was cut from."""
    run = other.view(-1).view(torch.uint8)
    if not lies_in(tensor, run):
        return False
    # by hand: what is made in inference mode may not be indexed outside of it
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + last * tensor.itemsize < run.data_ptr() + run.numel()


def _whole_storage(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
