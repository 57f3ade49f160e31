"""Attention over keys and values that groups of KV heads share as coordinates (Palu).

A token of a group of s KV heads has r coordinates of its keys, before rotation, and r of its values. Because of the
rotation, the query cannot be folded into the keys' basis, so keys are rebuilt and rotated; values are summed up as
coordinates and expanded once, after the softmax. Rebuilding costs 2 r D operations per token and KV head, r being that
of the whole group, and this bounds the operation where multiplying is not free: Llama-3.1-8B at a rank of 352 of 512
takes 0.72 MFLOP for every 2.8 KB of coordinates that a token has in a layer, 256 operations a byte.

In C++ keys are rebuilt 32 tokens and channels at a time, in bf16 by the processor's matrix unit where it has one. In
Triton there are two kernels: logits, a matrix product whose tiles are rotated in registers (as in
kernels/latent_attention.py), and weighted coordinates, which the heads of a group share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.native import VECTOR
from kernels.op import operation
from kernels.quantize import WORDS, dequantize, quantize
from kernels.rope import apply_rope
from kernels.splits import blocks_of, combine, parts_of, split_count
from kernels.tiles import (
    LOG2_E,
    dot,
    halves,
    load_words,
    rotated_logits,
    scale_zero,
    softmax_step,
    unpack_units,
)
from kernels.tuned import tuned

RANKS = 32  # coordinates at a time, in C++


def group_attention(
    q: Tensor,
    k: tuple[Tensor, ...],
    v: tuple[Tensor, ...],
    bits: int,
    k_basis: Tensor,
    v_basis: Tensor,
    k_bias: Tensor,
    v_bias: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Softmax attention over slots 0..pos [B], slot = position -> [B, Hq, D]. Scale 1/sqrt(D), computed in fp32.

    q [B, Hq, D] rotated; k and v the coordinates of N groups, as stored in `bits`: [>= B, N, T, r] and, below 16 bits,
    packed with fp16 params [>= B, N, T, 1, 2]; bases [N, s * D, r] in the dtype of q, fp32 biases [N, s * D]; cos and
    sin [1 or >= B, T, D/2].
    """
    params = (None, None) if bits == 16 else (k[1], v[1])
    return _group_attention(q, k[0], params[0], v[0], params[1], k_basis, v_basis, k_bias, v_bias, pos, cos, sin, bits)


def project(x: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Tokens of all KV heads [B, N * s, n, D], less the bias, times down [N, s * D, r] -> [B, N, n, r], dtype of x."""
    x = x.unflatten(1, (len(down), -1)).transpose(2, 3).flatten(3)
    return ((x.float() - bias[:, None]) @ down.float()).to(x.dtype)


@operation(cpp=lambda x, pos, down, *_: down.shape[2] % VECTOR == 0, mutates=("stored", "params"))
def group_append(
    x: Tensor, pos: Tensor, down: Tensor, bias: Tensor, stored: Tensor, params: Tensor | None, bits: int
) -> None:
    """In place, keys or values x [B, N * s, D], before rotation, as coordinates (`project`) into slots pos [B].

    stored [>= B, N, T, r] in the dtype of x or, below 16 bits, packed, with params: as `group_attention` reads them.
    """
    y, row = project(x[:, :, None], down, bias)[:, :, 0], torch.arange(len(pos), device=pos.device)
    if params is None:
        stored[row, :, pos] = y
    else:
        stored[row, :, pos], params[row, :, pos] = quantize(y, bits, group=y.shape[2])


def coordinates(data: Tensor, params: Tensor | None, bits: int) -> Tensor:
    """Coordinates as stored -> fp32 [..., r]."""
    return data.float() if params is None else dequantize(data, params, bits)


def rebuild(x: Tensor, basis: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """Coordinates [B, N, n, r] -> tokens of all KV heads, fp32 [B, N * s, n, D]."""
    out = x @ basis.float().mT + bias.float()[:, None]
    return out.unflatten(3, (-1, head_dim)).transpose(2, 3).flatten(1, 2)


def _serves(q: Tensor, *rest: Any) -> bool:
    """Rotation is by halves, and RANKS coordinates are multiplied with bases at a time."""
    return q.shape[2] // 2 % VECTOR == 0 and rest[4].shape[2] % RANKS == 0


@operation(cpp=_serves, opaque=True)
def _group_attention(
    q: Tensor, k: Tensor, k_params: Tensor | None, v: Tensor, v_params: Tensor | None, k_basis: Tensor, v_basis: Tensor,
    k_bias: Tensor, v_bias: Tensor, pos: Tensor, cos: Tensor, sin: Tensor, bits: int,
) -> Tensor:  # fmt: skip
    (B, _, D), N, T = q.shape, len(k_basis), k.shape[2]
    n = int(pos.max()) + 1 if pos.device.type == "cpu" else T  # on a GPU no length may reach the host
    there = torch.arange(n, device=pos.device) <= pos[:, None]
    k, v = k[:B, :, :n], v[:B, :, :n]
    k_params, v_params = (None if x is None else x[:B, :, :n] for x in (k_params, v_params))
    rows = cos if len(cos) == 1 else cos[:B], sin if len(sin) == 1 else sin[:B]
    keys = rebuild(coordinates(k, k_params, bits), k_basis, k_bias, D)
    keys = apply_rope(keys, *(x[:, None, :n] for x in rows))
    logits = q.float().view(B, keys.shape[1], -1, D) @ keys.mT * D**-0.5
    p = logits.masked_fill(~there[:, None, None], float("-inf")).softmax(-1).view(B, N, -1, n)
    # 0 * NaN is NaN
    held = coordinates(v, v_params, bits).masked_fill(~there[:, None, :, None], 0)
    return _expand_values((p @ held).flatten(1, 2), v_basis, v_bias, q)


# ---- Triton ----

BLOCK_N, VALUES_N = 64, 64  # tokens of a tile of keys, half as many in fp32, and of one of values
BLOCK_R = 32  # coordinates that keys are multiplied with at a time
CHUNK = 128  # coordinates of values that a program sums up
NUM_WARPS, NUM_STAGES = 4, 3


@triton.jit
def _coordinates(x, third, pairs, slot, inside, lo, R: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """Coordinates lo .. lo + C of tokens in rows `slot` [N] -> [N, C]."""
    if BITS == 16:
        offs_c = lo + tl.arange(0, C)
        return tl.load(x + slot[:, None] * R + offs_c, mask=inside[:, None] & (offs_c < R), other=0.0)
    else:
        scale, zero = scale_zero(tl.load(pairs + slot, mask=inside, other=0))
        words = load_words(x, third, slot, inside, lo // 8 + tl.arange(0, C // 8), R, BITS)
        return unpack_units(words, scale[:, None], zero[:, None], None, BITS, DTYPE)


@triton.jit
def _group_logits(
    q, k, k_third, k_params, basis, bias, pos, cos, sin, logits, q_strides, table_row, T, rank,
    H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, row and KV head): logits [Hq, T] in units of log 2. HEADS share coordinates."""
    pid_bh, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N
    pid_b, pid_h = pid_bh // H, pid_bh % H
    newest = tl.load(pos + pid_b).to(tl.int32)
    if first > newest:
        return
    offs_n, offs_g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    offs_d, offs_r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    token = first + offs_n
    channel = offs_d // (BLOCK_D // 2) * (D // 2) + offs_d % (BLOCK_D // 2)  # a half of the columns is one of D
    inside, real = token <= newest, offs_d % (BLOCK_D // 2) < D // 2
    slot = pid_bh // HEADS * T + token
    b_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    at = basis + (pid_h * D + channel) * R
    for lo in range(0, rank, BLOCK_R):
        b_x = _coordinates(k, k_third, k_params, slot, inside, lo, R, BITS, BLOCK_R, q.dtype.element_ty)
        b_u = tl.load(at[None, :] + lo + offs_r[:, None], mask=real & (lo + offs_r[:, None] < R), other=0.0)
        b_k = dot(b_x, b_u, b_k)
    b_k += tl.load(bias + pid_h * D + channel, mask=real, other=0.0)[None, :]
    k1, k2 = halves(b_k)
    cos += pid_b * table_row + token.to(tl.int64)[:, None] * (D // 2)
    sin += pid_b * table_row + token.to(tl.int64)[:, None] * (D // 2)
    out = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
    q += pid_b * q_strides[0] + pid_h * G * q_strides[1]
    out = rotated_logits(k1, k2, q, q_strides[1], cos, sin, inside, offs_g, 0, out, G, D)
    at = logits + (pid_bh * G + offs_g[None, :]) * T + token[:, None]
    tl.store(at, out * (D**-0.5 * LOG2_E), mask=inside[:, None] & (offs_g < G))


@triton.jit
def _group_values(
    q, logits, v, v_third, v_params, pos, part, lse, T, S,
    N: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (row and group, CHUNK coordinates, split): softmax of the logits of the group's G query heads, and the
    weighted coordinates. q gives the dtype of the products."""
    pid_bg, lo_r, split = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK, tl.program_id(2)
    offs_g, offs_n, offs_c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    count = tl.load(pos + pid_bg // N).to(tl.int32) + 1
    m_i = tl.full([BLOCK_G], -1e30, tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, CHUNK], tl.float32)
    step = tl.cdiv(tl.cdiv(count, S), BLOCK_N) * BLOCK_N
    hi = tl.minimum(count, (split + 1) * step)
    for first in tl.range(split * step, hi, BLOCK_N):
        offs_t = first + offs_n
        inside = offs_t < hi
        qk = tl.load(
            logits + (pid_bg * G + offs_g[:, None]) * T + offs_t, mask=(offs_g[:, None] < G) & inside, other=0.0
        )
        b_v = _coordinates(v, v_third, v_params, pid_bg * T + offs_t, inside, lo_r, R, BITS, CHUNK, q.dtype.element_ty)
        m_i, l_i, acc = softmax_step(qk, inside, b_v, m_i, l_i, acc)
    l_i = tl.maximum(l_i, 1e-30)  # a program without tokens writes zeros and a logarithm that weighs nothing
    at = (pid_bg * G + offs_g) * S + split
    tl.store(
        part + at[:, None] * R + lo_r + offs_c, acc / l_i[:, None], mask=(offs_g[:, None] < G) & (lo_r + offs_c < R)
    )
    if lse is not None:
        tl.store(lse + at, m_i + tl.log2(l_i), mask=offs_g < G)


@_group_attention.triton
def launch(
    q: Tensor, k: Tensor, k_params: Tensor | None, v: Tensor, v_params: Tensor | None, k_basis: Tensor, v_basis: Tensor,
    k_bias: Tensor, v_bias: Tensor, pos: Tensor, cos: Tensor, sin: Tensor, bits: int, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """The Triton version of `group_attention`; tests give splits of the values."""
    (B, Hq, D), (N, width, R), T = q.shape, k_basis.shape, k.shape[2]
    s, G = width // D, Hq // (N * width // D)
    tensors = (k, k_params, v, v_params, k_basis, k_bias, pos, cos, sin)
    assert all(x is None or x.is_contiguous() for x in tensors) and q.stride(2) == 1
    pairs = [None if x is None else x.view(torch.int32) for x in (k_params, v_params)]
    words = [x if bits == 16 else x.view(WORDS.get(bits, torch.int16)) for x in (k, v)]
    third = [x if bits == 3 else None for x in (k, v)]
    logits = torch.empty(B, Hq, T, dtype=torch.float32, device=q.device)
    options = tuned("_group_logits", BLOCK_N=BLOCK_N * 2 // q.element_size(), BLOCK_R=BLOCK_R, num_warps=NUM_WARPS,
                    num_stages=NUM_STAGES)  # fmt: skip
    _group_logits[(triton.cdiv(T, options["BLOCK_N"]), B * N * s)](
        q, words[0], third[0], pairs[0], k_basis, k_bias, pos, cos, sin, logits, q.stride(),
        0 if len(cos) == 1 else cos.stride(0), T, R, H=N * s, HEADS=s, R=R, BITS=bits, **blocks_of(G, 1, D, 32),
        **options,
    )  # fmt: skip
    chunks = triton.cdiv(R, CHUNK)
    splits = splits or split_count(B * N * chunks, T, VALUES_N, q.device)
    mean = torch.empty(B, Hq, R, dtype=torch.float32, device=q.device)
    part, lse = parts_of(mean, splits)
    _group_values[(B * N, chunks, splits)](
        q, logits, words[1], third[1], pairs[1], pos, part, lse, T, splits, N=N, R=R, BITS=bits, G=s * G,
        **_value_block(s * G), CHUNK=CHUNK,
        **tuned("_group_values", BLOCK_N=VALUES_N, num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )  # fmt: skip
    return _expand_values(part if lse is None else combine(part, lse, mean.dtype), v_basis, v_bias, q)


def _value_block(heads: int) -> dict[str, int]:
    return dict(BLOCK_G=blocks_of(heads, 1, 16)["BLOCK_G"])


def _expand_values(mean: Tensor, basis: Tensor, bias: Tensor, q: Tensor) -> Tensor:
    """Weighted coordinates, fp32 [B, Hq, r] -> outputs [B, Hq, D]; weights add up to 1."""
    (B, Hq, D), (N, width, r) = q.shape, basis.shape
    y = mean.view(B, N, width // D, -1, r) @ basis.float().view(N, -1, D, r).mT + bias.float().view(N, -1, 1, D)
    return y.to(q.dtype).view(B, Hq, D)
