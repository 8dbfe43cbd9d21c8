"""A module that loads a state keeps its parameters: an optimizer, and whoever lends them memory, know these objects.

Plain `load_state_dict` copies into them. With `assign=True`, which is usual for modules that were built on meta, it
puts others in their place, and so may a class that loads in a way of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_autograd._contexts import contextmanager


@contextmanager
def keeping_parameters(module: nn.Module) -> Iterator[None]:
    """Put the parameters from before back, with the values of those that are in their place after the block.

    Raises:
        ValueError: one has gone, or what is in its place is of another shape or dtype.
    """
    before = _parameters_of(module)
    wrong: list[str] = []
    try:
        yield
    finally:
        parts, after = dict(module.named_modules(remove_duplicate=False)), _parameters_of(module)
        for (path, key), parameter in before.items():
            now = after.get((path, key))
            if now is parameter:
                continue
            if now is None or kind_of(now) != kind_of(parameter):
                name = f"{path}.{key}".lstrip(".")
                wrong.append(f"{name!r} that became {kind_of(now)}, and was {kind_of(parameter)}")
            else:
                with torch.no_grad():
                    parameter.copy_(now)
            if path in parts:
                setattr(parts[path], key, parameter)  # an `nn.LSTM` computes with a list of what was set
                parts[path]._parameters[key] = parameter  # whatever a class makes of what is set
    if wrong:
        raise ValueError(f"a load that makes other parameters ({', '.join(wrong[:4])})")


def _parameters_of(module: nn.Module) -> dict[tuple[str, str], nn.Parameter]:
    """Return all of them by the path of their part and their name there."""
    return {
        (path, key): parameter
        for path, part in module.named_modules(remove_duplicate=False)
        for key, parameter in part._parameters.items()
        if parameter is not None
    }


def kind_of(tensor: Tensor | None) -> str:
    """Return shape and dtype, as errors name them."""
    return "none" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
