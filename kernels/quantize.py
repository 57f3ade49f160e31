"""Group quantization: asymmetric, fp16 scale and zero for every group, packed into bytes.

A group is 32 channels of a token, or more; or 32 tokens of a channel (KIVI's keys). If 32 does not divide the number of
channels, the last group is smaller: any multiple of 8 channels can be grouped. The Triton kernels read x once and write
what they pack. `dequantize` has no kernel: the attention kernels dequantize in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation
from kernels.tiles import encode_groups
from kernels.tuned import tuned

GROUP = 32  # channels that share a scale and a zero, or tokens that do
BITS = (2, 3, 4, 8, 16)
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bits: the integer that holds 8 channels
FP16_MAX = 65504.0


def _outputs(x: Tensor, bits: int, *rest: object) -> tuple[Tensor, Tensor]:
    *lead, D = x.shape
    packed = torch.empty(*lead, D * bits // 8, dtype=torch.uint8, device=x.device)
    return packed, torch.empty(*lead, D // GROUP, 2, dtype=torch.float16, device=x.device)


def groups_of(width: int, group: int = GROUP) -> int:
    """The number of groups of a token's channels; the last one may be smaller."""
    return -(-width // group)


def group_size(width: int, groups: int) -> int:
    """Channels per group, given the number of groups: all channels, equal parts, or 32 with a smaller last group."""
    return width // groups if groups == 1 or width % (groups * GROUP) == 0 else GROUP


def _whole_groups(
    x: Tensor, bits: int, mean: object = None, alpha: object = None, magnitude: bool = False, group: int = GROUP,
    clip: float = 1.0,
) -> bool:  # fmt: skip
    return group == GROUP and clip == 1 and bits in WORDS and x.shape[-1] % GROUP == 0


@operation(fake=_outputs)
def quantize(
    x: Tensor,
    bits: int,
    mean: Tensor | None = None,
    alpha: Tensor | None = None,
    magnitude: bool = False,
    group: int = GROUP,
    clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x [..., D], D % 8 == 0 -> packed uint8 [..., D * bits / 8], params fp16 [..., ceil(D / group), 2] (scale, zero).

    Asymmetric per token and group of channels: zero = min, scale = (max - min) / (2^bits - 1); Self-Indexing KVCache
    eq. 9-10. Codes are taken against the scale and zero *as stored in fp16*. The first channel of a byte is in its
    lowest bits. With mean and alpha, fp32 [B, H, D], (x - mean) / alpha of x [B, H, S, D] is quantized, or its
    magnitude; either may be left out. clip: factor of min and max (QuaRot); what lies beyond saturates. The group is a
    multiple of 32, or all channels; 32 need not divide them.
    """
    x = x.float()
    x = x if mean is None else x - mean[:, :, None]
    x = x if alpha is None else x / alpha[:, :, None]
    x = x.abs() if magnitude else x
    whole = x.shape[-1] // group * group
    parts = [x[..., :whole].unflatten(-1, (whole // group, group))]
    if whole < x.shape[-1]:
        parts.append(x[..., None, whole:])
    codes, params = zip(*(_codes(part, -1, bits, clip) for part in parts), strict=True)
    return pack(torch.cat([c.flatten(-2) for c in codes], -1), bits), torch.cat(params, -2)


def quantize_channels(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., S, D], S % 32 == 0 -> packed uint8 [..., S, D * bits / 8], params fp16 [..., S / 32, D, 2].

    As `quantize`, but 32 tokens of one channel share a scale and a zero (KIVI's keys). Codes are still packed by token:
    a token's codes are one row, as attention reads them.
    """
    codes, params = _codes(x.float().unflatten(-2, (-1, GROUP)), -2, bits, 1.0)
    return pack(codes.flatten(-3, -2), bits), params


def _codes(g: Tensor, dim: int, bits: int, clip: float) -> tuple[Tensor, Tensor]:
    """x fp32, groups along dim -> uint8 codes of x's shape, params fp16 [..., 2] (scale, zero) without dim."""
    levels = 2**bits - 1
    scale, zero = half_params(g.amin(dim) * clip, g.amax(dim) * clip, levels)
    step = scale.float().clamp(min=1e-8)  # a constant group has scale 0: every code is 0
    codes = ((g - zero.float().unsqueeze(dim)) / step.unsqueeze(dim)).round_().clamp_(0, levels).to(torch.uint8)
    return codes, torch.stack((scale, zero), -1)


def _halves(lo: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(lo, dtype=torch.float16), torch.empty_like(lo, dtype=torch.float16)


@operation(fake=_halves, opaque=True)
def half_params(lo: Tensor, hi: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """fp16 scale and zero for codes 0..levels from lo to hi, fp32 of any shape. Outliers of bf16 saturate: an infinite
    zero would give NaN.

    An operator, because inductor keeps what it fuses in fp32, and codes must be taken against the rounded numbers.
    """
    zero = lo.clamp(-FP16_MAX, FP16_MAX).half()
    return ((hi - zero.float()) / levels).clamp(0, FP16_MAX).half(), zero


def dequantize(packed: Tensor, params: Tensor, bits: int) -> Tensor:
    """The inverse, eq. 11: packed [..., D * bits / 8] and params [..., groups, 2] -> fp32 [..., D]."""
    q, n = unpack(packed, bits).float(), params.shape[-2]
    scale, zero = params.float().unbind(-1)
    if q.shape[-1] % n == 0 and q.shape[-1] // n == (group := group_size(q.shape[-1], n)):
        return (q.unflatten(-1, (n, group)) * scale[..., None] + zero[..., None]).flatten(-2)
    scale, zero = (y.repeat_interleave(GROUP, -1)[..., : q.shape[-1]] for y in (scale, zero))
    return q * scale + zero


def dequantize_channels(packed: Tensor, params: Tensor, bits: int) -> Tensor:
    """The inverse of `quantize_channels`: [..., S, D * bits / 8] and [..., S / 32, D, 2] -> fp32 [..., S, D]."""
    q = unpack(packed, bits).unflatten(-2, (-1, GROUP)).float()
    scale, zero = params.float().unbind(-1)
    return (q * scale.unsqueeze(-2) + zero.unsqueeze(-2)).flatten(-3, -2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits, [..., n] -> bytes [..., n * bits / 8]; the first code of a byte in its lowest bits.

    3 bits are three, not ten codes in a 32-bit word: first the bytes of all low 2 bits, then those of the third bits.
    """
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), -1)
    per = 8 // bits
    parts = codes.unflatten(-1, (-1, per)).unbind(-1)
    out = parts[0]
    for i, part in enumerate(parts[1:], 1):
        out = out | (part << (bits * i))
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """bytes [..., m] -> uint8 codes [..., m * 8 / bits]."""
    if bits == 3:
        low, third = packed.split((packed.shape[-1] // 3 * 2, packed.shape[-1] // 3), -1)
        return unpack(low, 2) | unpack(third, 1) << 2
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


# ---- Triton ----

BLOCK = 64  # groups per program
NUM_WARPS = 4


@triton.jit
def _quantize(
    x, mean, alpha, packed, pairs, n, heads, tokens, x_strides,
    D: tl.constexpr, BITS: tl.constexpr, MAGNITUDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the n groups of 32 channels, in the order of x [rows, heads, tokens, D]: one int32 each of scale and
    zero, and BITS int32 of codes."""
    group, offs_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 32)
    token = group // (D // 32)
    inside = (group < n)[:, None]
    at = (token // tokens // heads).to(tl.int64) * x_strides[0] + (token // tokens % heads).to(tl.int64) * x_strides[1]
    at += (token % tokens).to(tl.int64) * x_strides[2] + group % (D // 32) * 32
    b_x = tl.load(x + at[:, None] + offs_c, mask=inside, other=0.0).to(tl.float32)
    at = (token // tokens).to(tl.int64) * D + group % (D // 32) * 32
    if mean is not None:
        b_x -= tl.load(mean + at[:, None] + offs_c, mask=inside, other=0.0)
    if alpha is not None:
        b_x = tl.div_rn(b_x, tl.load(alpha + at[:, None] + offs_c, mask=inside, other=1.0))
    if MAGNITUDE:
        b_x = tl.abs(b_x)
    word, pair = encode_groups(b_x, BITS)
    offs_w, group = tl.arange(0, BITS), group.to(tl.int64)
    tl.store(packed + group[:, None] * BITS + offs_w, word, mask=inside)
    tl.store(pairs + group, pair, mask=group < n)


@quantize.triton(serves=_whole_groups)
def launch(
    x: Tensor,
    bits: int,
    mean: Tensor | None = None,
    alpha: Tensor | None = None,
    magnitude: bool = False,
    *rest: object,
) -> tuple[Tensor, Tensor]:
    """The Triton version of `quantize`."""
    D, n = x.shape[-1], x.numel() // GROUP
    packed, params = _outputs(x, bits)
    if n == 0:
        return packed, params
    x = x if x.dim() == 4 else x.reshape(1, 1, -1, D)  # keys and values [B, H, S, D] come as views of a projection
    x = x if x.stride(3) == 1 else x.contiguous()
    mean, alpha = (None if y is None else y.contiguous() for y in (mean, alpha))
    options = tuned("_quantize", BLOCK=BLOCK, num_warps=NUM_WARPS)
    _quantize[(triton.cdiv(n, options["BLOCK"]),)](
        x, mean, alpha, packed.view(torch.int32), params.view(torch.int32), n, *x.shape[1:3], x.stride(),
        D=D, BITS=bits, MAGNITUDE=magnitude, **options,
    )  # fmt: skip
    return packed, params
