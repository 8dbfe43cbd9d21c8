"""Torch's layers that look up, attend, or go through a sequence: which only compute, and how much work they are.

They do more than multiply rows by weights. Each element given to an embedding becomes a row, and its weights are
multiplied by nothing. Attention multiplies rows with rows. A recurrent layer makes one step after the other, on one
core, whatever the intra-op threads. Several take weights of their parts, or fused kernels do, so these have to be
those that torch has put there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from moe_autograd.autograd.reading.function_reading import is_function
from moe_autograd.autograd.reading.sizes import Size

PLAIN_DICTS = frozenset([dict, OrderedDict])  # others may fetch what is asked for

EMBEDDINGS = frozenset([nn.Embedding, nn.EmbeddingBag])
RECURRENT = frozenset([nn.GRU, nn.LSTM, nn.RNN])
_LAYERS = frozenset([nn.TransformerDecoderLayer, nn.TransformerEncoderLayer])
_STACKS: Mapping[type, type] = {
    nn.TransformerDecoder: nn.TransformerDecoderLayer,
    nn.TransformerEncoder: nn.TransformerEncoderLayer,
}
_DROPPING = frozenset([nn.MultiheadAttention, *RECURRENT])
# Each with the number of its parameters, if it has always as many.
COMPOSED: Mapping[type, int] = {
    **dict.fromkeys([nn.Bilinear, NonDynamicallyQuantizableLinear], 2),
    **dict.fromkeys(EMBEDDINGS, 1),
    **dict.fromkeys([nn.MultiheadAttention, *RECURRENT], -1),
    **dict.fromkeys(_LAYERS | _STACKS.keys(), 0),
}
_PARTS: Mapping[str, type] = {  # of a layer of a transformer
    **dict.fromkeys(["self_attn", "multihead_attn"], nn.MultiheadAttention),
    **dict.fromkeys(["linear1", "linear2"], nn.Linear),
    **dict.fromkeys(["norm1", "norm2", "norm3"], nn.LayerNorm),
    **dict.fromkeys(["dropout", "dropout1", "dropout2", "dropout3"], nn.Dropout),
}
# Of attention, without what stands for one more token.
_PROJECTIONS = frozenset(["in_proj_bias", *(f"{name}_proj_weight" for name in ("in", "q", "k", "v"))])

# Where a loop has several intra-op threads, their many small operators keep other cores less busy than as many
# multiply-adds of a linear layer: on two idle cores layers of a transformer of 2^25 took as long in turn as on threads,
# those of 2^26 a fifth longer. With one intra-op thread those of 2^22 took 1.8 times as long on threads, those of 2^24
# as long.
SHARE = 4
SCORE = 16  # as many take as long as a score of attention: exponentiated, perhaps dropped, and averaged
TAKE_MAX = 64  # as many take as long as an element that the largest of a bag is found among, on one core
WRITE = 8  # as many take as long as to write an element of an embedding's gradient
# On two idle cores 64 steps of an LSTM took a third longer on threads, 128 a tenth less; 16 of a GRU about as long.
MOST_STEPS = 1 << 6
SLOW = 6  # steps of one are as long as one of an LSTM in float32, which oneDNN computes


def num_parameters_of(part: Any) -> int:
    """Return how many parameters one of these has as torch made it; -1 if it may do more than compute.

    Written out: it is asked before each call.
    """
    kind, own = type(part), part.__dict__
    parameters, parts = own.get("_parameters"), own.get("_modules")
    if (
        type(parameters) not in PLAIN_DICTS
        or type(parts) not in PLAIN_DICTS
        or not _METHODS[kind].isdisjoint(own)
    ):
        return -1
    if kind in EMBEDDINGS:
        weights = [*parameters.values()]
        is_as_made = len(weights) == 1 and type(weights[0]) is nn.Parameter and weights[0].dim() == 2
        is_as_made = is_as_made and own.get("max_norm", 0) is None  # else it changes its weight
    elif kind in RECURRENT:
        weights, names = own.get("_flat_weights"), own.get("_flat_weights_names")
        is_as_made = type(weights) is list and type(names) is list and parameters.keys() == {*names}
        is_as_made = is_as_made and all(type(weight) is nn.Parameter for weight in weights)
    elif kind is nn.MultiheadAttention:
        is_as_made = type(parts.get("out_proj")) is NonDynamicallyQuantizableLinear
        is_as_made = is_as_made and parameters.keys() == _PROJECTIONS
        is_as_made = is_as_made and own.get("bias_k") is own.get("bias_v") is None
    elif kind in _LAYERS:
        is_as_made = own.get("activation") is None or is_function(own["activation"], 1)
        for name, one in parts.items():
            is_as_made = is_as_made and (type(one) is _PARTS.get(name) or name == "activation")
    elif kind in _STACKS:
        layers = parts.get("layers")
        is_as_made = type(layers) is nn.ModuleList
        is_as_made = is_as_made and {*map(type, layers._modules.values())} <= {_STACKS[kind]}
    else:
        is_as_made = len(parameters) == COMPOSED[kind]
    return len(parameters) if is_as_made else -1


def draws_itself(part: Any) -> bool:
    """Whether one of these may draw random numbers itself; its parts are asked as well."""
    own = part.__dict__
    return type(part) in _DROPPING and bool(own.get("training") and own.get("dropout"))


def rows_among(parts: Iterable[Any], size: Size) -> tuple[Size, int, int] | None:
    """Return what a call of this size has at most to compute with, and what it does besides multiplying by weights.

    That is how many weights of embeddings it has, which nothing is multiplied by, and its work in multiply-adds. `None`
    if it is too long a sequence.
    """
    num_tabled = work = num_steps = embedded = 0
    for part in parts:
        kind = type(part)
        if kind in EMBEDDINGS:
            for weight in part._parameters.values():
                num_tabled += weight.numel()
                work += 0 if part.sparse else weight.numel() * WRITE
                embedded = max(embedded, weight.shape[1])
    if embedded:  # each element is a row then
        size = size._replace(
            num_rows=size.num_elements,
            num_elements=size.num_elements * embedded,
            width=embedded,
            longest=max(size.longest, size.width),
        )
    for part in parts:
        kind = type(part)
        if kind is nn.MultiheadAttention:
            work += size.num_rows * size.longest * (2 * part.embed_dim + SCORE * part.num_heads)
        elif kind is nn.EmbeddingBag and part.mode == "max":
            work += size.num_elements * TAKE_MAX
        elif kind in RECURRENT:
            num_times = part.num_layers * (2 if part.bidirectional else 1)
            num_steps += size.longest * num_times * (1 if _is_fast(part) else SLOW)
    return None if num_steps > MOST_STEPS else (size, num_tabled, work)


def _is_fast(part: Any) -> bool:
    if type(part) is not nn.LSTM or part.proj_size:
        return False
    return all(weight is None or weight.dtype is torch.float32 for weight in part._parameters.values())


def _methods_of(kind: type) -> frozenset[str]:
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return frozenset(name for base in bases for name, one in vars(base).items() if callable(one))


_METHODS = {kind: _methods_of(kind) for kind in COMPOSED}
