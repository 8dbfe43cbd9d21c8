"""Call the caller's saved-tensor hooks in the order of the calls, though the calls run concurrently.

`torch.autograd.graph.saved_tensors_hooks` promises nothing about order, but `torch.utils.checkpoint` relies on it: it
knows a saved tensor by its position, and finds it again by the same position in the recomputation. Workers that
called such a hook as they arrive would exchange tensors, in silence. It also recomputes once for each backward it
sees, and the inner backward of each call is one. So:

Rule 1. While a call runs, each tensor it saves is put into a box. When the call and all before it have ended, its
        boxes are packed: the caller's hook sees the tensors in the order in which a plain loop saves them.
Rule 2. Before the backwards of a map fan out, what checkpoint's hooks packed for the calls that run is unpacked, in the
        same order, by the thread and in the backward that the caller started. Other hooks unpack a tensor when the
        backward of its call asks for it, as ever: what all calls saved need not be in memory at once.
Rule 3. The hook sees a tensor later than natively. If it was changed in place meanwhile, a backward that asks for it
        raises, as it does where there are no hooks; where nobody asks for it, nothing is wrong.
Rule 4. A tensor that is asked for before its turn (by a backward inside a forward) meets the hooks at once, except
        those of `torch.utils.checkpoint`, which count: these see it in its turn, and it comes back as it is.
Rule 5. What a hook draws for a call's tensors comes from the call's own stream, whichever thread packs them.
Rule 6. A result that was saved leads back to the node that holds its box, and nobody would find the two. So a box whose
        turn never comes, as a call has failed or a hook has had enough (checkpoint's early stop), cuts it off.

Threads: `of` is used by the thread that runs the call; hooks never run at the same time as each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe_autograd._contexts import contextmanager
from moe_autograd._interrupts import unwindable
from moe_autograd._random import running
from moe_autograd.autograd.unrecorded import unrecorded


class Box:
    """One saved tensor, on its way to the caller's hooks and back."""

    __slots__ = ("__weakref__", "_ahead", "_change", "_hooks", "_is_packed", "_packed", "_version")

    def __init__(self, tensor: Tensor, hooks: OrderedHooks) -> None:
        self._hooks = hooks
        self._is_packed = False
        self._packed: Any = tensor
        self._version = tensor._version
        self._ahead: Tensor | None = None
        self._change = ""  # what to say of it to a backward that asks for the tensor (Rule 3)

    def pack(self) -> None:
        """Hand the tensor to the caller's hook (Rule 1)."""
        if self._is_packed:
            return
        self._look_for_change()
        self._packed = self._hooks.pack(self._packed)
        self._is_packed = True

    def _look_for_change(self) -> None:
        if self._packed._version != self._version:
            self._change = (
                f"a tensor saved for the backward has been modified by an inplace operation before its saved-tensor "
                f"hook could see it: {tuple(self._packed.shape)} is at version {self._packed._version}; expected "
                f"version {self._version}. Change a copy, or leave the hooks out for this call."
            )

    def cut_off(self) -> None:
        """Keep the tensor without its history, since its turn will never come (Rule 6)."""
        if not self._is_packed:
            self._packed = self._packed.detach()

    def unpack_ahead(self) -> None:
        """Get the tensor back now, if its hooks count (Rule 2)."""
        if self._is_packed and self._hooks.is_counting:
            self._ahead = self._hooks.unpack(self._packed)

    def unpack(self) -> Tensor:
        """Return the tensor, and keep what `unpack_ahead` got no longer."""
        is_early = not self._is_packed and self._hooks.is_counting  # Rule 4
        if is_early:
            self._look_for_change()
        else:
            self.pack()
        if self._change:
            raise RuntimeError(self._change)
        if is_early:
            tensor: Tensor = self._packed
            return tensor
        ahead, self._ahead = self._ahead, None
        return self._hooks.unpack(self._packed) if ahead is None else ahead


class OrderedHooks:
    """The caller's innermost pair of hooks, as the calls of one map see it."""

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], num_calls: int
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._waiting: list[list[Box]] = [[] for _ in range(num_calls)]
        self._boxes: list[list[weakref.ref[Box]]] = [[] for _ in range(num_calls)]
        self.is_counting = counts(pack)
        self._lock = threading.RLock()  # a recomputation packs while it unpacks
        self._streams: list[int | None] = [None] * num_calls  # of those that have ended
        self._num_packed = 0  # calls, from the first on
        self._has_failed = False

    @unwindable
    def of(self, index: int) -> Iterator[None]:
        """Put what call `index` saves into boxes, and pack them when their turn has come."""
        boxes = self._waiting[index]

        def put(tensor: Tensor) -> Box:
            box = Box(tensor, self)
            boxes.append(box)
            return box

        try:
            with handing_on(put, self._pack), _saving_by(put, Box.unpack):
                yield
            self._end(index)
        except BaseException:
            self._has_failed = True
            for i, stream in enumerate(self._streams):
                if stream is not None or i == index:
                    self._cut_off(i)
            raise
        if self._has_failed:
            self._cut_off(index)

    def _end(self, index: int) -> None:
        """Note that a call has ended; pack what calls have saved before which all have ended (Rule 1)."""
        own = running.index
        with self._lock:
            self._streams[index] = own
            try:
                while self._num_packed < len(self._boxes):
                    turn = self._num_packed
                    stream = self._streams[turn]
                    if stream is None:
                        break
                    running.index, self._num_packed = stream, turn + 1
                    self._pack_those_of(turn)
            finally:
                running.index = own

    def _pack_those_of(self, index: int) -> None:
        boxes = self._waiting[index]
        for box in boxes:
            box.pack()
        # A call that ended early has the list of references. The other goes with each node, as `put` does.
        self._boxes[index] += [weakref.ref(box) for box in boxes]
        boxes.clear()

    def _cut_off(self, index: int) -> None:
        boxes = self._waiting[index]
        for box in boxes:
            box.cut_off()
        boxes.clear()

    def boxes(self, index: int) -> Sequence[weakref.ref[Box]]:
        """Return what call `index` has saved; a box dies with the node that saved it."""
        return self._boxes[index]

    def pack(self, tensor: Tensor) -> Any:
        """Call the caller's first hook."""
        with self._lock:
            return unrecorded(partial(self._pack, tensor))

    def unpack(self, packed: Any) -> Tensor:
        """Call the caller's second hook."""
        with self._lock:
            return self._unpack(packed)


class _Unpacks(Protocol):
    def unpack_ahead(self) -> None: ...


U = TypeVar("U", bound=_Unpacks)


def unpack_ahead(boxes: Sequence[weakref.ref[U]]) -> None:
    """Get back what hooks that count have packed into those boxes that a graph still holds (Rule 2)."""
    for reference in boxes:
        if (box := reference()) is not None:
            box.unpack_ahead()


def counts(pack: Callable[[Tensor], Any]) -> bool:
    """Whether a hook relies on the order in which it sees tensors: that of checkpoint, or one that hands on to it."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint" or getattr(pack, "counts", False)


@unwindable
def _saving_by(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Do as `saved_tensors_hooks`; those are left in Python, and Ctrl-C that comes there leaves them on for good."""
    try:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def handing_on(pack: Any, to: Any) -> Iterator[None]:
    """Let everybody know in this block that what one hook sees it hands on to another.

    From torch 2.14 on a selective checkpoint asks hooks whether they are a checkpoint's, and for the user's behind
    them: it warns of these. The answer goes again, since a graph keeps the hooks of what it saved.
    """
    pack.counts = counts(to)
    if is_checkpoints := getattr(to, "_checkpoint_internal", False):
        pack._checkpoint_internal, pack._user_hooks = True, getattr(to, "_user_hooks", None)
    try:
        yield
    finally:
        if is_checkpoints:
            del pack._user_hooks


def ordered_hooks(num_calls: int) -> OrderedHooks | None:
    """Return the calling thread's hooks made safe for a map of `num_calls` calls; `None` where there are none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else OrderedHooks(*hooks, num_calls)
