"""Give every call of a map its own random numbers, whatever the scheduling.

torch has one CPU generator for the whole process. Calls that run concurrently would take their numbers from it in
the order in which the threads happen to arrive, and forking its state does not help: it is one object. So while a
thread runs calls of a map, random operators are handed the call's own generator instead:

1. *Which operators.* Those that take a `generator` argument in the dispatcher; everything else that is random
   (`dropout`, `rand_like`, `nn.LSTM`) is composed of them. Each gets a second kernel, for a dispatch key that is
   switched on only in threads that run calls. This is how torch's own `vmap` catches random operators
   (VmapModeRegistrations.cpp): operators that are not random pass by at no cost.
2. *Which numbers.* All calls of a map share one base, a number that the caller's stream would draw next; a call's
   generator is seeded from the base and the call's index. The caller's stream advances by that one draw when the
   first call draws, and not at all when none does. In a nested map the caller's stream is the outer call's own.
3. *Reading and setting the state.* `torch.get_rng_state`, `set_rng_state`, `manual_seed` and `fork_rng` reach the
   call's generator too: while maps run, `torch.random.default_generator` is a stand-in that asks who is calling. So
   are the generators of an accelerator's devices (`torch.cuda.default_generators`), once it is in use.
   Thereby `torch.utils.checkpoint`, which saves the state in the forward and sets it again in the backward, sees
   the same dropout masks among concurrent calls. From a state that was set, draws are not the caller's: a
   recomputation leaves its stream alone, as it does in plain PyTorch.

Nothing is installed before the first map runs. An operator that is given a generator by the user keeps it.

Threads: one `CallSeeds` belongs to one map and is shared by its threads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.random
from torch._C import DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._ops import OpOverload

_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_is_switched_on = torch._C._dispatch_tls_is_dispatch_key_included
_switch = torch._C._dispatch_tls_set_dispatch_key_included
_PROCESS_GENERATOR = torch.default_generator
_CPU = torch.device("cpu")
_ACCELERATOR = torch.accelerator.current_accelerator()  # what torch was built for
_APART = 1 << 40  # more than any index: calls apart draw other numbers than calls that are not

# Every aten operator that takes a generator and is not composed of others (a test compares with torch's own list).
RANDOM_OPERATORS = (
    *(
        "_fused_dropout",
        "_sample_dirichlet",
        "_standard_gamma",
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy",
    ),
    *("cauchy_", "exponential", "exponential_", "geometric", "geometric_", "log_normal", "log_normal_"),
    *("multinomial", "normal", "normal_", "normal_functional", "poisson", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "random", "random_", "rrelu_with_noise"),
    *("rrelu_with_noise_", "rrelu_with_noise_functional", "uniform", "uniform_"),
)

_install_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is collected


class _Running(threading.local):
    """Which call the current thread runs; `seeds` is `None` outside every map."""

    seeds: CallSeeds | None = None
    index: int = 0
    places: Sequence[int] | None = None  # of the calls that this one makes together, until it asks


running = _Running()


def take_places(num_calls: int) -> Sequence[int]:
    """Return the indices of the calls that the running call of a map makes together.

    Whoever makes them one after the other sets `running.index` to each: so each draws what it would draw as a call of
    its own. Where nobody said which they are, all draw what the running call draws.
    """
    places, running.places = running.places, None
    return [running.index] * num_calls if places is None else places


def _current_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator of the call that this thread runs; `None` outside every map."""
    return None if running.seeds is None else running.seeds.generator(running.index, device)


class CallSeeds:
    """The generators of one map's calls, made when a call first draws.

    Construct it on the calling thread, before the calls run.
    """

    __slots__ = ("_base", "_generators", "_has_drawn", "_lock", "_parent", "_put_aside")

    def __init__(self) -> None:
        self._parent = (running.seeds, running.index)
        self._lock = threading.Lock()
        self._generators: dict[tuple[int, torch.device], torch.Generator] = {}
        # own states of the calls that have set another one, by index and device
        self._put_aside: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._base: int | None = None
        self._has_drawn = False

    def apart(self) -> CallSeeds:
        """Take the base now, and leave the caller's stream alone: for calls that run while the caller goes on."""
        self._base = _mix(_next_draw(self._caller().clone_state()), _APART) >> 1
        self._has_drawn = True
        return self

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """Return the generator of call `index`; reading its state does not advance the caller's stream."""
        key = (index, device)
        if (found := self._generators.get(key)) is not None:
            return found
        with self._lock:
            if self._base is None:
                self._base = _next_draw(self._caller().clone_state())
        made = _new_generator(device)
        made.manual_seed(_mix(self._base, index))
        return self._generators.setdefault(key, made)

    def draw(self, index: int, device: torch.device) -> torch.Generator:
        """Return the generator of call `index` for an operator that is about to draw from it."""
        generator = self.generator(index, device)
        if not self._has_drawn and (index, device) not in self._put_aside:
            with self._lock:
                if not self._has_drawn:
                    self._has_drawn = True
                    self._advance_caller()
        return generator

    def set_state(self, index: int, device: torch.device, state: torch.Tensor) -> None:
        """Continue the stream of call `index` from `state`; from its own one if that is put back (rule 3)."""
        generator = self.generator(index, device)
        own = self._put_aside.setdefault((index, device), generator.get_state())
        if torch.equal(own, state):
            del self._put_aside[index, device]
        generator.set_state(state)

    def _caller(self) -> torch.Generator:
        seeds, index = self._parent
        return _PROCESS_GENERATOR if seeds is None else seeds.generator(index, _CPU)

    def _advance_caller(self) -> None:
        seeds, index = self._parent
        _next_draw(_PROCESS_GENERATOR if seeds is None else seeds.draw(index, _CPU))


def _new_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _next_draw(generator: torch.Generator) -> int:
    with _ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def _mix(base: int, index: int) -> int:
    """Mix two numbers into 64 bits without visible structure (SplitMix64's finaliser; Steele et al., 2014)."""
    z = (base + 0x9E3779B97F4A7C15 * (index + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


class own_streams:
    """Let the calls that this thread runs draw from `seeds`; set `running.index` before each call.

    A context manager, written out because every map enters one on each of its threads.
    """

    __slots__ = ("_outer_index", "_outer_seeds", "_seeds", "_was_switched_on")

    def __init__(self, seeds: CallSeeds) -> None:
        self._seeds = seeds

    def __enter__(self) -> None:
        if not _libraries:
            _install()
        self._outer_seeds = running.seeds
        if self._outer_seeds is None:  # else this thread is counted already
            _standing_in.begin()
        else:
            self._outer_index = running.index
        running.seeds = self._seeds
        self._was_switched_on = _is_switched_on(_KEY)
        _switch(_KEY, True)

    def __exit__(self, *exc_info: object) -> None:
        _switch(_KEY, self._was_switched_on)
        running.seeds = self._outer_seeds
        if self._outer_seeds is None:
            _standing_in.end()
        else:
            running.index = self._outer_index


def _install() -> None:
    """Register the kernels of rule 1, once for the process."""
    with _install_lock:
        if _libraries:
            return
        fallthrough = torch.library.Library("_", "IMPL")
        fallthrough.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
        kernels = torch.library.Library("aten", "IMPL")
        for name, operator in operators_with_generator():
            position = _generator_position(operator)
            kernels.impl(name, functools.partial(_draw_from_own_stream, operator, position), _KEY_NAME)
        _libraries.extend((fallthrough, kernels))


def operators_with_generator() -> Iterator[tuple[str, OpOverload]]:
    """Return the operators that are caught, each with its name and overload (rule 1)."""
    for packet_name in RANDOM_OPERATORS:
        packet = getattr(torch.ops.aten, packet_name)
        for overload_name in packet.overloads():
            operator = getattr(packet, overload_name)
            if _generator_position(operator) >= 0 and not _is_composite(operator):
                yield operator.name().removeprefix("aten::"), operator


def _generator_position(operator: OpOverload) -> int:
    """Return where the operator takes a generator, -1 if it takes none."""
    arguments = operator._schema.arguments
    return next((i for i, argument in enumerate(arguments) if argument.name == "generator"), -1)


def _is_composite(operator: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _draw_from_own_stream(operator: OpOverload, position: int, *args: Any, **kwargs: Any) -> Any:
    given = args[position] if position < len(args) else kwargs.get("generator")
    with _ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
        device = _device_of(args, kwargs)
        if given is not None or running.seeds is None or device.type == "meta" or _is_tracing():
            return operator(*args, **kwargs)
        own = running.seeds.draw(running.index, device)
        if position < len(args):
            return operator(*args[:position], own, *args[position + 1 :], **kwargs)
        return operator(*args, **{**kwargs, "generator": own})


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that a random operator draws on: its tensors', else the one it is told to create on."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument.device
    device = kwargs.get("device")
    return _CPU if device is None else _with_index(torch.device(device))


def _with_index(device: torch.device) -> torch.device:
    """Say which device is meant by `cuda`: one device must not have two generators of one seed."""
    if device.type in ("cpu", "meta") or cast("int | None", device.index) is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _is_tracing() -> bool:
    """Whether a compiler traces with fake tensors, which draw nothing and take no generator."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class _StandIn:
    """Takes the place of a device's own generator, the process's, while maps run (rule 3)."""

    def __init__(self, device: torch.device, own: torch.Generator) -> None:
        self._device = device
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(_current_generator(self._device) or self._own, name)

    def set_state(self, state: torch.Tensor) -> None:
        if running.seeds is None:
            self._own.set_state(state)
        else:
            running.seeds.set_state(running.index, self._device, state)

    def manual_seed(self, seed: int) -> torch.Generator:
        generator = _current_generator(self._device)
        if running.seeds is None or generator is None:
            return self._own.manual_seed(seed)
        state = _new_generator(self._device).manual_seed(seed).get_state()
        running.seeds.set_state(running.index, self._device, state)
        return generator


class _StandingIn:
    """Puts the stand-ins in place for the first thread that runs calls, and back for the last one to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._num_threads = 0
        self._accelerator: Any = None  # whose generators are away, if any
        self._away: tuple[torch.Generator, ...] = ()

    def begin(self) -> None:
        with self.lock:
            self._num_threads += 1
            if self._num_threads == 1:
                self._stand_in()

    def end(self) -> None:
        with self.lock:
            self._num_threads -= 1
            if self._num_threads == 0:
                self._step_back()

    def forget(self) -> None:
        """In a forked child no other thread runs calls."""
        self._num_threads = 0 if running.seeds is None else 1
        if self._num_threads == 0:
            self._step_back()

    def _stand_in(self) -> None:
        torch.random.default_generator = cast(torch.Generator, _STAND_IN)
        accelerator = _accelerator_in_use()
        if accelerator is not None:
            kind, self._accelerator = accelerator
            self._away = self._accelerator.default_generators
            self._accelerator.default_generators = tuple(
                [_StandIn(torch.device(kind, index), own) for index, own in enumerate(self._away)]
            )

    def _step_back(self) -> None:
        torch.random.default_generator = _PROCESS_GENERATOR
        if self._accelerator is not None:
            self._accelerator.default_generators = self._away
            self._accelerator, self._away = None, ()


def _accelerator_in_use() -> tuple[str, Any] | None:
    """Return the kind and the module of the accelerator, if it has generators and was used."""
    if _ACCELERATOR is None:
        return None
    module = torch.get_device_module(_ACCELERATOR.type)
    has_generators = getattr(module, "default_generators", ()) and module.is_initialized()
    return (_ACCELERATOR.type, module) if has_generators else None


_STAND_IN = _StandIn(_CPU, _PROCESS_GENERATOR)
_standing_in = _StandingIn()


def _before_fork() -> None:
    _install_lock.acquire()
    _standing_in.lock.acquire()


def _after_fork() -> None:
    _standing_in.lock.release()
    _install_lock.release()


def _after_fork_in_child() -> None:
    _standing_in.forget()
    _after_fork()


if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds a lock would never get it.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
