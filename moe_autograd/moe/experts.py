"""What an expert is, and the two built-in ones.

An expert is any `torch.nn.Module` that maps the tokens it was given, (num_tokens, d_model), to a tensor of
the same shape, each row for itself: it is called once per pass with all its tokens, and their order is not
its business. Nothing else is asked of it; in particular it needs no parameters here. A remote expert is
such a module whose parameters live on a server.

Shape letters: T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ELEMENTWISE = (F.gelu, F.relu, F.silu, F.elu, F.leaky_relu, F.mish, torch.relu, torch.sigmoid, torch.tanh)


class FeedForwardExpert(nn.Module):
    """The feed-forward block of a transformer: widen, activate, narrow.

    Args:
        d_model: width of a token, in and out.
        d_ff: width inside; ``4 * d_model`` by default.
        activation: an elementwise function or module.
        device: where to create the parameters, as in `torch.nn.Linear`.
        dtype: the parameters' dtype, as in `torch.nn.Linear`.

    Raises:
        TypeError: `activation` cannot be called, or is a class.

    >>> FeedForwardExpert(8)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not callable(activation) or isinstance(activation, type):
            raise TypeError(
                f"FeedForwardExpert: expected activation to be a function of a tensor, got {activation!r}. "
                "Pass one, such as torch.nn.functional.relu or torch.nn.ReLU(); for a server, write a class that does."
            )
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.up = nn.Linear(d_model, d_ff, device=device, dtype=dtype)
        self.activation = activation
        self.down = nn.Linear(d_ff, d_model, device=device, dtype=dtype)

    def only_computes(self) -> bool:
        """Tell a map whether it may call this expert without a thread (`autograd.in_turn`)."""
        return isinstance(self.activation, nn.Module) or self.activation in _ELEMENTWISE

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens, (T, D), floating, to (T, D)."""
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class SwiGLUExpert(nn.Module):
    """A gated expert as in Mixtral: ``down(silu(gate(x)) * up(x))``, without biases.

    Args:
        d_model: width of a token, in and out.
        d_ff: width inside.
        device: where to create the parameters, as in `torch.nn.Linear`.
        dtype: the parameters' dtype, as in `torch.nn.Linear`.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    >>> SwiGLUExpert(8, 16)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(d_model, d_ff, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(d_ff, d_model, bias=False, device=device, dtype=dtype)

    def only_computes(self) -> bool:
        """Tell a map that it may call this expert without a thread (`autograd.in_turn`)."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens, (T, D), floating, to (T, D)."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def check_output(expert_index: int, tokens: Tensor, output: Any) -> None:
    """Raise `TypeError` or `ValueError` unless an expert has mapped its tokens to a tensor of their shape."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"MixtureOfExperts: expected a tensor from an expert, got {type(output).__name__} "
            f"(expert_index={expert_index}). Return the outputs alone."
        )
    if output.shape != tokens.shape:
        raise ValueError(
            f"MixtureOfExperts: expected an expert to keep the shape {tuple(tokens.shape)} of its tokens, got "
            f"{tuple(output.shape)} (expert_index={expert_index}). Let it map d_model to d_model, row by row."
        )
