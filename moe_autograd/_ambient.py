"""Capture the state that torch keeps per thread, and reinstate it on another thread.

A thread pool starts every job in the world of a fresh thread: gradients on, autocast off, no modes. A user who
writes `with torch.autocast("cpu"):` around a layer means what the layer's workers do as well. PyTorch has this
mechanism in C++ (`at::ThreadLocalState`, which the autograd engine and `torch.jit.fork` use) but does not offer
it to Python, so this module carries the entries one by one:

==============================  =====================================================================
kept per thread                 carried how
==============================  =====================================================================
grad mode, inference mode       their own guards; also whether forward-mode gradients are on
autocast                        enabled and dtype of each device type in use, and the cache switch
saved-tensor hooks              the innermost pair (the only one PyTorch calls), or the "disabled" text
torch function modes            the stack; `set_default_device` and `with device:` are such modes
torch dispatch modes            the stack
`DisableTorchFunction`          the state that says for whom torch functions are off
current CUDA device             only where CUDA is in use; the streams are `_streams`' business
multithreaded backward          `torch.autograd.set_multithreading_enabled`
view replay                     `torch.autograd._force_original_view_tracking`
flush-denormal                  a processor flag; read by trying, since torch offers no getter
`torch.func` transforms         their stack, for backwards that `torch.vmap` is around
`contextvars`                   each worker runs in a copy of the caller's context
==============================  =====================================================================

Settings of the whole process (default dtype, deterministic algorithms, matmul precision, anomaly mode) need no
carrying. Two things cannot be carried, because C++ alone may push their state: forward-mode AD and `torch.jit.trace`.
A worker inside them computes a wrong number in silence, so `refuse_transforms` raises before any worker starts; also
within `torch.func` transforms, whose layers would have to pass the cuts between the calls' graphs.

Threads: the caller makes an `Ambient`, which may be reinstated on any number of threads at once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from moe_autograd.errors import UnsupportedTransformError

R = TypeVar("R")

_C: Any = torch._C  # its stubs lack some of what is used here

_PROXY: Any = _C._TorchDispatchModeKey.PROXY  # the mode of `make_fx`
_HALF_OF_SMALLEST_NORMAL = 2.0**-1023


def refuse_transforms(tensors: Iterable[torch.Tensor]) -> None:
    """Raise if a transform is active that worker threads cannot see.

    Args:
        tensors: what the calls take; looked at only while a forward-mode level is open.

    Raises:
        UnsupportedTransformError: inside `torch.func` (`grad`, `vmap`, `jvp`, ...), `torch.jit.trace` or
            `torch.export`, or when one of `tensors` carries a forward-mode tangent.
    """
    if _C._are_functorch_transforms_active():
        raise UnsupportedTransformError(
            "parallel map: expected no active torch.func transform, got one (grad, vmap, jvp, jacrev or another). "
            "Worker threads cannot see it. Apply the functions in a plain loop inside the transform."
        )
    if _C._get_tracing_state() is not None:
        raise UnsupportedTransformError(
            "parallel map: expected no torch.jit.trace around it, got one. It would record what workers compute as "
            "constants. Trace a plain loop over the functions."
        )
    if torch.compiler.is_exporting():
        raise UnsupportedTransformError(
            "parallel map: expected no torch.export around it, got one. It would record results that no gradient flows "
            "through. Export a plain loop over the functions."
        )
    refuse_tangents(tensors)


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Raise if one of `tensors` carries a forward-mode tangent; also asked of results, which closures reach.

    Raises:
        UnsupportedTransformError: one does.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedTransformError(
            "parallel map: expected tensors without forward-mode tangents, got a dual tensor. "
            "Worker threads cannot propagate tangents. Apply the functions in a plain loop for forward-mode AD."
        )


def is_recorded(values: Iterable[object] = ()) -> bool:
    """Whether `make_fx` is around, also with `pre_dispatch=True`, which has a stack of its own.

    Or `symbolic_trace`, which passes others in the place of tensors, among `values`.
    """
    is_in_stack = _C._len_torch_dispatch_stack() and _C._get_dispatch_mode(_PROXY)
    is_around = is_in_stack or torch._ops._get_dispatch_mode_pre_dispatch(_PROXY)
    return bool(is_around) or Proxy in map(type, values)


def _flushes_denormals() -> bool:
    return _HALF_OF_SMALLEST_NORMAL * 1.0 == 0.0


_accelerator = torch.accelerator.current_accelerator()  # what torch was built for

Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state() -> Autocast:
    """Return for each type of device that may be in use whether autocast is on, and its dtype."""
    on_cpu = "cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    if _accelerator is None:
        return (on_cpu,)
    kind = _accelerator.type
    return on_cpu, (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


def _recording() -> tuple[bool, bool]:
    """Return whether gradients are recorded, and those of forward mode: mostly all that differs."""
    return torch.is_grad_enabled(), _C._is_fwd_grad_enabled()


class _Settings(NamedTuple):
    """The other entries that a look tells apart: all but devices, hooks and modes."""

    inference_mode: bool
    function_is_on: bool
    function_is_off_for_all: bool
    autocast: Autocast
    autocast_cache: bool
    multithreading: bool
    view_replay: bool
    flush_denormals: bool


def _settings() -> tuple[Any, ...]:
    """Return what `_Settings` takes. Every thread of a map looks at it, so the names are left for where they count."""
    return (
        torch.is_inference_mode_enabled(),
        _C._is_torch_function_enabled(),
        _C._is_torch_function_all_disabled(),
        autocast_state(),
        torch.is_autocast_cache_enabled(),
        _C._is_multithreading_enabled(),
        _C._is_view_replay_enabled(),
        _flushes_denormals(),
    )


class Ambient:
    """One thread's world at one moment, ready to be reinstated on others.

    Most callers' worlds are like that of a fresh thread: one look tells, and there is nothing to reinstate.
    """

    __slots__ = (
        "_context",
        "_cuda_device",
        "_dispatch_modes",
        "_function_modes",
        "_function_state",
        "_has_more",
        "_hooks_disabled",
        "_recording",
        "_saved_tensor_hooks",
        "_settings",
        "_transforms",
    )

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._recording, self._settings = _recording(), _settings()
        self._function_state = _C._get_torch_function_state()
        self._hooks_disabled = _C._autograd._saved_tensors_hooks_get_disabled_error_message()
        self._saved_tensor_hooks = (
            None if self._hooks_disabled else _C._autograd._top_saved_tensors_default_hooks(True)
        )
        self._function_modes = tuple(_get_current_function_mode_stack())
        self._dispatch_modes = tuple(_get_current_dispatch_mode_stack())
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._transforms = _transforms() if _C._are_functorch_transforms_active() else None
        beside_settings = (
            self._cuda_device,
            self._hooks_disabled,
            self._saved_tensor_hooks,
            self._transforms,
        )
        self._has_more = bool(self._function_modes or self._dispatch_modes) or beside_settings != (None,) * 4

    def run(self, function: Callable[[], R]) -> R:
        """Call `function` in this world, on the current thread, and put the thread's own world back."""
        return self._context.copy().run(self._run_reinstated, function)

    def _run_reinstated(self, function: Callable[[], R]) -> R:
        own = _settings()
        if own == self._settings and not self._has_more:
            return self._run_recorded(function)
        with contextlib.ExitStack() as stack:
            self._reinstate(_Settings(*own), stack.enter_context, stack.callback)
            return function()

    def _run_recorded(self, function: Callable[[], R]) -> R:
        """Call `function` where all but the recording of gradients is as wanted."""
        own = _recording()
        if own == self._recording:
            return function()
        _set_recording(self._recording)
        try:
            return function()
        finally:
            _set_recording(own)

    def _reinstate(self, own: _Settings, enter: Callable[[Any], Any], at_end: Callable[..., Any]) -> None:
        """Set what differs from the thread's own world; modes last, so that they see none of the rest."""
        wanted = _Settings(*self._settings)
        if self._cuda_device is not None:
            enter(torch.cuda.device(self._cuda_device))
        if wanted.inference_mode != own.inference_mode:
            enter(torch.inference_mode(wanted.inference_mode))
            own = _Settings(*_settings())  # it has set others anew
        if self._recording != (recorded := _recording()):
            at_end(_set_recording, recorded)
            _set_recording(self._recording)
        if (wanted.autocast, wanted.autocast_cache) != (own.autocast, own.autocast_cache):
            # To leave `torch.autocast` would clear the cache of casts under other threads.
            at_end(_set_autocast, own.autocast, own.autocast_cache)
            _set_autocast(wanted.autocast, wanted.autocast_cache)
        if wanted.multithreading != own.multithreading:
            enter(torch.autograd.set_multithreading_enabled(wanted.multithreading))
        if wanted.view_replay != own.view_replay:
            enter(torch.autograd._force_original_view_tracking(wanted.view_replay))
        if wanted.flush_denormals != own.flush_denormals:
            at_end(torch.set_flush_denormal, own.flush_denormals)
            torch.set_flush_denormal(wanted.flush_denormals)
        if self._hooks_disabled is not None:
            enter(torch.autograd.graph.disable_saved_tensors_hooks(self._hooks_disabled))
        if self._saved_tensor_hooks is not None:
            enter(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensor_hooks))
        if (own_state := _C._get_torch_function_state()) != self._function_state:
            at_end(_C._set_torch_function_state, own_state)
            _C._set_torch_function_state(self._function_state)
        if self._transforms is not None:
            enter(temporarily_restore_interpreter_stack(self._transforms))
        # Modes are pushed as they are: `with mode` would run their `__enter__`, which may count or record.
        for mode in self._function_modes:
            _C._push_on_torch_function_stack(mode)
            at_end(_C._pop_torch_function_stack)
        for mode in self._dispatch_modes:
            _push_mode(mode)
            at_end(_pop_mode, getattr(mode, "_mode_key", None))


def _transforms() -> list[Any]:
    """Return the stack of `torch.func`'s transforms, which nobody may look at without taking it apart."""
    with temporarily_clear_interpreter_stack() as transforms:
        return transforms


def _set_recording(wanted: tuple[bool, bool]) -> None:
    _C._set_grad_enabled(wanted[0])
    _C._set_fwd_grad_enabled(wanted[1])


class contained:
    """Undo what is left on inside: grad mode, inference mode, autocast, a default device, modes, saved-tensor hooks.

    A script may enter one of them and never leave it. What follows on its thread is another's, and would be computed
    with other numbers, or not be differentiated. A class, since this is done for each turn of an expert.
    """

    __slots__ = ("_autocast", "_flags", "_hooks", "_num_modes")

    def __enter__(self) -> None:
        self._autocast = _autocast_nesting(), autocast_state(), torch.is_autocast_cache_enabled()
        self._num_modes = _C._len_torch_function_stack(), _C._len_torch_dispatch_stack()
        self._hooks = _C._autograd._top_saved_tensors_default_hooks(True)
        self._flags = _C._InferenceMode(False)  # its end puts back all that is a flag of the thread
        self._flags.__enter__()

    def __exit__(self, *_: object) -> None:
        self._flags.__exit__(None, None, None)
        nesting, autocast, cache = self._autocast
        if _autocast_nesting() > nesting:
            while torch.autocast_decrement_nesting() > nesting:
                pass
            torch.clear_autocast_cache()
        if (autocast_state(), torch.is_autocast_cache_enabled()) != (autocast, cache):
            _set_autocast(autocast, cache)
        num_function_modes, num_dispatch_modes = self._num_modes
        if _C._len_torch_function_stack() > num_function_modes:
            torch.set_default_device(None)
        while _C._len_torch_function_stack() > num_function_modes:
            _C._pop_torch_function_stack()
        while _C._len_torch_dispatch_stack() > num_dispatch_modes:
            _pop_mode()
        while _C._autograd._top_saved_tensors_default_hooks(True) not in (None, self._hooks):
            _C._autograd._pop_saved_tensors_default_hooks()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast(state: Autocast, cache: bool) -> None:
    torch.set_autocast_cache_enabled(cache)
    for device_type, enabled, dtype in state:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
