"""Group quantization per token: asymmetric, fp16 scale and zero for every group of 32 channels, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # channels that share a scale and a zero
FP16_MAX = 65504.0


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., D], D a multiple of 32, bits 2, 4 or 8 -> packed uint8 [..., D * bits / 8], params fp16 [..., D / 32, 2].

    zero = min, scale = (max - min) / (2^bits - 1), code = round((x - zero) / scale), as in Self-Indexing KVCache
    eq. 9-10. The codes are taken against the scale and zero *as stored in fp16*. The first channel of a byte is in its
    lowest bits.
    """
    levels = 2**bits - 1
    g = x.float().unflatten(-1, (-1, GROUP))
    zero = g.amin(-1).clamp(-FP16_MAX, FP16_MAX).half()  # bf16 outliers saturate: an infinite zero would give NaN
    scale = ((g.amax(-1) - zero.float()) / levels).clamp(0, FP16_MAX).half()
    step = scale.float().clamp(min=1e-8)  # a constant group has scale 0: every code is 0 and dequantizes to zero
    q = ((g - zero.float()[..., None]) / step[..., None]).round_().clamp_(0, levels).to(torch.uint8)
    return pack(q.flatten(-2), bits), torch.stack((scale, zero), -1)


def dequantize(packed: Tensor, params: Tensor, bits: int) -> Tensor:
    """The inverse, eq. 11: packed [..., D * bits / 8] and params [..., D / 32, 2] -> fp32 [..., D]."""
    q = unpack(packed, bits).unflatten(-1, (-1, GROUP)).float()
    scale, zero = params.float().unbind(-1)
    return (q * scale[..., None] + zero[..., None]).flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits, [..., n] -> bytes [..., n * bits / 8]; the first code of a byte in its lowest bits."""
    per = 8 // bits
    parts = codes.unflatten(-1, (-1, per)).unbind(-1)
    out = parts[0]
    for i, part in enumerate(parts[1:], 1):
        out = out | (part << (bits * i))
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """bytes [..., m] -> uint8 codes [..., m * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
