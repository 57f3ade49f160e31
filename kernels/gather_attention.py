"""Attention of one query per row over gathered tokens: each KV head has its own list of slots.

The Triton kernel reads the list and the whole rows of K and V that it names (2 * D elements per token, contiguous: a
row of 128 channels in bf16 is two full cache lines), once for all query heads of the group. It is split over the chosen
tokens as `decode_attention` is over all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation, picked, whole_vectors
from kernels.splits import block_size, blocks_of, combine, parts_of, split_count
from kernels.tiles import LOG2_E, dot, softmax_step, write_part
from kernels.tuned import tuned


def gather_rows(buffer: Tensor, idx: Tensor) -> Tensor:
    """Rows idx [B, H or 1, K] of buffer [>= B, H, T, C] -> [B, H, K, C]; one list serves all heads if it has one.

    Uses index_select over flattened rows, which on a CPU copies whole rows; an expanded gather moves single elements.
    """
    _, H, T, C = buffer.shape
    B, _, K = idx.shape
    base = torch.arange(B * H, device=idx.device).view(B, H, 1) * T
    return buffer.reshape(-1, C).index_select(0, (idx + base).reshape(-1)).view(B, H, K, C)


@operation(
    cpp=whole_vectors,
    reads=lambda q, k, v, idx, count: dict(k=picked(idx, k), v=picked(idx, v)),
)
def gather_attention(q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor) -> Tensor:
    """Softmax attention over the first `count` of the slots idx; later entries may point anywhere.

    q [B, Hq, D], k and v [>= B, Hkv, T, D] (rotated), idx [B, Hkv or 1, K] int64, count [B, Hkv or 1] -> [B, Hq, D].
    """
    return weighted_gather_attention(q, k, v, idx, count, None)


def weighted_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor, log_weights: Tensor | None
) -> Tensor:
    """`gather_attention` in torch, on every device, with log_weights fp32 [B, Hkv or 1, K] added to the logits.

    A token that stands for n is worth log n, and one that was drawn with probability p is worth -log p.
    """
    B, Hq, D = q.shape
    chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]  # [B, Hkv or 1, K]
    idx = torch.where(chosen, idx, idx[..., :1])  # other slots may hold NaN: a chosen token instead, at weight 0
    grouped = q.view(B, k.shape[1], -1, D)  # the group's queries stand where SDPA expects query positions
    keys, values, mask = gather_rows(k, idx), gather_rows(v, idx), chosen[:, :, None]
    if log_weights is not None:  # in fp32, whatever the dtype: 16 bits would round the weights
        mask = torch.where(mask, log_weights[:, :, None], float("-inf"))
        grouped, keys, values = grouped.float(), keys.float(), values.float()
    return F.scaled_dot_product_attention(grouped, keys, values, mask).reshape(B, Hq, D).to(q.dtype)


# ---- Triton ----

NUM_STAGES = 5  # the list runs ahead of the rows: five stages keep two blocks of rows in flight


@triton.jit
def _gather_attention(
    q, k, v, idx, count, part, lse, q_strides, k_strides, v_strides, idx_strides, count_strides, H, K, S,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): attention of the group's G query heads over its part of the list."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0)

    # what is split is the count, not the list: all programs have work at any length
    chosen = tl.minimum(tl.load(count + pid_b * count_strides[0] + pid_h * count_strides[1]), K).to(tl.int32)
    step = tl.cdiv(tl.cdiv(chosen, S), BLOCK_N) * BLOCK_N
    lo = split * step
    hi = tl.minimum(chosen, lo + step)
    idx += pid_b * idx_strides[0] + pid_h * idx_strides[1]
    k += pid_b * k_strides[0] + pid_h * k_strides[1]
    v += pid_b * v_strides[0] + pid_h * v_strides[1]
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(lo, hi, BLOCK_N):
        inside = first + offs_n < hi
        slot = tl.load(idx + first + offs_n, mask=inside, other=0).to(tl.int64)
        real = inside[:, None] & (offs_d < D)
        b_k = tl.load(k + slot[:, None] * k_strides[2] + offs_d, mask=real, other=0.0)
        b_v = tl.load(v + slot[:, None] * v_strides[2] + offs_d, mask=real, other=0.0)
        logits = dot(b_q, tl.trans(b_k)) * (D**-0.5 * LOG2_E)
        m_i, l_i, acc = softmax_step(logits, inside, b_v, m_i, l_i, acc)
    write_part(m_i, l_i, acc, part, lse, pid_bh * G + offs_g, offs_g, split, S, G, D, BLOCK_D)


def options_of(tile: dict[str, int], itemsize: int) -> dict[str, int]:
    """More warps if the query heads, which every warp holds, take too many registers for four."""
    return dict(num_warps=4 if tile["BLOCK_G"] * tile["BLOCK_D"] * itemsize <= 8192 else 8, num_stages=NUM_STAGES)


@gather_attention.triton
def launch(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor, block: int | None = None, splits: int | None = None
) -> Tensor:
    """The Triton version of `gather_attention`; tests give block (a power of two >= 16) and splits."""
    B, Hq, D = q.shape
    H, K = k.shape[1], idx.shape[2]
    assert q.stride(2) == k.stride(3) == v.stride(3) == idx.stride(2) == 1, "the last dimension must be contiguous"
    tile = blocks_of(Hq, H, D)
    block = block or block_size(B * H, K, tile["BLOCK_D"] * k.element_size(), q.device)
    options = tuned("_gather_attention", BLOCK_N=block, **options_of(tile, k.element_size()))
    block = options["BLOCK_N"]
    splits = splits or split_count(B * H, K, block, q.device)
    part, lse = parts_of(q, splits)
    lists = [x.stride() if x.shape[1] > 1 else (x.stride(0), 0) for x in (idx, count)]  # one may serve all heads
    _gather_attention[(B * H, splits)](
        q, k, v, idx, count, part, lse, q.stride(), k.stride(), v.stride(), *lists, H, K, splits,
        **tile, **options,
    )  # fmt: skip
    return part if lse is None else combine(part, lse, q.dtype)
