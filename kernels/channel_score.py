"""Scores of all tokens by a few channels of their keys, which each step chooses anew (SparQ Attention).

Keys are stored channel by channel, so that a chosen channel of all tokens is one run of memory: nothing else is read.
Each channel is loaded once for all query heads of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.gather_attention import gather_rows
from kernels.native import DTYPES
from kernels.op import operation, picked
from kernels.splits import empty_scores, score_grid
from kernels.tiles import filled
from kernels.tuned import tuned

TILE, WARPS = 2048, 4  # scores of a program, over all query heads: 16 a thread


@operation(
    cpp=lambda q, channels, keys, pos: keys.dtype in DTYPES,
    fake=lambda q, channels, keys, pos: empty_scores(*q.shape[:3], keys.shape[3], device=q.device),
    reads=lambda q, channels, keys, pos: dict(keys=picked(channels, keys)),
)
def channel_score(q: Tensor, channels: Tensor, keys: Tensor, pos: Tensor) -> Tensor:
    """Sum over r channels of q times the tokens' keys, without softmax or scale.

    q [B, H, G, r], the chosen channels of a group's queries; channels [B, H, r] int64; keys [>= B, H, D, T]; pos [B]
    the last slot that matters -> fp32 [B, H, G, T]. Later slots need not be read; their scores may be anything.
    """
    return q.float() @ gather_rows(keys, channels).float()


@operation(
    cpp=True,
    fake=lambda q, n_kv_head, r, bounds=False: tuple(
        q.new_empty(len(q), n_kv_head, *n, dtype=t)
        for n, t in (((q.shape[1] // n_kv_head, r), torch.float32), ((r,), torch.int64))
    ),
)
def largest_channels(q: Tensor, n_kv_head: int, r: int, bounds: bool = False) -> tuple[Tensor, Tensor]:
    """The r channels that are largest in a group's sum of |q|, and its queries in them, for `channel_score`.

    q [B, H * G, D] -> fp32 [B, H, G, r], channels [B, H, r] int64, in any order. A query is divided by its temperature,
    sqrt(D times the share of |q| that its r channels have), so that scores are logits. With bounds, a channel c of a
    group whose sum is positive becomes c + D: keys then hold the minimum of every channel, followed by the maximum.
    """
    groups, D = q.float().unflatten(1, (n_kv_head, -1)), q.shape[2]
    size = groups.abs()
    channels = size.sum(2).topk(r, -1).indices
    at = channels[:, :, None].expand(-1, -1, groups.shape[2], -1)
    few = groups.gather(3, at)
    covered = few.abs().sum(-1) / size.sum(-1).clamp(min=1e-30)
    if bounds:
        channels = channels + D * (few.sum(2) > 0)
    return few / (covered * D).clamp(min=1e-30).sqrt()[..., None], channels


@operation(cpp=True, mutates=("keys",))
def append_channels(keys: Tensor, k: Tensor, pos: Tensor) -> None:
    """In place, one token a row: k [B, H, D] goes to slot pos [B] of keys [>= B, H, D, T]."""
    keys[torch.arange(len(pos), device=pos.device), :, :, pos] = k


# ---- Triton ----


@triton.jit
def _channel_score(
    q, channels, keys, pos, out, keys_strides, out_strides, H, T,
    G: tl.constexpr, R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and head): every so many blocks of tokens."""
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h, seq_len = pid_bh // H, pid_bh % H, filled(pos, pid_bh // H, T)
    offs_g = tl.arange(0, BLOCK_G)
    keys += pid_b * keys_strides[0] + pid_h * keys_strides[1]
    out += pid_b * out_strides[0] + pid_h * out_strides[1] + offs_g[:, None] * out_strides[2]
    for first in range(tl.program_id(0) * BLOCK_T, seq_len, tl.num_programs(0) * BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        score = tl.zeros([BLOCK_G, BLOCK_T], tl.float32)
        for r in range(R):
            channel = tl.load(channels + pid_bh * R + r)
            b_k = tl.load(keys + channel * keys_strides[2] + offs_t, mask=offs_t < seq_len, other=0.0).to(tl.float32)
            b_q = tl.load(q + (pid_bh * G + offs_g) * R + r, mask=offs_g < G, other=0.0).to(tl.float32)
            score += b_q[:, None] * b_k[None, :]
        tl.store(out + offs_t, score, mask=(offs_g[:, None] < G) & (offs_t < tl.cdiv(T, 16) * 16))


@channel_score.triton
def launch(q: Tensor, channels: Tensor, keys: Tensor, pos: Tensor, block: int | None = None) -> Tensor:
    """The Triton version of `channel_score`; tests give tokens per block."""
    B, H, G, R = q.shape
    T = keys.shape[3]
    assert keys.stride(3) == 1, "the tokens of a channel must be contiguous"
    out, width = empty_scores(B, H, G, T, device=q.device), triton.next_power_of_2(G)
    options = tuned("_channel_score", BLOCK_T=block or max(32, TILE // width), num_warps=WARPS)
    _channel_score[score_grid(B * H, T, options["BLOCK_T"], q.device)](
        q.contiguous(), channels.contiguous(), keys, pos.contiguous(), out, keys.stride(), out.stride(), H, T,
        G=G, R=R, BLOCK_G=width, **options,
    )  # fmt: skip
    return out
