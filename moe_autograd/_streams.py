"""Give every call of a map streams of its own on the accelerator, ordered with those of its caller.

What torch does: a kernel is queued on the stream that is current on its thread and device, and a new thread begins with
the default ones. In the way: calls on other threads would be queued apart from their caller, in no order with it. So

        caller's stream   ──▶ ready ─┬────────────────────────────┬─▶ goes on
        lane of call 0               ├─▶ kernels of call 0 ─▶ done ┤
        lane of call 1               └─▶ kernels of call 1 ─▶ done ┘

Rule 1. A call begins, on the device, after all that its caller had queued on any of its streams; the caller goes on
        after all calls. Nobody waits on the host: these are events between streams.
Rule 2. All devices that this process uses take part, as in torch's own engine (`stash_current_streams`): a call may
        compute on another device than the current one.
Rule 3. The allocator gives memory back to the stream that it was taken for, as soon as the host lets go of it. A
        tensor that another stream uses is recorded there (`use_here`): what a call takes on its lanes, what it returns
        on its caller's streams.
Rule 4. A call has the lane of its number in every map and pass. Its backward finds the memory that its forward has
        used, and the allocator keeps no more pools than there are calls.
Rule 5. The engine hands kernels of a backward to a thread of the device, which runs the join and waits there for the
        calls; so a backward within a call stays on the call's thread.
Rule 6. Calls that take turns on the host do so on the device: one ends with `queued_here`, and the next goes on
        there with `continue_after`.
Rule 7. Autocast keeps one cast of a weight for everybody, queued by whoever came first. Calls that share weights, and
        so would read it in no order with that, each make their own: the cache is off on their lanes.
Rule 8. What queues kernels does not compute. So one thread at a time does that, the caller's, and others are added for
        calls that wait.
Rule 9. A graph capture would record one stream, and memory that others give back. It is refused.

Where no accelerator is in use, nothing of this happens. Written for any accelerator that torch knows, with what
`torch.accelerator` offers; `Accelerator` is all that there is of it.

Mutable state: `Accelerator._lanes` grows by single operations that the interpreter makes atomic; so does `_done`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._functorch import is_legacy_batchedtensor as _is_batched

from moe_autograd._contexts import contextmanager
from moe_autograd.errors import UnsupportedTransformError

_TORCHS_OWN = (Tensor, torch.nn.Parameter)
_SEEN = contextlib.nullcontext()
_OF_MODES = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)

# Of a device. Torch hands out 32 streams, again and again. With each that a thread multiplies matrices on, cuBLAS takes
# memory for good, 32 MiB on a Hopper GPU; and eight LSTMs were as fast on eight of them as on 32.
MOST_LANES = 8


class Accelerator:
    """The streams of the devices of one kind, by their index.

    Args:
        kind: such as "cuda".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._module = torch.get_device_module(kind)
        self._has_context = getattr(torch._C, f"_{kind}_hasPrimaryContext", None)
        self._lanes: dict[tuple[int, int], torch.Stream] = {}

    def is_in_use(self) -> bool:
        """Whether this process has used a device; asking does not count as use."""
        return bool(self._module.is_initialized())

    def devices(self) -> list[int]:
        """Return the devices in use (Rule 2)."""
        devices = range(torch.accelerator.device_count())
        return [d for d in devices if self._has_context is None or self._has_context(d)]

    def current_device(self) -> int:
        """Return the device that this thread uses by default."""
        return torch.accelerator.current_device_index()

    def set_device(self, device: int) -> None:
        """Let this thread use `device` by default."""
        torch.accelerator.set_device_index(device)

    def current_stream(self, device: int) -> torch.Stream:
        """Return the stream that this thread queues kernels for `device` on."""
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        """Let this thread queue kernels for the stream's device on it; that device is the current one then."""
        torch.accelerator.set_stream(stream)

    def lane(self, device: int, number: int) -> torch.Stream:
        """Return the stream of call `number` on `device` (Rule 4)."""
        key = (device, number % MOST_LANES)
        lane = self._lanes.get(key)
        if lane is None:
            # A weight's gradient is added on the lane of the call that used it first, and comes there from the caller's
            # stream. The engine orders the two, and warns of it as of a mistake.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            lane = self._lanes.setdefault(key, torch.Stream(torch.device(self.kind, device)))
        return lane

    def record(self, tensor: Tensor) -> None:
        """Let the allocator know that this thread's stream uses `tensor` (Rule 3)."""
        if tensor.is_cpu:
            return
        for part in _strided_parts(tensor):
            device = part.device
            if device.type == self.kind:
                with unseen() if _is_watched() and type(part) in _TORCHS_OWN else _SEEN:
                    part.record_stream(self.current_stream(device.index))


def _find() -> Accelerator | None:
    """Return what torch was built for; some kinds have no streams to choose from."""
    device = torch.accelerator.current_accelerator()
    if device is None or not hasattr(torch.get_device_module(device.type), "Stream"):
        return None
    return Accelerator(device.type)


_built_for = _find()


def accelerator_in_use() -> Accelerator | None:
    """Return the accelerator that this process uses; `None` where there is none, or none was used so far."""
    return _built_for if _built_for is not None and _built_for.is_in_use() else None


@contextmanager
def put_back(accelerator: Accelerator, devices: Iterable[int]) -> Iterator[None]:
    """Put this thread's device, and its streams on `devices`, back at the end, whatever is current then."""
    own_device = accelerator.current_device()
    own_streams = [accelerator.current_stream(device) for device in devices]
    try:
        yield
    finally:
        for stream in own_streams:
            accelerator.set_stream(stream)
        accelerator.set_device(own_device)


def queued_here() -> Sequence[torch.Event]:
    """Return what comes after all that this thread has queued on its streams so far (Rule 6)."""
    accelerator = accelerator_in_use()
    if accelerator is None:
        return ()
    return [accelerator.current_stream(device).record_event() for device in accelerator.devices()]


def continue_after(events: Iterable[torch.Event]) -> None:
    """Let what this thread queues from now on come after `events` (Rule 6)."""
    accelerator = accelerator_in_use()
    if accelerator is None:
        return
    for device in accelerator.devices():
        stream = accelerator.current_stream(device)
        for event in events:
            stream.wait_event(event)


def are_elsewhere(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a tensor of another device than the CPU."""
    return any(isinstance(value, Tensor) and not value.is_cpu for value in values)


def use_here(values: Iterable[Any]) -> None:
    """Record the tensors among `values` on the streams that this thread queues kernels on (Rule 3)."""
    if _built_for is None or not _built_for.is_in_use():
        return
    for value in values:
        if isinstance(value, Tensor):
            _built_for.record(value)


class Lanes:
    """The streams of one pass of one map. Construct it on the calling thread, before the calls run.

    Args:
        accelerator: whose streams.
        shares_weights: whether calls may use a weight that others use (Rule 7).

    Raises:
        UnsupportedTransformError: a graph is being captured (Rule 9).
    """

    def __init__(self, accelerator: Accelerator, *, shares_weights: bool) -> None:
        self._accelerator = accelerator
        self._shares_weights = shares_weights
        self._device = accelerator.current_device()
        self._devices = accelerator.devices()
        self._callers = [accelerator.current_stream(device) for device in self._devices]
        if any(stream.is_capturing() for stream in self._callers):
            raise UnsupportedTransformError(
                "parallel map: expected no graph capture around it, got one. Its calls run on streams of their own. "
                "Capture a plain loop over the functions, or each function by itself."
            )
        self._ready = [stream.record_event() for stream in self._callers]
        self._done: list[torch.Event] = []

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Let this thread queue the kernels of call `number` on its lanes, and put the thread's own streams back."""
        accelerator = self._accelerator
        lanes = [accelerator.lane(device, number) for device in self._devices]
        caches_casts = torch.is_autocast_cache_enabled()
        with put_back(accelerator, self._devices):
            try:
                if self._shares_weights:
                    torch.set_autocast_cache_enabled(False)
                for lane in lanes:
                    for event in self._ready:
                        lane.wait_event(event)
                    accelerator.set_stream(lane)
                accelerator.set_device(self._device)
                with torch.autograd.set_multithreading_enabled(False):  # Rule 5
                    yield
            finally:
                torch.set_autocast_cache_enabled(caches_casts)
                for device, lane in zip(self._devices, lanes, strict=True):
                    self._done.append(lane.record_event())
                    left = accelerator.current_stream(device)
                    if left != lane:  # the call has chosen another one, and not put its own back
                        self._done.append(left.record_event())

    def rejoin(self) -> None:
        """Let the caller's streams go on after all calls that have ended. Call it on the calling thread."""
        for event in tuple(self._done):
            for stream in self._callers:
                stream.wait_event(event)


@contextmanager
def as_on_lane(number: int) -> Iterator[None]:
    """Let nodes of the graph, made inside, belong to the lanes of call `number`, whose backward leads to them.

    The engine lets the stream of each node wait for those of whoever leads to it. Were it the caller's, where all calls
    lead to it, each call would wait there for the others.
    """
    accelerator = accelerator_in_use()
    if accelerator is None:
        yield
        return
    own_device, devices = accelerator.current_device(), accelerator.devices()
    with put_back(accelerator, devices):
        for device in devices:
            accelerator.set_stream(accelerator.lane(device, number))
        accelerator.set_device(own_device)
        yield


def lanes_from_here(*, shares_weights: bool) -> Lanes | None:
    """Return lanes for the calls of this thread; `None` where no accelerator is in use."""
    accelerator = accelerator_in_use()
    return None if accelerator is None else Lanes(accelerator, shares_weights=shares_weights)


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of `tensor`, such that can be recorded.

    None of one that a compiler traces with, nor of one that torch knows to be zeros, and keeps none.
    """
    if isinstance(tensor, torch._subclasses.FakeTensor) or torch._is_functional_tensor(tensor):
        return ()
    if _is_batched(tensor):
        tensor = _without_batches(tensor)
    if tensor.layout is torch.strided:
        if tensor._is_zerotensor():
            return ()
        if tensor.is_nested:
            return (tensor.detach().values(),)
        if tensor.is_conj() or tensor.is_neg():  # torch would record a copy that it resolves first
            return (_without_bits(tensor.detach()),)
        return (tensor,)
    if tensor.layout is torch.jagged:
        jagged: Any = tensor
        parts = jagged.values(), jagged.offsets(), jagged.lengths()
        return tuple([part for part in parts if part is not None])
    return sparse_parts(tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of a sparse one; none for another."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _without_bits(tensor: Tensor) -> Tensor:
    """Return the same memory as it is, where the tensor stands for its conjugate or its negative."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return tensor._neg_view() if tensor.is_neg() else tensor


def _without_batches(tensor: Tensor) -> Tensor:
    """Return the memory of what the backward of many gradients at once hands around."""
    level = 0
    while _is_batched(tensor):  # at each level there may be one
        level += 1
        tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return tensor


def _is_watched() -> bool:
    """Whether modes see what this thread calls; a plain loop records nothing."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_torch_function_mode_enabled()


@contextmanager
def unseen() -> Iterator[None]:
    """Keep what is called inside from modes; for tensors of torch's own classes."""
    with torch._C.DisableTorchFunction(), _ExcludeDispatchKeyGuard(_OF_MODES):
        yield
