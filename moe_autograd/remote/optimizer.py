"""Training where the experts live: `zero_grad` and `step` as in `torch.optim`, over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, overload

import torch

from moe_autograd.autograd.uncompiled import uncompiled
from moe_autograd.errors import InvalidCallError, RemoteError
from moe_autograd.remote.connection import Connection
from moe_autograd.remote.expert import RemoteExpert

# What other optimizers have, and this one has not.
_ELSEWHERE = {"param_groups", "state", "defaults", *vars(torch.optim.Optimizer)}


class RemoteOptimizer:
    """Steps the optimizers that servers hold for their experts.

    On servers with `update="on_step"`, backwards gather gradients there, as `.grad` does here; `step` applies
    this client's gradients and `zero_grad` forgets them. With `update="on_backward"` both have nothing to do.
    Which optimizer, and with which settings, is the server's configuration.

    Args:
        experts: what `connect` returned, or some of its experts. Those that are not trained are left out, as long as
            they are not.
        on_failure: "raise" raises what goes wrong at a server. "drop" goes on without that server, as
            `MixtureOfExperts` does with the same option: its experts miss the update, unless only the answer was lost
            (`num_updates` of `experts.info()` tells), and it is not waited for.
            Gradients that a server could not be told to forget are never applied: its experts wait for the next
            `zero_grad` that gets through. What a server refuses (an invalid call, a missing permission) is raised
            all the same.

    Attributes:
        failures: with "drop", what went wrong in the last `zero_grad` or `step`; the messages name the servers.

    Raises:
        ValueError: there is nothing to train; or another `on_failure`.
        TypeError: one of them is not a remote expert; or it is one alone.

    Threads: any. Updates wait for backwards of the same experts that are under way, and those that come later for them;
        `failures` are of the update that began last.
    """

    def __init__(
        self,
        experts: Mapping[str, RemoteExpert] | Iterable[RemoteExpert],
        *,
        on_failure: Literal["raise", "drop"] = "raise",
    ) -> None:
        if on_failure not in ("raise", "drop"):
            raise ValueError(
                f'RemoteOptimizer: expected on_failure "raise" or "drop", got {on_failure!r}. "drop" goes on without '
                "servers that fail."
            )
        self.failures: list[RemoteError] = []
        self._may_drop = on_failure == "drop"
        if not isinstance(experts, Iterable):
            raise TypeError(
                f"RemoteOptimizer: expected several remote experts, got one {type(experts).__name__}. Pass what "
                "`connect` returned, or a list of some of its experts."
            )
        modules = list(experts.values() if isinstance(experts, Mapping) else experts)
        for module in modules:
            if isinstance(module, str):
                raise TypeError(
                    f"RemoteOptimizer: expected remote experts, got the name {module!r}. Pass what `connect` returned "
                    "itself (a list of it has its names), or a list of some of its experts."
                )
            if not isinstance(module, RemoteExpert):
                advice = "Give local parameters to an optimizer of torch.optim."
                if isinstance(module, Mapping):
                    advice = "Of several connections pass the experts: [*a.values(), *b.values()]."
                raise TypeError(
                    f"RemoteOptimizer: expected remote experts, got {type(module).__name__}. {advice}"
                )
        if not any(module.hosted.is_trained for module in modules):
            raise ValueError(
                f"RemoteOptimizer: expected at least one trained expert, got none among {len(modules)}. "
                "Start the server with an optimizer (`--optimizer adam --lr 1e-3`)."
            )
        self._experts: dict[Connection, list[RemoteExpert]] = {}
        for module in modules:
            self._experts.setdefault(module.call_group, []).append(module)
        for connection, own in self._experts.items():
            connection.will_train(expert.name for expert in own)
        self._trained: set[RemoteExpert] = {module for module in modules if module.hosted.is_trained}

    def __repr__(self) -> str:
        experts = [expert for experts in self._experts.values() for expert in experts]
        names = [expert.name for expert in experts if expert.hosted.is_trained]
        places = sorted({address for connection in self._experts for address in connection.addresses})
        return f"RemoteOptimizer({', '.join(names)} at {', '.join(places)})"

    if not TYPE_CHECKING:  # for which nothing is here

        def __getattr__(self, name: str) -> NoReturn:
            """Tell whoever asks for more of an optimizer, as a `GradScaler` or a loop that saves does.

            Raises:
                AttributeError: always.
            """
            if name in _ELSEWHERE:
                raise AttributeError(
                    f"RemoteOptimizer: expected to be asked for `step` and `zero_grad` alone, got `{name}`. Weights, "
                    "gradients and the optimizers' state are on the servers, which save them in checkpoints, and so "
                    "are learning rates and schedules (their `optimizer`)."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that this client gave since its last `zero_grad`.

        Args:
            set_to_none: True, as a `step` without new gradients is no update on a server.

        Raises:
            ValueError: `set_to_none` is False.
            RemoteError: a server did not do it; others may have.
        """
        if not set_to_none:
            raise ValueError(
                "zero_grad: expected set_to_none=True, got False. Servers forget gradients; they keep no zeros."
            )
        self._update("ZeroGrad")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients that this client gave; each expert that got some is updated once.

        Args:
            closure: computes the loss anew, as in `torch.optim`; called once, before the update.

        Returns:
            What the closure returned.

        Raises:
            GradientsLostError: a server no longer has the gradients of a backward, mostly as it was restarted since;
                its experts were not changed. Call `zero_grad`, repeat forward and backward, and step again: others,
                which have made this step, make another one.
            InvalidCallError: a server that was started anew does not train one of them any more.
            RemoteError: a server did not do it, or its answer was lost; others may have. Before the next backward or
                `zero_grad`, `step` repeats it: experts of this connection that have made it make no other.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update("Step")
        return loss

    @uncompiled
    def _update(self, rpc: str) -> None:
        self.failures = []
        experts = [expert for own in self._experts.values() for expert in own]
        self._trained.update(expert for expert in experts if expert.hosted.is_trained)
        if rpc == "Step":  # before any server makes it
            _check_still_trained([expert for expert in experts if expert in self._trained])
        for connection, own in self._experts.items():
            names = [expert.name for expert in own if expert in self._trained]
            if names:
                connection.update(rpc, names, self.failures if self._may_drop else None)


def _check_still_trained(experts: Iterable[RemoteExpert]) -> None:
    """Refuse to step what is not trained any more: its gradients would go nowhere, without a word."""
    for expert in experts:
        if not expert.hosted.is_trained:
            raise InvalidCallError(
                f"expert {expert.name!r} at {expert.hosted.addresses[0]}, step: expected to be trained, as it was, got "
                "a server that was started anew without an optimizer for it. Nothing was changed. Start it with one, "
                "or make a RemoteOptimizer of the other experts."
            )
