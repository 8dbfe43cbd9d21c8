"""Changes in place that a map would differentiate wrong, and so refuses.

Natively, whoever takes a tensor after a change sees it, in the value and in the gradient; so does whoever takes a view
of the tensor, or what it is a view of. Calls that are cut apart see it in the value alone, if at all. So what a call
changes, and autograd knows of it, is for that call alone, and by one way: once among its arguments, and not in its
closure besides. Views that do not overlap are different memory.

PyTorch gives a view the history of what it is a view of when it is first used after a change: if a call does so, before
the map gives the changed tensor its history. So views that calls take or hold get theirs anew in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd.autograd.contents.closures import LooseCut
from moe_autograd.autograd.contents.reaching import Cut
from moe_autograd.autograd.entry import is_entry
from moe_autograd.autograd.walks import edge_of

Memory = tuple[Tensor, Node | None]  # a tensor that is no view, and what its history is


class _Use(NamedTuple):
    """A tensor that a call takes, and where in its storage it begins and ends."""

    start: int
    end: int
    call: int
    tensor: Tensor
    is_changed: bool


def refuse_shared_changes(
    caller: str,
    names: Sequence[str],
    changed: Sequence[Sequence[Tensor]],
    taken: Sequence[Sequence[Tensor]],
    *,
    sees_own: bool = False,
) -> None:
    """Raise if a call has changed memory that another call takes, or the same by another way.

    Args:
        caller: the map.
        names: of the calls.
        changed: for each call the tensors that it has changed in place, with a new history.
        taken: for each call the tensors that it takes, once for each way.
        sees_own: whether a call differentiates by itself what it changes, as an autograd function does.

    Raises:
        RuntimeError: it names the calls and the tensor.
    """
    for one, other in _overlapping(_uses(changed, taken)):
        if sees_own and one.call == other.call:
            continue
        use, beside = (one, other) if one.is_changed else (other, one)
        by = f"{names[beside.call]} takes" if beside.call != use.call else "it takes by another way, too,"
        raise RuntimeError(
            f"{caller}: expected nobody to take what a call changes in place, got a tensor of shape "
            f"{tuple(use.tensor.shape)} changed in place by {names[use.call]}, of which {by} a part or all. Give "
            "the call a clone, or make the calls in a plain loop."
        )


def memory_held(cuts: Sequence[Sequence[Cut]]) -> list[list[Memory]]:
    """Return for each call what the tensors that it holds are, or are views of, each with its present history.

    Views are not asked: after a change that would give them a history, before the map gives one to what they show.
    """
    held = [[base_of(tensor) for _, tensor in own] for own in cuts]
    return [[(tensor, tensor.grad_fn) for tensor in own] for own in held]


def refuse_changed_closures(caller: str, names: Sequence[str], held: Sequence[Sequence[Memory]]) -> None:
    """Raise if a tensor with history that a callable holds has another one now.

    Args:
        caller: the map.
        names: of the calls.
        held: what `memory_held` said before the calls.

    Raises:
        RuntimeError: it names a call that holds such a tensor.
    """
    for name, own in zip(names, held, strict=True):
        for tensor, history in own:
            if tensor.grad_fn is not history:
                raise RuntimeError(
                    f"{caller}: expected calls to leave what they hold as it is, got a tensor of shape "
                    f"{tuple(tensor.shape)} changed in place that {name} holds in its closure, its module or an object "
                    "among its arguments. Pass it as an argument to the one call that changes it, or change a clone."
                )


def without_changed(
    cuts: Sequence[Cut], before: Sequence[Cut], held: Sequence[Memory]
) -> tuple[list[Cut], list[Memory]]:
    """Return what is left of the cuts of a call, and of what it holds, when it has run: see `LooseCut`.

    Args:
        cuts: those of the call, its inputs' and others.
        before: the others.
        held: what `memory_held` said of these before the call.
    """
    both = list(zip(before, held, strict=True))
    gone = [type(cut) is LooseCut and base.grad_fn is not history for cut, (base, history) in both]
    tensors = {id(cut[1]) for cut, is_gone in zip(before, gone, strict=True) if is_gone}
    left = [cut for cut in cuts if id(cut[1]) not in tensors or is_entry(cut[0].node)]
    return left, [memory for memory, is_gone in zip(held, gone, strict=True) if not is_gone]


def renewed(cuts: Sequence[Cut]) -> list[Cut]:
    """Return further cuts: held views of what a call has changed meanwhile have another history by now."""
    views = [(edge, view, edge_of(view)) for edge, view in cuts if follows(view)]
    return [(now, view) for edge, view, now in views if now.node is not edge.node]


def renew_views(bases: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Give views the history that the map has given to what they show.

    PyTorch does so at their first use after a change. A call may have used them before the map was done.

    Args:
        bases: memory that calls have changed.
        tensors: among which there may be views of it.
    """
    bases = tuple(bases)
    views = [view for view in tensors if follows(view) and any(view._base is base for base in bases)]
    with torch.autograd._unsafe_preserve_version_counter(bases):
        torch.autograd.graph.increment_version(bases)
        for view in views:
            look_at_history(view)
    for view in views:
        look_at_history(view)


def look_at_history(view: Tensor) -> None:
    """Let PyTorch make the `grad_fn` of a view for the version that its memory has now, and not for a later one."""
    _ = view.grad_fn


def _uses(changed: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]]) -> list[list[_Use]]:
    """Return who takes what, for each piece of memory that somebody has changed."""
    uses: dict[int, list[_Use]] = {id(base_of(tensor)): [] for own in changed for tensor in own}
    for call, (own_changed, own_taken) in enumerate(zip(changed, taken, strict=True)):
        changes = {id(tensor) for tensor in own_changed}
        known = {id(tensor) for tensor in own_taken}
        for tensor in (*own_taken, *[tensor for tensor in own_changed if id(tensor) not in known]):
            if (own := uses.get(id(base_of(tensor)))) is not None:
                own.append(_Use(*_extent(tensor), call, tensor, id(tensor) in changes))
    return list(uses.values())


def _overlapping(uses: Sequence[list[_Use]]) -> Iterator[tuple[_Use, _Use]]:
    """Yield the pairs of which one is a change of the other; a sweep, as calls mostly take slices side by side."""
    for of_base in uses:
        open_ones: list[_Use] = []
        for use in sorted(of_base, key=lambda use: use.start):
            open_ones = [other for other in open_ones if other.end > use.start]
            for other in open_ones:
                if (use.is_changed or other.is_changed) and _overlap(use.tensor, other.tensor):
                    yield other, use
            open_ones.append(use)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    if tensor.layout is not torch.strided:
        return 0, 1
    if tensor.numel() == 0:
        return 0, 0
    last = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one is other or one.layout is not torch.strided or one.element_size() != other.element_size():
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    marks = torch.zeros(size, dtype=torch.bool, device=one.device)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def follows(tensor: Tensor) -> bool:
    """Whether `tensor` is a view that has another history after a change; other views must not be used then."""
    if not tensor._is_view():
        return False
    of_torch: Any = torch._C._autograd
    return bool(of_torch._get_creation_meta(tensor) == of_torch.CreationMeta.DEFAULT)


def base_of(tensor: Tensor) -> Tensor:
    """Return what `tensor` is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base
