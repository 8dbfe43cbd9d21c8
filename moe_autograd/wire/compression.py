"""What may travel in fewer bytes: bfloat16, float16, and int8 in blocks with a scale each.

====================  =====  ================================================  =====================
encoding              bytes  error of an element x                             for
====================  =====  ================================================  =====================
`RAW`                 4      none                                              everything
`AS_BFLOAT16`         2      at most |x| / 256, if |x| is above 1.2e-38        everything
`AS_FLOAT16`          2      at most |x| / 2048, if |x| is above 6.2e-5        activations; small
                                                                               gradients underflow
`AS_INT8_BLOCKS`      1.02   at most m / 254 with m the largest |x| in its     activations, large
                             block of 256, if m is above 1e-38                 gradients
====================  =====  ================================================  =====================

Smaller values lose digits, or become zero. A tensor of 16 bits itself is rounded to its own dtype once more after the
int8 blocks, by |x| / 256 (bfloat16) or |x| / 2048.

Only floating tensors that get smaller are encoded; all others travel raw, whatever is asked for. So does a tensor with
a value that its encoding cannot hold: above 65504 for float16, or not finite (in int8 it would take all its block
along).
"""

from __future__ import annotations

import math

import torch

from moe_autograd.wire import experts_pb2 as pb

BLOCK = 256
_LARGEST_SCALE = 2.6793e36  # 127 of it are finite in float32

_ENCODABLE: dict[int, tuple[torch.dtype, ...]] = {
    pb.AS_BFLOAT16: (torch.float32, torch.float64),
    pb.AS_FLOAT16: (torch.float32, torch.float64),
    pb.AS_INT8_BLOCKS: (torch.float32, torch.float64, torch.float16, torch.bfloat16),
}
_CASTS: dict[int, torch.dtype] = {pb.AS_BFLOAT16: torch.bfloat16, pb.AS_FLOAT16: torch.float16}


def is_applicable(dtype: torch.dtype, encoding: int) -> bool:
    """Tell whether a tensor of `dtype` can travel in `encoding`, which is not `RAW`."""
    return dtype in _ENCODABLE.get(encoding, ())


def gets_smaller(dtype: torch.dtype, numel: int, encoding: int) -> bool:
    """Tell whether a tensor of so many elements takes fewer bytes in `encoding`: else it is sent raw."""
    is_applied = is_applicable(dtype, encoding)
    return is_applied and encoded_bytes(dtype, numel, encoding) < encoded_bytes(dtype, numel, pb.RAW)


def encoded_bytes(dtype: torch.dtype, numel: int, encoding: int) -> int:
    """Return how many bytes `numel` elements of `dtype` take in `encoding`."""
    if encoding == pb.RAW:
        return dtype.itemsize * numel
    if encoding in _CASTS:
        return 2 * numel
    return 4 * _num_blocks(numel) + numel


def encode(tensor: torch.Tensor, encoding: int) -> torch.Tensor | None:
    """Return the encoded bytes of a tensor as a contiguous tensor of any dtype; None if it has to travel raw.

    Autograd records nothing, whatever the thread's grad mode.
    """
    tensor = tensor.detach()
    if encoding in _CASTS:
        cast = tensor.to(_CASTS[encoding]).contiguous()
        return cast if _is_finite(cast) else None
    flat = tensor.reshape(-1).float()
    num_blocks = _num_blocks(flat.numel())
    padded = torch.nn.functional.pad(flat, (0, num_blocks * BLOCK - flat.numel())).view(num_blocks, BLOCK)
    scales = padded.abs().amax(dim=1).div_(127)
    if not _is_finite(scales):
        return None
    scales.clamp_(max=_LARGEST_SCALE)
    codes = padded.div(scales.masked_fill(scales == 0, 1.0)[:, None]).round_()
    codes = codes.clamp_(-127, 127).to(torch.int8).view(-1)[: flat.numel()]
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


def can_hold(tensor: torch.Tensor, encoding: int) -> bool:
    """Tell whether `encode` of a tensor to which `encoding` is applicable gives bytes: its extremes decide."""
    return not tensor.numel() or encode(torch.stack(tensor.aminmax()), encoding) is not None


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or all(math.isfinite(bound) for bound in tensor.aminmax())


def travelling_dtype(dtype: torch.dtype | None, encoding: int) -> torch.dtype:
    """Return the dtype in which encoded bytes of a `dtype` tensor are looked at."""
    if encoding == pb.RAW:
        assert dtype is not None, "None has no bytes"
        return dtype
    return _CASTS.get(encoding, torch.uint8)


def decode(encoded: torch.Tensor, dtype: torch.dtype, encoding: int) -> torch.Tensor:
    """Return the elements, one-dimensional, of `dtype`.

    Args:
        encoded: what `encode` gave, one-dimensional, of `travelling_dtype`.
    """
    if encoding in _CASTS:
        return encoded.to(dtype)
    num_blocks = -(-encoded.numel() // (BLOCK + 4))
    scales = encoded[: 4 * num_blocks].view(torch.float32)
    codes = encoded[4 * num_blocks :].view(torch.int8).to(torch.float32)
    return codes.mul_(scales.repeat_interleave(BLOCK)[: codes.numel()]).to(dtype)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
