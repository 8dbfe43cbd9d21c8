"""What experts of one server may share: weights that none of them trains, each in modules of its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from experts_server.hosting.training import Training
from moe_autograd.errors import ConfigError


def check_shared(modules: Mapping[str, nn.Module], trainings: Mapping[str, Training | None]) -> None:
    """Refuse weights that are trained under one name and used under another: calls of both run side by side.

    And modules of such experts: one's calls, also with frozen weights, would be noted as the other's, and statistics
    added up twice or not at all.

    Raises:
        ConfigError: there is one.
    """
    trained = {
        weight
        for name, training in trainings.items()
        if training is not None
        for weight in training.weights_of(modules[name])
    }
    users: dict[nn.Parameter, str] = {}
    users_of_parts: dict[int, str] = {}  # by the `id` of a module
    for name, module in modules.items():
        for key, weight in module.named_parameters():
            other = users.setdefault(weight, name)
            if other != name and weight in trained:
                raise ConfigError(
                    f"expert {name!r}: expected weights that no other expert uses, got {key!r}, which expert {other!r} "
                    "uses as well. Host one module that has both, or train neither."
                )
        for key, part in module.named_modules():
            if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:  # such as an activation
                continue
            other = users_of_parts.setdefault(id(part), name)
            if other != name and (trainings[name] or trainings[other]):
                raise ConfigError(
                    f"expert {name!r}: expected modules that no other expert uses, got {key!r}, which expert {other!r} "
                    "uses as well. Give each a copy, which may have the same frozen weights: "
                    "copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})."
                )
