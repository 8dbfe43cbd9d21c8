"""Which operators draw from a call's own generator, and how they are handed it (Rule 1 of `_random`).

This is how torch's own `vmap` catches random operators (VmapModeRegistrations.cpp): a second kernel, for a dispatch
key that is switched on in the threads that want it. Operators that are not random pass by at no cost.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS as _KEYS_PASSED_BY_LATER_ONES
from torch._ops import OpOverload, _higher_order_ops

from moe_autograd._random.fused import FUSED_OPERATORS, OnOwnState, alone_with
from moe_autograd._random.seeds import CPU, VMAP, running

_KEY_NAME = "TESTING_ONLY_GenericMode"
KEY = torch._C._dispatch_key_parse(_KEY_NAME)
# Under `is_grads_batched=True` the calling thread alone refuses to draw; the calls that it runs are like the others.
_PASSED_BY = DispatchKeySet(KEY) | VMAP

# Every aten operator that takes a generator and is not composed of others (a test compares with torch's own list).
RANDOM_OPERATORS = (
    *("_fused_dropout", "_sample_dirichlet", "_standard_gamma", "bernoulli", "bernoulli_", "binomial"),
    *("cauchy", "cauchy_", "exponential", "exponential_", "geometric", "geometric_"),
    *("log_normal", "log_normal_", "multinomial", "normal", "normal_", "normal_functional", "poisson"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "random", "random_"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional", "uniform", "uniform_"),
)

_RNN_DROPOUT = 11  # where `_cudnn_rnn` takes it; whether it trains comes next, the dropout's state last

_lock = threading.RLock()  # a handler of a signal that makes a map, or forks, takes it again
installed: list[DispatchKey] = []  # the key of the kernels, when all are
# by namespace; one that is collected unregisters its kernels
_libraries: dict[str, torch.library.Library] = {}


def install() -> None:
    """Register the second kernels, once for the process.

    No garbage is collected meanwhile: a finalizer that makes a map would wait for the lock, which its thread has.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with _lock:
            if not installed:
                _install()
    finally:
        if is_collecting:
            gc.enable()


def _install() -> None:
    fallthrough, kernels = _library("_"), _library("aten")
    if not torch._C._dispatch_has_backend_fallback(KEY):
        fallthrough.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    _KEYS_PASSED_BY_LATER_ONES.append(KEY)
    for higher_order in list(_higher_order_ops.values()):
        higher_order.fallthrough(KEY)
    for name, operator in operators_with_generator():
        position = _generator_position(operator)
        draw = _draw_noise if name.startswith("rrelu") else _draw_from_own_stream
        _register(kernels, name, functools.partial(draw, operator, position))
    for name, operator, sibling in operators_that_draw_inside():
        _register(kernels, name, functools.partial(_draw_as_sibling, operator, sibling))
    for name, operator in fused_operators():
        _register(kernels, name, fused_kernel(operator))
    _register(kernels, "native_dropout", _drop_out)
    _register(kernels, "_cudnn_rnn", _run_rnn)
    installed.append(KEY)


def _library(namespace: str) -> torch.library.Library:
    """Return the one that keeps our kernels there, also of an attempt that Ctrl-C has ended."""
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries.setdefault(namespace, torch.library.Library(namespace, "IMPL"))
        _keep_at_exit(library)
    return library


def _register(kernels: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel, unless that is done: a handler that makes a map, or a child of its, finds only some."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY_NAME):
        kernels.impl(name, kernel, _KEY_NAME)


def _keep_at_exit(library: torch.library.Library) -> None:
    """Have torch leave a library be as the interpreter exits: finalizers that make maps run later still."""
    for known in weakref.getweakrefs(library):
        if isinstance(known.__callback__, weakref.finalize):
            known.__callback__.atexit = False


def operators_with_generator() -> Iterator[tuple[str, OpOverload]]:
    """Return the operators that are caught, each with its name and overload."""
    for packet_name in RANDOM_OPERATORS:
        packet = getattr(torch.ops.aten, packet_name)
        for overload_name in packet.overloads():
            operator = getattr(packet, overload_name)
            if _generator_position(operator) >= 0 and not _is_composite(operator):
                yield operator.name().removeprefix("aten::"), operator


def operators_that_draw_inside() -> Iterator[tuple[str, OpOverload, OpOverload]]:
    """Return overloads that take no generator, each with its name and the overload that takes one besides.

    What they draw inside would be caught, but not under a dispatch mode: that switches the key off for its operators.
    """
    for packet_name in RANDOM_OPERATORS:
        packet = getattr(torch.ops.aten, packet_name)
        overloads = [getattr(packet, name) for name in packet.overloads()]
        siblings = {_names_without_generator(one): one for one in overloads if _generator_position(one) >= 0}
        for operator in overloads:
            sibling = siblings.get(_names_without_generator(operator))
            if sibling is not None and _generator_position(operator) < 0 and not _is_composite(operator):
                yield operator.name().removeprefix("aten::"), operator, sibling


def fused_operators() -> Iterator[tuple[str, OpOverload]]:
    """Return those that draw where the generator cannot be passed, each with its name and overload."""
    for packet_name in FUSED_OPERATORS:
        packet = getattr(torch.ops.aten, packet_name)
        for overload_name in packet.overloads():
            if overload_name != "out":  # composed of the others
                operator = getattr(packet, overload_name)
                yield operator.name().removeprefix("aten::"), operator


def fused_kernel(operator: OpOverload) -> functools.partial[Any]:
    """Return the second kernel of such an operator."""
    arguments = operator._schema.arguments
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dropout_p")
    return functools.partial(_draw_in_kernel, operator, position)


def _names_without_generator(operator: OpOverload) -> tuple[str, ...]:
    return tuple([f"{one.name}: {one.type}" for one in operator._schema.arguments if one.name != "generator"])


def _generator_position(operator: OpOverload) -> int:
    """Return where the operator takes a generator, -1 if it takes none."""
    arguments = operator._schema.arguments
    return next((i for i, argument in enumerate(arguments) if argument.name == "generator"), -1)


def _is_composite(operator: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _draw_from_own_stream(operator: OpOverload, position: int, *args: Any, **kwargs: Any) -> Any:
    given = args[position] if position < len(args) else kwargs.get("generator")
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        own = _generator_for(_device_of(args, kwargs)) if given is None else None
        if own is None:
            with alone_with(given):
                return operator(*args, **kwargs)
        if position < len(args):
            return operator(*args[:position], own, *args[position + 1 :], **kwargs)
        return operator(*args, **{**kwargs, "generator": own})


def _draw_noise(operator: OpOverload, position: int, *args: Any, **kwargs: Any) -> Any:
    """Draw for `rrelu`, and have something saved after it.

    Torch saves its noise before it has drawn any. Where nothing was saved after that, the second run of a checkpoint
    stops there, and the gradients are garbage.
    """
    output = _draw_from_own_stream(operator, position, *args, **kwargs)
    if torch.is_grad_enabled() and not _is_tracing():
        torch.ones((), device="cpu", requires_grad=True).exp()  # saves its result
    return output


def _draw_as_sibling(operator: OpOverload, sibling: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        own = _generator_for(_device_of(args, kwargs))
        if own is None:
            return operator(*args, **kwargs)
        if isinstance(args[0], torch.Tensor) and args[0].is_nested:  # torch has no sibling for these
            like = torch.empty_like(args[0], **kwargs)
            values = like.values()
            values.copy_(sibling(values, *args[1:], generator=own))
            return like
        if torch._C._are_functorch_transforms_active() and isinstance(args[0], torch.Tensor):
            return _draw_under_vmap(operator, own, *args, **kwargs)
        return sibling(*args, **kwargs, generator=own)


def _draw_under_vmap(
    operator: OpOverload, own: torch.Generator, like: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Draw by the shape: `vmap` knows how to for `rand` with a generator, and not for `rand_like`."""
    by_shape = getattr(torch.ops.aten, operator.overloadpacket.__name__.removesuffix("_like"))
    kwargs = {"dtype": like.dtype, "layout": like.layout, "device": like.device, **kwargs}
    kwargs.pop("memory_format", None)  # a shape has none
    return by_shape(*args, like.shape, generator=own, **kwargs)


def _draw_in_kernel(operator: OpOverload, position: int, *args: Any, **kwargs: Any) -> Any:
    has_dropout = position < len(args) and args[position] > 0
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        own = _generator_for(args[0].device) if has_dropout else None
        if own is None:
            return operator(*args, **kwargs)
        with OnOwnState(operator, own):
            return operator(*args, **kwargs)


def _run_rnn(*args: Any) -> Any:
    """Give cuDNN a dropout state of the call's own; torch has one for each device, which all threads go on with."""
    dropout, train = args[_RNN_DROPOUT : _RNN_DROPOUT + 2]
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        own = _generator_for(CPU) if dropout > 0 and train and args[0].device.type != "meta" else None
        if own is None:
            return torch.ops.aten._cudnn_rnn.default(*args)
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=own))
        state = torch.ops.aten._cudnn_init_dropout_state.default(
            dropout, train, seed, dtype=torch.uint8, device=args[0].device
        )
        return torch.ops.aten._cudnn_rnn.default(*args[:-1], state)


def _drop_out(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """As torch's kernel, which takes no generator, does on the CPU."""
    with _ExcludeDispatchKeyGuard(_PASSED_BY):
        is_idle = train is False or x.numel() == 0
        own = None if is_idle else _generator_for(x.device)
        if own is None:
            return torch.ops.aten.native_dropout.default(x, p, train)
        if x.is_nested:
            mask = torch.empty_like(x, dtype=torch.bool)
            mask.values().bernoulli_(1 - p, generator=own)
        else:  # not in place, or `vmap` has no mask for each row
            mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli(1 - p, generator=own)
        return x.mul(mask).mul(1 / (1 - p) if p < 1 else 0.0), mask


def _generator_for(device: torch.device) -> torch.Generator | None:
    """Return what the running call draws from now; `None` outside of maps, and where nothing is really drawn."""
    if running.seeds is None or device.type == "meta" or _is_tracing():
        return None
    return running.seeds.draw(running.index, device)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that a random operator draws on: its tensors', else the one it is told to create on."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument.device
    device = kwargs.get("device")
    return CPU if device is None else _with_index(torch.device(device))


def _with_index(device: torch.device) -> torch.device:
    """Say which device is meant by `cuda`: one device must not have two generators of one seed."""
    if device.type in ("cpu", "meta") or cast("int | None", device.index) is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _is_tracing() -> bool:
    """Whether a compiler traces with fake tensors, which draw nothing and take no generator."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _start_anew() -> None:
    """In a child that a handler has forked in here, this thread has the lock: others would wait for it."""
    global _lock
    _lock.release()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds the lock would never get it.
    os.register_at_fork(
        before=lambda: _lock.acquire(), after_in_parent=lambda: _lock.release(), after_in_child=_start_anew
    )
