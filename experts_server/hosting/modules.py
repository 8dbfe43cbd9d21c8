"""The built-in expert classes that only a server needs; `ffn` and `swiglu` are `moe_autograd.moe.experts`."""

from __future__ import annotations

import torch
from torch import nn

from experts_server.spec import InputSpec


class TransformerExpert(nn.TransformerEncoderLayer):
    """A whole transformer layer (attention and feed-forward) as an expert.

    Args:
        d_model: width of a token, in and out.
        num_heads: of the attention; divides `d_model`.
        d_ff: width of the feed-forward part; `4 * d_model` by default.
        dropout: probability of a zero.
    """

    def __init__(
        self, d_model: int, num_heads: int = 4, d_ff: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(d_model, num_heads, d_ff or 4 * d_model, dropout, batch_first=True)
        self.input_spec = InputSpec(torch.get_default_dtype(), d_model, 3, is_certain=True)


class IdentityExpert(nn.Identity):
    """Returns what it is given: measures the way there and back.

    Args:
        d_model: width of a token; `None`: any.
    """

    def __init__(self, d_model: int | None = None) -> None:
        super().__init__()
        self.input_spec = InputSpec(None, d_model, None, is_certain=True)
