"""Labels of Double Sparsity: a few channels of every key, quantized together per token, and the scores they give."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import FP16_MAX, pack, unpack


def quantize_labels(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., r], bits 2 or 4, r * bits a multiple of 8 -> packed uint8 [..., r * bits / 8], params fp16 [..., 2].

    As kernels/quantize.py, but with one scale and zero for all r channels of a token: asymmetric, zero = min. The codes
    are taken against the scale and zero as stored in fp16.
    """
    levels, x = 2**bits - 1, x.float()
    zero = x.amin(-1).clamp(-FP16_MAX, FP16_MAX).half()
    scale = ((x.amax(-1) - zero.float()) / levels).clamp(0, FP16_MAX).half()
    step = scale.float().clamp(min=1e-8)  # a constant token has scale 0: every code is 0
    codes = ((x - zero.float()[..., None]) / step[..., None]).round_().clamp_(0, levels).to(torch.uint8)
    return pack(codes, bits), torch.stack((scale, zero), -1)


def label_score(q: Tensor, labels: Tensor, params: Tensor | None, bits: int) -> Tensor:
    """Approximate q . k of every token from its labels, without softmax and scale (Algorithm 1), in fp32.

    q [B, H, r] fp32, the group's queries summed; labels [B, H, T, r * bits / 8] uint8 and params [B, H, T, 2], or
    labels [B, H, T, r] as they are and no params -> fp32 [B, H, T]. Slots that were not filled give anything.
    """
    if params is None:
        return (labels.float() @ q[..., None])[..., 0]
    # q . (scale * code + zero) = scale * (q . code) + zero * sum(q): labels are never dequantized
    codes = unpack(labels, bits).float()
    scale, zero = params.float().unbind(-1)
    return scale * (codes @ q[..., None])[..., 0] + zero * q.sum(-1, keepdim=True)
