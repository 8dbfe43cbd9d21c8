"""The optimizer of one offloaded expert: its tensors come and go as one part, once there are any.

An optimizer makes its tensors in its first step, and may put others in their place in a later one, or make more. So
after each update, while the part is held, those that do not lie in it are copied there (`keep`). Where the part has no
room for them they are put aside, before it may leave memory, and get a new one (`move_into_a_part`). Before there is a
part they are copied, too: they may lie in the gradients' (`state["before"] = p.grad`), which is about to leave.

A tensor may be in several places of the state, and has the name of the first: it is one field of the part, and while
that is absent, one empty tensor.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.contents.in_objects import tensors_in_objects
from moe_autograd.autograd.offload.flat import Layout, is_same, lies_in
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.state_apart import check_apart
from moe_autograd.autograd.offload.stores import SUFFIX, FolderStore
from moe_autograd.errors import CheckpointError

Place = tuple[dict[Any, Any], str]  # the state of a parameter, and a key


class HeldOptimizer:
    """An optimizer and the part in which its tensors lie.

    Args:
        name: of the part, such as `expert-00003.optimizer`.
        optimizer: of the parameters.
        parameters: of the expert, by name.
        residency: where the part comes and goes.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], residency: Residency
    ) -> None:
        self.name, self.optimizer = name, optimizer
        self.part: Part | None = None  # until there are tensors
        self._parameters, self._residency = parameters, residency
        self._put_aside: dict[str, Tensor] | None = None  # while no part has room for them
        self._check_apart()
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # wrappers of others may have none
            optimizer.register_step_pre_hook(functools.partial(_refuse_own_step, parameters))

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters that have gradients here; all of it is held."""
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        try:
            with self._counts_on_host():
                self.optimizer.step()
            self._check_apart()
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    @contextmanager
    def _counts_on_host(self) -> Iterator[None]:
        """Have the numbers of steps where torch has them; on a GPU it would be waited for, for each parameter anew."""
        states = self._states_with_count() if self._residency.device.type == "cuda" else []
        if not states:
            yield
            return
        places = [state["step"] for state in states]
        on_host = dict(zip(map(id, places), torch.stack(places).cpu().unbind(), strict=True))
        for state, place in zip(states, places, strict=True):
            state["step"] = on_host[id(place)]
        try:
            yield
        finally:
            counts = torch.stack([state["step"] for state in states]).to(self._residency.device)
            for state, place, count in zip(states, places, counts.unbind(), strict=True):
                state["step"] = place.copy_(count)

    def _check_apart(self) -> None:
        """Raise `TypeError` if tensors that no part has yet share memory with others that the optimizer keeps.

        Not with a weight, which may have lain there for a while (`weight.data = state["before"]`), nor where an
        attribute of the optimizer is the tensor: it may be a table for all weights, which nobody changes.
        """
        tensors = self._tensors()
        if self.part is not None and tensors.keys() == self.part.layout.fields.keys():
            assert self.part.buffer is not None
            if all(lies_in(tensor, self.part.buffer) for tensor in tensors.values()):
                return
        weights, of_state = (set(map(id, of.values())) for of in (self._parameters, tensors))
        others: list[Tensor] = [p for p in self._parameters.values() if id(p) in of_state]
        others += [one for _, one in tensors_in_objects([[*self._beside_tensors()]])]
        others += [
            one for _, one in tensors_in_objects([self.optimizer]) if id(one) not in weights | of_state
        ]
        check_apart(self.name, tensors, others)

    def _states_with_count(self) -> list[dict[str, Any]]:
        """Return the states in which torch has the number of steps on the host, as `Optimizer.load_state_dict` does."""
        groups = [g for g in self.optimizer.param_groups if not (g.get("capturable") or g.get("fused"))]
        states = [
            self.optimizer.state.get(parameter, {}) for group in groups for parameter in group["params"]
        ]
        return [state for state in states if isinstance(state.get("step"), Tensor) and state["step"].is_cuda]

    def keep(self) -> None:
        """Leave the tensors in their part, which is held; where there is none, or no room, in memory of their own."""
        with torch.no_grad():
            if self.part is None:
                for name, places in self._places().items():
                    _put(places, _at(places[name]).clone())
                return
            tensors = self._tensors()
            if Layout.of(tensors) != self.part.layout:
                self._put_aside = {name: tensor.clone() for name, tensor in tensors.items()}
                return
            assert self.part.buffer is not None
            views = self.part.views()
            replaced = {name: t for name, t in tensors.items() if not is_same(t, views[name])}
            # All first: two may have changed places.
            values = {name: t.clone() if lies_in(t, self.part.buffer) else t for name, t in replaced.items()}
            for name, value in values.items():
                views[name].copy_(value)
        if values:
            self._attach(self.part.buffer)
        self._residency.changed(self.part)

    @property
    def wants_part(self) -> bool:
        """Whether there are tensors that no part has."""
        return self._put_aside is not None or (self.part is None and bool(self._places()))

    def _tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, under names such as `exp_avg.0.weight`."""
        return {name: _at(places[name]) for name, places in self._places().items()}

    def _places(self) -> dict[str, dict[str, Place]]:
        """Return where each of the optimizer's tensors is, by the first of its names: it may be in several places."""
        places: dict[int, dict[str, Place]] = {}
        for name, parameter in self._parameters.items():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if _is_in_part(key, value):
                    places.setdefault(id(value), {})[_full_name(key, name)] = state, key
        return {next(iter(of_one)): of_one for of_one in places.values()}

    def move_into_a_part(self, beside: Iterable[Part]) -> None:
        """Give tensors that no part has one of their own.

        Args:
            beside: what an update holds with it.

        Raises:
            ValueError: together they exceed the limit.
        """
        tensors, self._put_aside = self._put_aside or self._tensors(), None
        try:
            self.forget_part()
            if not tensors:
                return
            self.part = part = self._residency.add(self._part_of(Layout.of(tensors)))
            self._residency.check_fits([*beside, part])
            self._residency.fill(part, tensors)
        except BaseException:  # until there is room they are beside the limit, and no part has them
            self.forget_part()
            self._set_state(tensors)
            raise

    def forget_cleared(self) -> None:
        """Let what somebody has cleared (`optimizer.state.clear()`) leave the store, too."""
        if self.part is None or self.part.layout.fields.keys() <= self._tensors().keys():
            return
        if self._tensors():
            with self._residency.hold([self.part]):
                self.keep()
        self.move_into_a_part(beside=[])

    def forget_part(self) -> None:
        """Give the part's place in memory and store away."""
        if self.part is not None:
            self._residency.forget(self.part)
            self.part = None

    def _part_of(self, layout: Layout) -> Part:
        return Part(self.name, layout, self._attach, self._detach)

    def _attach(self, flat: Tensor) -> None:
        assert self.part is not None
        with torch.inference_mode(False):
            self._set_state(self.part.layout.views(flat))

    def _set_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors where there were some; what was cleared while it was absent stays so."""
        for full_name, places in self._places().items():
            if full_name in tensors:
                _put(places, tensors[full_name])

    def _detach(self) -> None:
        for full_name, places in self._places().items():
            _put(places, torch.empty(0, dtype=_at(places[full_name]).dtype))

    def options(self) -> dict[str, Any]:
        """Return what a checkpoint says about the optimizer beside its tensors.

        Raises:
            CheckpointError: it keeps something else, which neither JSON nor the part can hold, or which only its own
                `state_dict` knows.
        """
        numbers, of_all, groups = self._beside_tensors()
        for entries in (*numbers.values(), of_all):
            self._check_plain(
                entries, "tensors of parameters and plain values, under texts, in the optimizer's state"
            )
        groups = [{key: _as_plain(value) for key, value in options.items()} for options in groups]
        for options in groups:
            self._check_plain(options, "plain values, under texts, in the optimizer's groups")
        self._check_state_dict()
        return {
            "optimizer": type(self.optimizer).__name__,
            "groups": groups,
            "numbers": numbers,
            "of_all": of_all,
            "has_tensors": self.part is not None,
            "also_under": {name: others for name, (_, *others) in self._places().items() if others},
        }

    def _beside_tensors(self) -> tuple[dict[str, dict[Any, Any]], dict[Any, Any], list[dict[str, Any]]]:
        """Return what it keeps beside the part's tensors: of each parameter, of all, and the options of its groups."""
        state, parameters = self.optimizer.state, {id(p) for p in self._parameters.values()}
        numbers = {
            name: {k: v for k, v in state.get(parameter, {}).items() if not _is_in_part(k, v)}
            for name, parameter in self._parameters.items()
        }
        of_all = {key: value for key, value in state.items() if id(key) not in parameters}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return numbers, of_all, groups

    def _check_plain(self, entries: Mapping[Any, Any], expected: str) -> None:
        """Raise `CheckpointError` for what JSON would not give back."""
        for key, value in entries.items():
            if not is_plain({key: value}):
                raise CheckpointError(
                    f"{self.name}: expected {expected}, got {_described(value)} (key={reprlib.repr(key)}). Save what "
                    "it keeps yourself."
                )

    def _check_state_dict(self) -> None:
        """Raise `CheckpointError` for entries of its own, which its `load_state_dict` would want to be given."""
        own = getattr(self.optimizer.state_dict, "__func__", None) is not Optimizer.state_dict
        if not (own or getattr(self.optimizer, "_optimizer_state_dict_post_hooks", None)):
            return  # torch's, which some wrappers cannot call
        further = [repr(key) for key in self.optimizer.state_dict() if key not in ("state", "param_groups")]
        if further:
            raise CheckpointError(
                f"{self.name}: expected 'state' and 'param_groups' in its state_dict, got {', '.join(further)}, too. "
                "Keep it in options of its groups."
            )

    def check_checkpoint(self, folder: Path, options: dict[str, Any], beside: Iterable[Part]) -> None:
        """Raise unless a checkpoint has the tensors that it says.

        Args:
            folder: the checkpoint.
            options: what it says about the optimizer.
            beside: what an update holds with them.

        Raises:
            CheckpointError: their file is missing or no whole safetensors file, or has tensors of other parameters.
            ValueError: together they exceed the limit.
        """
        layout = self._saved_layout(folder, options)
        if layout is not None:
            self._residency.check_fits([*beside, Part(self.name, layout)])

    def _saved_layout(self, folder: Path, options: dict[str, Any]) -> Layout | None:
        """Return how the tensors of a checkpoint lie; `None`: the optimizer had made none, as in experts never used."""
        if not options["has_tensors"]:
            return None
        layout, _ = Layout.read(self._file_in(folder))
        for full_name in layout.fields:
            for one in _all_names(full_name, options):
                self._parsed(one)
        return layout

    def _parsed(self, full_name: str) -> tuple[str, str]:
        """Return a tensor's key, and its parameter's name.

        Raises:
            CheckpointError: it is of a parameter that is not here.
        """
        key, _, name = full_name.partition(".")
        if name not in self._parameters:
            raise CheckpointError(
                f"{self.name}: expected tensors of {', '.join(self._parameters)}, got {full_name!r}. Restore experts "
                "with the same parameters."
            )
        return key.replace("%2E", ".").replace("%25", "%"), name

    def _file_in(self, folder: Path) -> Path:
        return folder / f"{self.name}{SUFFIX}"

    def restore(self, folder: Path, options: dict[str, Any], store: FolderStore) -> None:
        """Take options and tensors from a checkpoint that was checked."""
        layout = self._saved_layout(folder, options)
        if layout is None:
            self.forget_part()
        else:
            part = self._part_of(layout)
            self._residency.adopt(part, store.take_link, instead_of=self.part)
            self.part = self._residency.add(part)
        self.optimizer.state.clear()
        for group, saved in zip(self.optimizer.param_groups, options["groups"], strict=True):
            group.update({k: _as_kind_of(group.get(k), v) for k, v in saved.items()})
        for name, numbers in options["numbers"].items():
            if numbers:
                self.optimizer.state[self._parameters[name]].update(numbers)
        self.optimizer.state.update(options["of_all"])
        if layout is not None:
            for full_name, field in layout.fields.items():
                absent = torch.empty(0, dtype=field.dtype)
                for key, name in map(self._parsed, _all_names(full_name, options)):
                    self.optimizer.state[self._parameters[name]][key] = absent


def _at(place: Place) -> Any:
    state, key = place
    return state[key]


def _put(places: Mapping[str, Place], tensor: Tensor) -> None:
    for state, key in places.values():
        state[key] = tensor


def _all_names(full_name: str, options: Mapping[str, Any]) -> list[str]:
    """Return the names of all places that a tensor had, from what a checkpoint says; older ones do not."""
    return [full_name, *options.get("also_under", {}).get(full_name, [])]


def _is_in_part(key: object, value: object) -> bool:
    """Whether a part has this entry of a parameter's state; tensors under other keys stay in memory."""
    return isinstance(value, Tensor) and isinstance(key, str)


def _full_name(key: str, name: str) -> str:
    """Return the name of a parameter's tensor in the part: whatever the key is, it ends at the first dot."""
    return f"{key.replace('%', '%25').replace('.', '%2E')}.{name}"


def _refuse_own_step(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, *_: object) -> None:
    """Raise where an optimizer's own `step` is called, as of plain modules: it would do nothing.

    In one of the experts, some of the `parameters` have gradients, perhaps none of those that are the optimizer's.
    """
    if all(parameter.grad is None for parameter in parameters.values()):
        raise RuntimeError(
            f"{type(optimizer).__name__} of an offloaded expert, step: expected gradients, got none: they are gathered "
            "elsewhere. Call step() of the OffloadedExperts."
        )


def _as_plain(value: Any) -> Any:
    """Return an option for JSON: the value of a tensor, also in tuples, and of numpy numbers; the rest as it is.

    Of tensors elsewhere in it, `_as_kind_of` could not tell that they were some.
    """
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    return value.tolist() if isinstance(value, Tensor) else tree_map(_number_as_plain, value)


def _number_as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Number) and hasattr(value, "tolist") else value


def is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is, but for tuples, which come back as lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _described(value: object) -> str:
    leaves = [] if isinstance(value, Tensor) else tree_leaves(value)
    has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
    return f"{type(value).__name__}{' with tensors in it' if has_tensors else ''}"


def _as_kind_of(now: Any, saved: Any) -> Any:
    """Return an option as the optimizer has it, from what JSON made of it."""
    if isinstance(now, Tensor):  # a learning rate may be one
        return torch.tensor(saved, dtype=now.dtype, device=now.device)
    if isinstance(now, tuple) and len(now) == len(saved):  # so may each of Adam's betas
        return tuple(_as_kind_of(one, other) for one, other in zip(now, saved, strict=True))
    return tuple(saved) if isinstance(now, tuple) else saved
