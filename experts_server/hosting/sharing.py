"""What experts of one server may share: if one of them is trained, modules without weights, buffers or a mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from moe_autograd.autograd.turns import may_be_changed
from moe_autograd.errors import ConfigError


def check_shared(modules: Mapping[str, nn.Module], trained: Collection[str]) -> None:
    """Refuse weights and modules that are used under one name, and under another whose expert is trained.

    Calls of both run side by side: a step or a load of one would change weights under the other's forward, both would
    add to statistics, and a module that trains for one would not evaluate for the other.

    Raises:
        ConfigError: there is one.
    """
    users: dict[int, str] = {}  # by the `id` of a weight or a module
    for name, module in modules.items():
        weights = module.named_parameters()
        parts = [(key, part) for key, part in module.named_modules() if may_be_changed(part)]
        for kind, key, one in [("weights", *own) for own in weights] + [("modules", *own) for own in parts]:
            other = users.setdefault(id(one), name)
            if other != name and (name in trained or other in trained):
                raise ConfigError(
                    f"expert {name!r}: expected {kind} that no other expert uses, got {key!r}, which expert {other!r} "
                    "uses as well. Host one module that has both, give each a copy, or train neither."
                )
