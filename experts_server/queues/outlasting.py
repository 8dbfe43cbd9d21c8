"""Calls that outlast their server: it has stopped, and they still compute, in the process where it was.

A stop waits for an expert that hangs only so long, and nothing can end its thread. When it returns it may do anything
to its module: step with gradients of before the stop, load weights, put back a mode.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from experts_server.queues.batching import ExpertQueue
from experts_server.queues.executor import turns_of_closed_pools
from moe_autograd.errors import ConfigError


def check_at_rest(modules: Mapping[str, nn.Module]) -> None:
    """Refuse a module in which such a call of a trained expert is under way, and one that shares tensors with that.

    Raises:
        ConfigError: there is one.
    """
    for turn in turns_of_closed_pools():
        if not isinstance(turn, ExpertQueue) or turn.hosted.training is None:
            continue
        used = _tensors_of(turn.hosted.module)
        for name, module in modules.items():
            if not used.isdisjoint(_tensors_of(module)):
                raise ConfigError(
                    f"expert {name!r}: expected a module at rest, got one in which a call of expert "
                    f"{turn.hosted.name!r} of a server that has stopped still computes. Start when it has ended, host "
                    "a copy, or start another process."
                )


def _tensors_of(module: nn.Module) -> set[Tensor]:
    return {*module.parameters(), *module.buffers()}
