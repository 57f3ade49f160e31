"""Attention of one query per row over the first slots of a cache, without the values that cannot matter (BLASST).

A block's values are not read if its largest logit lies so far below the largest of the blocks before that its weights
would be under a threshold, for all query heads of a KV head: the block is then in neither the sum nor the output. Its
keys are read, so at most half of the bytes are saved, and nothing is stored or predicted. "Before" is within a split of
2,048 slots, which run at a time: the result is the same on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation, whole_vectors
from kernels.splits import blocks_of, combine, parts_of
from kernels.tiles import LOG2_E, dot, write_part
from kernels.tuned import tuned

BLOCK = 32  # slots that are read or skipped together; N in kernels/native/rows.h
SPLIT = 2048  # CHUNK in kernels/native/softmax.h
SHORTEST = 2048  # shorter contexts have the threshold of this length by default (ours)


def in_read_blocks(logits: Tensor, length: Tensor, scale: float, shortest: int) -> Tensor:
    """Which slots lie in blocks whose values are read: logits fp32 [B, Hkv, g, T], -inf where there is no token, of
    contexts of length [B] -> bool [B, Hkv, T]. See `skipping_attention`."""
    B, H, g, T = logits.shape
    most = F.pad(logits, (0, -T % SPLIT), value=float("-inf")).unflatten(3, (-1, SPLIT // BLOCK, BLOCK)).amax(5)
    before = F.pad(most, (1, -1), value=float("-inf")).cummax(4).values  # of a split's earlier blocks
    # -inf at 0; above 1, blocks would be left out that weigh more than those that are not
    least = (scale / length.clamp(min=shortest).float()).log().clamp(max=0).view(B, 1, 1, 1, 1)
    return (most - before >= least).any(2).flatten(2).repeat_interleave(BLOCK, 2)[..., :T]


@operation(
    cpp=whole_vectors,
    fake=lambda q, k, v, stop, *_: (q.new_empty(q.shape), stop.new_empty(len(q), k.shape[1])),
)
def skipping_attention(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, scale: float, shortest: int = 1
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], k and v [>= B, Hkv, T, D] (rotated), slots 0 to stop [B] -> [B, Hq, D], and the number of slots
    whose values were read [B, Hkv] int64. Other slots may hold anything. Products are scaled by 1/sqrt(D). A block is
    skipped if its weights are below scale / max(stop, shortest), at most 1, of the largest before it in its split."""
    B, Hq, D = q.shape
    H, T = k.shape[1:3]
    there = torch.arange(T, device=q.device) < stop[:, None]  # [B, T]
    logits = q.view(B, H, Hq // H, D).float() @ k[:B].float().mT * D**-0.5
    logits = torch.where(there[:, None, None], logits, float("-inf"))
    read = in_read_blocks(logits, stop, scale, shortest) & there[:, None]
    weights = logits.masked_fill(~read[:, :, None], float("-inf")).softmax(-1)
    y = weights.to(v.dtype) @ v[:B].masked_fill(~read[..., None], 0)
    return y.view(B, Hq, D), read.sum(2)


# ---- Triton ----


@triton.jit
def least_weight(length, scale, shortest):
    """The logarithm to base 2 of the threshold, at most 0; -inf at a scale of 0: nothing is skipped."""
    return tl.minimum(tl.log2(scale / tl.maximum(length, shortest).to(tl.float32)), 0.0)


@triton.jit
def _skipping_attention(
    q, k, v, stop, part, lse, read, q_strides, k_strides, v_strides, H, S, scale, shortest,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): attention of the group's G query heads over its SPLIT slots."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0).to(k.dtype.element_ty)
    length = tl.load(stop + pid_b).to(tl.int32)
    least = least_weight(length, scale, shortest)
    lo = split * SPLIT
    hi = tl.minimum(length, lo + SPLIT)
    k += pid_b * k_strides[0] + pid_h * k_strides[1]
    v += pid_b * v_strides[0] + pid_h * v_strides[1]
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    values = 0
    for first in range(lo, hi, BLOCK_N):
        slot = (first + offs_n).to(tl.int64)
        inside = first + offs_n < hi
        real = inside[:, None] & (offs_d < D)
        b_k = tl.load(k + slot[:, None] * k_strides[2] + offs_d, mask=real, other=0.0)
        logits = dot(b_q, tl.trans(b_k)) * (D**-0.5 * LOG2_E)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        most = tl.max(logits, 1)
        weighs = (most - m_i >= least) & (offs_g < G)
        if tl.max(weighs.to(tl.int32), 0) > 0:
            m_new = tl.maximum(m_i, most)
            p, shrink = tl.exp2(logits - m_new[:, None]), tl.exp2(m_i - m_new)
            b_v = tl.load(v + slot[:, None] * v_strides[2] + offs_d, mask=real, other=0.0)
            l_i = l_i * shrink + tl.sum(p, 1)
            acc = dot(p.to(b_v.dtype), b_v, acc * shrink[:, None])
            m_i = m_new
            values += tl.minimum(hi - first, BLOCK_N)
    write_part(m_i, l_i, acc, part, lse, pid_bh * G + offs_g, offs_g, split, S, G, D, BLOCK_D)
    tl.store(read + pid_bh * S + split, values)


@skipping_attention.triton
def launch(q: Tensor, k: Tensor, v: Tensor, stop: Tensor, scale: float, shortest: int = 1) -> tuple[Tensor, Tensor]:
    """The Triton version of `skipping_attention`."""
    B, Hq, D = q.shape
    H, T = k.shape[1:3]
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1, "channels must be contiguous"
    splits = -(-T // SPLIT)
    part, lse = parts_of(q, splits)
    read = torch.empty(B, H, splits, dtype=torch.int64, device=q.device)
    _skipping_attention[(B * H, splits)](
        q, k, v, stop.contiguous(), part, lse, read, q.stride(), k.stride(), v.stride(), H, splits, scale, shortest,
        **blocks_of(Hq, H, D), BLOCK_N=BLOCK, SPLIT=SPLIT, **tuned("_skipping_attention", num_warps=4, num_stages=3),
    )  # fmt: skip
    return (part if lse is None else combine(part, lse, q.dtype)), read.sum(2)
