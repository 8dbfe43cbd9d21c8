"""`ExpertsServer`: a server behind a `with` statement, for tests, notebooks and programs that are not asyncio."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, cast, get_args

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from experts_server.configuration.config import ServingConfig, UpdateMode, memory_mistake
from experts_server.configuration.mistakes import mistakes_in
from experts_server.configuration.names import check_name, counted
from experts_server.hosting.building import build_optimizer, why_it_cannot_step
from experts_server.hosting.training import Training
from experts_server.serving.loop_thread import LoopThread
from experts_server.serving.server import ExpertServer, Hosting, State
from moe_autograd._interrupts import uninterrupted
from moe_autograd.errors import ConfigError


class ExpertsServer:
    """Host modules in the background of a `with` statement: ready on entry, drained and stopped at its end.

    The modules are trained in place: what clients do to them can be read off them afterwards.

    Args:
        experts: modules by name, such as `{"ffn.0": module}`, or an `nn.ModuleDict`.
        optimizer: makes the optimizer of an expert from its parameters; `None`: they are not trained.
        listen: `HOST:PORT`; port 0 takes a free one. By default that of `config` if it sets one, else a free port of
            loopback.
        update: when an optimizer steps: at the client's step (`on_step`), at once with each backward (`on_backward`),
            or when a client's backwards amount to `samples_per_update` rows (`on_samples`).
        samples_per_update: of `on_samples`.
        latency_ms: added to every message of calls, for demonstrations; that of `config` by default.
        config: everything else, by the keys of a server's file (docs/server.md) that are not about single experts, such
            as `{"checkpoint_dir": "checkpoints", "memory": {"recompute": True}}`. What is given above wins.

    Raises:
        ConfigError: an option or a name is not allowed, an optimizer wants more than gradients for a step, or an
            expert that it is to train has parts that are trained elsewhere; on entry, if the address is in use, an
            expert uses a weight or a module of one that is trained, or a call in it has outlasted the stop of an
            earlier server.
        CheckpointError: on entry, no checkpoint in the folder is whole or fits; at the end, the last save failed.
        TypeError: `experts` are not modules by name, or `optimizer` makes no optimizers.

    Threads: an event loop on one background thread, shared by all servers of the process, and workers. `start` and
        `stop` may be called from any: one after the other, and a `stop` beside another one returns when it has stopped.
        On the loop's own, where a finalizer may run, `start` is refused, and `stop` returns at once: another thread
        stops the server, and prints what fails.

    >>> import torch
    >>> make_adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)
    >>> with ExpertsServer({"ffn.0": torch.nn.Linear(4, 4)}, optimizer=make_adam) as server:
    ...     server.address.startswith("127.0.0.1:")
    True
    """

    def __init__(
        self,
        experts: Mapping[str, nn.Module] | nn.ModuleDict,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        listen: str | None = None,
        update: UpdateMode = "on_step",
        samples_per_update: int | None = None,
        latency_ms: float | None = None,
        config: ServingConfig | Mapping[str, Any] | None = None,
    ) -> None:
        _check_update(update, samples_per_update)
        own = {"listen": listen, "latency_ms": latency_ms}
        given = {"listen": "127.0.0.1:0"} | _settings_of(config)
        self._config = _check_serving(given | {key: value for key, value in own.items() if value is not None})
        mistake = memory_mistake(self._config.memory, update, self._config.offload)
        if mistake is not None:
            raise ConfigError(f"server: memory.{mistake}.")
        _check_types(experts, optimizer)
        self._experts: dict[str, Hosting] = {}
        for name, module in experts.items():
            is_trained = optimizer is not None and any(p.requires_grad for p in module.parameters())
            made = build_optimizer(name, module, optimizer)
            training = (
                Training(_checked_optimizer(name, made), update, samples_per_update or 1)
                if is_trained
                else None
            )
            self._experts[_checked(name)] = Hosting(module, training, self._config.memory)
        self._renew_lock()
        _made.add(self)
        self._loop_thread: LoopThread | None = None
        self._server: ExpertServer | None = None
        self._is_starting = False
        self._is_given_up = False  # by a handler of a signal, while it starts
        self._num_ending = 0  # stops under way: one, and those of handlers of signals within it

    def _renew_lock(self) -> None:
        self._changing = threading.RLock()  # a start that fails stops; so may a handler of a signal

    def __repr__(self) -> str:
        return f"<ExpertsServer {self.state} {counted(len(self._experts))}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r}: expected to stay in its process, and one, got pickled or copied. "
            "Give others its `address`, to connect to."
        )

    @property
    def state(self) -> State:
        """Where in its life the server is."""
        return "starting" if self._server is None else self._server.state

    @property
    def address(self) -> str:
        """Where it serves: `HOST:PORT`; before the start where it is to, and a free port is 0 until then."""
        return self._config.listen if self._server is None else self._server.address

    @property
    def metrics_address(self) -> str | None:
        """Where `/metrics` is; `None` without `metrics_listen`."""
        return None if self._server is None or self._server.metrics is None else self._server.metrics.address

    @property
    def num_updates(self) -> dict[str, int]:
        """How many updates each expert has had; raises `RuntimeError` before the server is started."""
        if self._server is None:
            raise RuntimeError(
                "ExpertsServer.num_updates: expected a started server, got one that is not. Enter it first."
            )
        return {name: queue.hosted.num_updates for name, queue in self._server.registry.items()}

    def start(self) -> Self:
        """Serve; return when it is ready.

        Raises:
            RuntimeError: it serves already, this process is the fork of one where a server runs, this thread is the
                servers' event loop's, or a handler of a signal has stopped it meanwhile.
            ConfigError, CheckpointError: see above.
        """
        if LoopThread.is_calling():
            raise RuntimeError(
                "ExpertsServer: expected a thread that may wait for the event loop of servers, got that loop's own. "
                "Start it from another one."
            )
        LoopThread.check_process()
        is_begun = False
        try:
            with self._changing, uninterrupted() as section:
                if self._loop_thread is not None:
                    raise RuntimeError(
                        f"ExpertsServer: expected one start, got a second at {self.address}. `start()` is what `with` "
                        "calls."
                    )
                is_begun, self._is_given_up = True, False
                self._is_starting = True
                loop = self._loop_thread = LoopThread.acquire()
                self._server = ExpertServer(self._experts, self._config, section.opened)
                self._check_still_starts()
                loop.run(self._server.start())
                self._is_starting = False
                self._check_still_starts()
        except BaseException:
            if is_begun:
                self._is_starting = False
                self.stop()  # Ctrl-C may come when it has just started
            raise
        return self

    def _check_still_starts(self) -> None:
        if self._is_given_up:
            raise RuntimeError(
                "ExpertsServer: expected to start, got stop() meanwhile, from a handler of a signal."
            )

    def stop(self) -> None:
        """Drain and stop; return when it has. In a forked child, or in a finalizer after `atexit`: nothing to do.

        A handler of a signal, in the midst of `start`, gives that up: it stops what it has begun, and raises.

        Raises:
            CheckpointError: the last save failed; it has stopped all the same.
        """
        loop = self._loop_thread
        if not self._is_starting and (loop is None or not loop.is_here):
            return
        if LoopThread.is_calling():  # a finalizer, wherever the garbage collector came upon it
            threading.Thread(target=self.stop, name="experts-server-stop").start()
            return
        with self._changing:
            self._end()

    def _end(self) -> None:
        if self._is_starting:  # on this thread, which is in a handler of a signal
            self._is_given_up = True
            return
        with uninterrupted():  # but while it waits
            self._num_ending += 1  # a handler of a signal may come here from any line below
            try:
                # Another thread, or a handler, may have stopped it.
                if self._server is not None and self._loop_thread is not None:
                    self._loop_thread.run(self._server.stop())
            finally:
                self._num_ending -= 1
                if not self._num_ending:
                    loop, self._loop_thread = self._loop_thread, None
                    if loop is not None:
                        loop.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_made: weakref.WeakSet[ExpertsServer] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: it has no thread that would let go of what another one of its parent has locked."""
    for server in _made:
        server._renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _check_serving(settings: dict[str, Any]) -> ServingConfig:
    """Return the settings as a model, or raise `ConfigError`."""
    try:
        return ServingConfig.model_validate(settings)
    except ValidationError as error:
        mistakes = mistakes_in(error, ServingConfig)
        raise ConfigError("\n".join(f"server, {mistake.sentence}" for mistake in mistakes)) from error


def _settings_of(config: ServingConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(config, ServingConfig):
        return config.model_dump(exclude_unset=True)
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    raise TypeError(
        f"ExpertsServer: expected config to be a mapping of keys to values, got {type(config).__name__}. "
        'Pass one such as {"checkpoint_dir": "checkpoints"}; `experts-server serve --config` reads files.'
    )


def _check_types(experts: Any, optimizer: Any) -> None:
    if not isinstance(experts, Mapping | nn.ModuleDict):
        raise TypeError(
            f"ExpertsServer: expected modules by name, got {type(experts).__name__}. "
            'Pass a mapping such as {"ffn.0": module}.'
        )
    for name, module in experts.items():
        if not isinstance(name, str):
            raise TypeError(
                f"ExpertsServer: expected names that are texts, got {name!r}. "
                'Pass a mapping such as {"ffn.0": module}.'
            )
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"ExpertsServer, expert {name!r}: expected an nn.Module, got {type(module).__name__}. "
                "Wrap a function in a module; of a class, pass an instance."
            )
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            f"ExpertsServer: expected optimizer to make one from an expert's parameters, got "
            f"{type(optimizer).__name__}. Pass a function such as lambda parameters: torch.optim.Adam(parameters)."
        )


def _checked_optimizer(name: str, made: Any) -> Optimizer:
    if not hasattr(made, "param_groups"):  # its function may have forgotten to return it
        raise TypeError(
            f"ExpertsServer, expert {name!r}: expected optimizer to return a torch.optim.Optimizer, got "
            f"{type(made).__name__}. Pass a function such as lambda parameters: torch.optim.Adam(parameters); for "
            "experts that are not trained optimizer=None, or weights with requires_grad=False."
        )
    if (why := why_it_cannot_step(made)) is not None:
        raise ConfigError(
            f"ExpertsServer, expert {name!r}: expected an optimizer that a server can step, got "
            f"{type(made).__name__}, {why}. Take another one of torch.optim."
        )
    return cast(Optimizer, made)


def _check_update(update: UpdateMode, samples_per_update: int | None) -> None:
    if update not in get_args(UpdateMode):
        raise ConfigError(f"server: expected update to be one of {get_args(UpdateMode)}, got {update!r}.")
    if (update == "on_samples") != (samples_per_update is not None and samples_per_update > 0):
        raise ConfigError(
            f"server: expected samples_per_update to be positive with update='on_samples' and None with another, got "
            f"{samples_per_update} with update={update!r}."
        )


def _checked(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise ConfigError(f"server: {error}. Rename it.") from error
