"""A thread that runs something in another's world has its own one back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import VmapInterpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from moe_autograd._ambient import Ambient


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def same(x: Tensor) -> Tensor:
    return x


@contextmanager
def without_gradients_in_a_mode() -> Iterator[None]:
    with torch.no_grad(), FunctionMode():
        yield


@contextmanager
def without_a_cache() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


@contextmanager
def inference_on_several_threads() -> Iterator[None]:
    with torch.inference_mode(), torch.autograd.set_multithreading_enabled(True):
        yield


@contextmanager
def transforms(*levels: tuple[int, str]) -> Iterator[None]:
    for level in levels:
        _functorch._vmap_increment_nesting(*level)
    try:
        yield
    finally:
        for _ in levels:
            _functorch._vmap_decrement_nesting()


World = Callable[[], AbstractContextManager[Any]]
SETTINGS: dict[str, World] = {
    "no gradients": torch.no_grad,
    "no forward gradients": lambda: _set_fwd_grad_enabled(False),
    "inference mode": torch.inference_mode,
    "inference mode on several threads": inference_on_several_threads,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no cache of casts": without_a_cache,
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: torch.autograd._force_original_view_tracking(True),
    "no denormals": flushing,
    "no torch functions of subclasses": torch._C.DisableTorchFunctionSubclass,
    "no torch functions": torch._C.DisableTorchFunction,
}
WORLDS: dict[str, World] = {
    **SETTINGS,
    "no hooks": lambda: disable_saved_tensors_hooks("none here"),
    "hooks": lambda: saved_tensors_hooks(same, same),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "default device": lambda: torch.device("meta"),
    "no gradients in a mode": without_gradients_in_a_mode,
    "vmap": lambda: transforms((2, "error")),
    "vmap in vmap": lambda: transforms((2, "same"), (3, "different")),
}


def world() -> list[Any]:
    """Return what is seen of all these."""
    of_torch: Any = torch._C
    hooks = of_torch._autograd._saved_tensors_hooks_get_disabled_error_message()
    return [
        *(torch.is_grad_enabled(), of_torch._is_fwd_grad_enabled(), torch.is_inference_mode_enabled()),
        *(
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        *(of_torch._is_multithreading_enabled(), of_torch._is_view_replay_enabled()),
        2.0**-1023 * 1.0 == 0.0,
        hooks,
        None if hooks else of_torch._autograd._top_saved_tensors_default_hooks(True),
        *(of_torch._is_torch_function_enabled(), of_torch._is_torch_function_all_disabled()),
        *(_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()),
        [
            (one.level(), VmapInterpreter(one).batch_size())
            for one in _functorch.get_interpreter_stack() or ()
        ],
    ]


@pytest.mark.parametrize("name", WORLDS)
def test_it_has_its_own_world_back(name: str) -> None:
    own = world()
    with WORLDS[name]():
        wanted = world()
        ambient = Ambient()
    assert wanted != own
    assert ambient.run(world) == wanted
    assert world() == own


def test_it_has_its_own_world_back_where_something_fails() -> None:
    own = world()
    for make in WORLDS.values():
        with make():
            ambient = Ambient()
        with pytest.raises(ZeroDivisionError):
            ambient.run(lambda: 1 // 0)
        assert world() == own


@pytest.mark.parametrize("name", SETTINGS)
def test_a_thread_with_such_settings_may_run_something_in_a_plain_world(name: str) -> None:
    plain, ambient = world(), Ambient()
    with SETTINGS[name]():
        own = world()
        assert ambient.run(world) == plain
        assert world() == own
