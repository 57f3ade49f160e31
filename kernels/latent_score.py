"""Scores of every token by inner products in a latent space, which choose the tokens that SALS expands.

The kernels read each coordinate once for all queries; C++ also takes rows that lie apart, such as the leading
coordinates of longer rows. One query is summed on the fp32 units, which keep up with memory at two operations per
element; with more queries, a block of them is one operand of the tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.linear import dense_linear
from kernels.native import DTYPES, VECTOR
from kernels.op import operation
from kernels.ring import ring_positions
from kernels.splits import empty_scores, score_grid
from kernels.tiles import dot, filled
from kernels.tuned import tuned

# One query: a tile of 8192 elements is 16 KB of bf16 in flight per program, four times what covers the latency of an
# H100's memory if every multiprocessor holds four programs. More queries: two tiles are fetched ahead.
TILE, MAX_R = 8192, 128
DOT_T, DOT_BYTES = 64, 128  # tokens, and a line of each
NUM_WARPS, NUM_STAGES = 4, 3


def latent_score(q: Tensor, latents: Tensor, pos: Tensor | None = None) -> Tensor:
    """Inner products of C queries a row with every token: q [B, C, r], latents [>= B, T, r] -> fp32 [B, C, T].

    pos [B], if given, is the last slot that matters: later ones need not be read, and their scores may be anything.
    """
    return head_scores(q[:, None], latents[:, None], pos)[:, 0]


def latent_mass(q: Tensor, store: Tensor, ring: Tensor, pos: Tensor, recent: int, scale: float) -> Tensor:
    """Softmax weights of C queries over all tokens, summed over the queries: q [B, C, r] -> fp32 [B, 1, T].

    The ring [>= B, R, r], slot = position modulo R, holds the newest tokens, `recent` up to pos [B], the store
    [>= B, T, r] all older ones, slot = position; the weights are those of the store's.
    """
    T, place = store.shape[1], ring_positions(pos, ring.shape[1])
    products = torch.cat((latent_score(q, store, pos - recent), latent_score(q, ring)), -1)
    stored = torch.arange(T, device=q.device) <= pos[:, None] - recent
    there = torch.cat((stored, (place >= 0) & (place > pos[:, None] - recent)), 1)[:, None]
    logits = torch.where(there, products * scale, float("-inf"))
    return logits.softmax(-1)[..., :T].sum(1, keepdim=True)


def _vectors(q: Tensor, latents: Tensor, pos: Tensor | None) -> bool:
    """C++ reads rows in whole vectors, of which the last may reach into the next row if that follows at once."""
    r = q.shape[3]
    return latents.dtype in DTYPES and (r % VECTOR == 0 or latents.stride(2) == r)


@operation(
    cpp=_vectors,
    fake=lambda q, latents, pos: empty_scores(*q.shape[:3], latents.shape[2], device=q.device),
)
def head_scores(q: Tensor, latents: Tensor, pos: Tensor | None) -> Tensor:
    """As `latent_score`, with latents for each head: q [B, H, C, r], latents [>= B, H, T, r] -> fp32 [B, H, C, T]."""
    return q.float() @ latents[: len(q)].float().mT


@operation(
    cpp=lambda q, basis, latents, pos: basis.shape[1] % VECTOR == 0,
    fake=lambda q, basis, latents, pos: empty_scores(len(q), 1, latents.shape[1], device=q.device),
)
def joint_score(q: Tensor, basis: Tensor, latents: Tensor, pos: Tensor) -> Tensor:
    """`latent_score` of one query a row, q [B, Hq, D] of all heads in the first r vectors of basis [>= r, Hkv * D].

    The sum over query heads of q . (k of its group) is the sum over KV heads of (the sum of its group's q) . k.
    """
    H, r = basis.shape[1] // q.shape[2], latents.shape[2]
    groups = q.unflatten(1, (H, -1)).sum(2).flatten(1)
    return latent_score(dense_linear(groups, basis[:r])[:, None], latents, pos)


@triton.jit
def _score_one(
    q, x, pos, out, q_strides, x_strides, out_strides, H, T,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and head): one query, over every so many blocks of tokens."""
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h, seq_len = pid_bh // H, pid_bh % H, filled(pos, pid_bh // H, T)
    offs_r = tl.arange(0, BLOCK_R)
    q += pid_b * q_strides[0] + pid_h * q_strides[1]
    x += pid_b * x_strides[0] + pid_h * x_strides[1]
    out += pid_b * out_strides[0] + pid_h * out_strides[1]
    for first in range(tl.program_id(0) * BLOCK_T, seq_len, tl.num_programs(0) * BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        at = x + offs_t.to(tl.int64)[:, None] * x_strides[2]
        score = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)  # summed over the lanes once, at the end
        for lo in range(0, R, BLOCK_R):
            inside = (offs_t[:, None] < seq_len) & (lo + offs_r < R)
            b_x = tl.load(at + lo + offs_r, mask=inside, other=0.0).to(tl.float32)
            score += b_x * tl.load(q + lo + offs_r, mask=lo + offs_r < R, other=0.0).to(tl.float32)
        # rows end at a multiple of 16, so that a thread stores 16 bytes at once
        tl.store(out + offs_t, tl.sum(score, 1), mask=offs_t < tl.cdiv(T, 16) * 16)


@triton.jit
def _score_many(
    q, x, pos, out, q_strides, x_strides, out_strides, H, T,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and head): all C queries as one tile, over every so many blocks of tokens."""
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h, seq_len = pid_bh // H, pid_bh % H, filled(pos, pid_bh // H, T)
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q += pid_b * q_strides[0] + pid_h * q_strides[1] + offs_c[:, None] * q_strides[2]
    x += pid_b * x_strides[0] + pid_h * x_strides[1]
    out += pid_b * out_strides[0] + pid_h * out_strides[1] + offs_c[:, None] * out_strides[2]
    for first in range(tl.program_id(0) * BLOCK_T, seq_len, tl.num_programs(0) * BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        at = x + offs_t.to(tl.int64)[:, None] * x_strides[2]
        score = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
        for lo in range(0, R, BLOCK_R):
            b_q = tl.load(q + lo + offs_r, mask=(offs_c[:, None] < C) & (lo + offs_r < R), other=0.0)
            b_x = tl.load(at + lo + offs_r, mask=(offs_t[:, None] < seq_len) & (lo + offs_r < R), other=0.0)
            score = dot(b_q, tl.trans(b_x), score)
        tl.store(out + offs_t, score, mask=(offs_c[:, None] < C) & (offs_t < tl.cdiv(T, 16) * 16))


@head_scores.triton
def _latent_score_triton(q: Tensor, latents: Tensor, pos: Tensor | None, block: int | None = None) -> Tensor:
    """q [B, H, C, r], latents [>= B, H, T, r], pos [B] -> [B, H, C, T]. Tests give the number of tokens per block."""
    B, H, C, R = q.shape
    T = latents.shape[2]
    assert latents.stride(3) == 1, "coordinates must be contiguous"
    q, pos = q.contiguous(), None if pos is None else pos.contiguous()
    out = empty_scores(B, H, C, T, device=q.device)
    if C == 1:
        block_r = min(MAX_R, triton.next_power_of_2(R))
        options = tuned("_score_one", BLOCK_T=block or TILE // block_r, num_warps=NUM_WARPS)
        _score_one[score_grid(B * H, T, options["BLOCK_T"], q.device)](
            q, latents, pos, out, q.stride(), latents.stride(), out.stride(), H, T,
            R=R, BLOCK_R=block_r, **options,
        )  # fmt: skip
        return out
    assert q.dtype == latents.dtype, "several queries must have the dtype of what they score"
    options = tuned("_score_many", BLOCK_T=block or DOT_T, num_warps=NUM_WARPS, num_stages=NUM_STAGES)
    _score_many[score_grid(B * H, T, options["BLOCK_T"], q.device)](
        q, latents, pos, out, q.stride(), latents.stride(), out.stride(), H, T,
        C=C, R=R, BLOCK_C=max(16, triton.next_power_of_2(C)), 
        BLOCK_R=max(16, min(DOT_BYTES // latents.element_size(), triton.next_power_of_2(R))),
        **options,
    )  # fmt: skip
    return out
