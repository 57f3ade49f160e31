"""Scores of every token by inner products in a latent space: what chooses the tokens that SALS expands.

The kernels read each coordinate once, for all queries together. One query is summed on the fp32 units, which keep up
with the memory at two operations an element; with more, a block of queries is one operand of the tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.backend import Aot, dot, tl, triton, use_triton

# One query: a tile of 8192 elements is 16 KB of bf16 in flight per program, four times what covers the latency of an
# H100's memory when its multiprocessors hold four programs each. More queries: two tiles are fetched ahead.
TILE, MAX_R = 8192, 128
DOT_T, DOT_BYTES = 64, 128  # tokens, and a line of each
NUM_WARPS, NUM_STAGES = 4, 3


def latent_score(q: Tensor, latents: Tensor, pos: Tensor | None = None) -> Tensor:
    """Inner products of C queries a row with every token: q [B, C, r], latents [>= B, T, r] -> fp32 [B, C, T].

    pos [B], if given, is the last slot that matters: later ones need not be read, and their scores may be anything.
    """
    if use_triton(q):
        return torch.ops.kv_fast.latent_score(q[:, None], latents[:, None], pos)[:, 0]
    return q.float() @ latents[: len(q)].float().transpose(1, 2)


def empty_scores(*size: int, device: torch.device) -> Tensor:
    """Uninitialized fp32 [..., T] whose rows start at multiples of 64 bytes, for wide loads and stores at any T."""
    *lead, T = size
    return torch.empty(*lead, triton.cdiv(T, 16) * 16, dtype=torch.float32, device=device)[..., :T]


@triton.jit
def filled(pos, b, T):
    """Slots of row b that matter: all T, or those up to its position."""
    n = T
    if pos is not None:
        n = tl.minimum(tl.load(pos + b) + 1, T).to(tl.int32)
    return n


@triton.jit
def _score_one(
    q, x, pos, out, q_row, q_head, x_row, x_head, x_slot, out_row, out_head, H, T,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (row and head, block of tokens): one query."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first, n = tl.program_id(1) * BLOCK_T, filled(pos, b, T)
    if first >= n:
        return
    t, r = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    q += b * q_row + h * q_head
    x += b * x_row + h * x_head + t.to(tl.int64)[:, None] * x_slot
    score = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)  # summed over the lanes once, at the end
    for lo in range(0, R, BLOCK_R):
        inside = (t[:, None] < n) & (lo + r < R)
        part = tl.load(x + lo + r, mask=inside, other=0.0).to(tl.float32)
        score += part * tl.load(q + lo + r, mask=lo + r < R, other=0.0).to(tl.float32)
    # rows end at a multiple of 16, so that a thread stores 16 bytes at once
    tl.store(out + b * out_row + h * out_head + t, tl.sum(score, 1), mask=t < tl.cdiv(T, 16) * 16)


@triton.jit
def _score_many(
    q, x, pos, out, q_row, q_head, q_query, x_row, x_head, x_slot, out_row, out_head, out_query, H, T,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (row and head, block of tokens): all C queries, as one tile."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first, n = tl.program_id(1) * BLOCK_T, filled(pos, b, T)
    if first >= n:
        return
    t, c, r = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q += b * q_row + h * q_head + c[:, None] * q_query
    x += b * x_row + h * x_head + t.to(tl.int64)[:, None] * x_slot
    score = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    for lo in range(0, R, BLOCK_R):
        queries = tl.load(q + lo + r, mask=(c[:, None] < C) & (lo + r < R), other=0.0)
        part = tl.load(x + lo + r, mask=(t[:, None] < n) & (lo + r < R), other=0.0)
        score = dot(queries, tl.trans(part), score)
    to = out + b * out_row + h * out_head + c[:, None] * out_query + t
    tl.store(to, score, mask=(c[:, None] < C) & (t < tl.cdiv(T, 16) * 16))


def _latent_score_triton(q: Tensor, latents: Tensor, pos: Tensor | None, block: int | None = None) -> Tensor:
    """q [B, H, C, r], latents [>= B, H, T, r], pos [B] -> [B, H, C, T]. Tests give the number of tokens per block."""
    B, H, C, R = q.shape
    T = latents.shape[2]
    assert latents.stride(3) == 1, "coordinates must be contiguous"
    q, pos = q.contiguous(), None if pos is None else pos.contiguous()
    out = empty_scores(B, H, C, T, device=q.device)
    if C == 1:
        block_r = min(MAX_R, triton.next_power_of_2(R))
        block = block or TILE // block_r
        _score_one[(B * H, triton.cdiv(T, block))](
            q, latents, pos, out, *q.stride()[:2], *latents.stride()[:3], *out.stride()[:2], H, T,
            R=R, BLOCK_R=block_r, BLOCK_T=block, num_warps=NUM_WARPS,
        )  # fmt: skip
        return out
    assert q.dtype == latents.dtype, "several queries must have the dtype of what they score"
    block = block or DOT_T
    _score_many[(B * H, triton.cdiv(T, block))](
        q, latents, pos, out, *q.stride()[:3], *latents.stride()[:3], *out.stride()[:3], H, T,
        C=C, R=R, BLOCK_C=max(16, triton.next_power_of_2(C)), 
        BLOCK_R=max(16, min(DOT_BYTES // latents.element_size(), triton.next_power_of_2(R))),
        BLOCK_T=block, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define("latent_score(Tensor q, Tensor latents, Tensor? pos) -> Tensor")
for _device in ("CPU", "CUDA"):
    _lib.impl("latent_score", _latent_score_triton, _device)
torch.library.register_fake(
    "kv_fast::latent_score",
    lambda q, latents, pos: empty_scores(*q.shape[:3], latents.shape[2], device=q.device),
    lib=_lib,
)


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Half of the 25 and of the 12.5 % of all channels that SALS keeps, for one query and for one per head; labels."""
    one = ("q_row", "q_head", "x_row", "x_head", "x_slot", "out_row", "out_head")
    width, out = n_kv_head * head_dim, []
    for name, R, dtype in (("25%", width // 8, "bf16"), ("12.5%", width // 16, "bf16"), ("fp32", width // 8, "fp32")):
        block_r = min(MAX_R, triton.next_power_of_2(R))
        types = dict(q=f"*{dtype}", x=f"*{dtype}", pos="*i64", out="*fp32", H="i32", T="i32:16")
        sizes = dict(R=R, BLOCK_R=block_r, BLOCK_T=TILE // block_r)
        signature = types | dict.fromkeys(one, "i64:16") | dict.fromkeys(sizes, "constexpr")
        out.append((f"score of one query, {name}", _score_one, signature, sizes, dict(num_warps=4, num_stages=1)))
        sizes = dict(
            C=n_head,
            R=R,
            BLOCK_C=max(16, triton.next_power_of_2(n_head)),
            BLOCK_R=32 if dtype == "fp32" else 64,
            BLOCK_T=DOT_T,
        )
        signature = types | dict.fromkeys((*one, "q_query", "out_query"), "i64:16") | dict.fromkeys(sizes, "constexpr")
        out.append((f"score of all heads, {name}", _score_many, signature, sizes,
                    dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES)))  # fmt: skip
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of scoring `length` tokens in bf16: SALS at 25 and 12.5 %, one query; 25 %, all heads."""
    out = []
    for name, share, queries in (("25%", 8, 1), ("12.5%", 16, 1), ("25%, all heads", 8, n_head)):
        r = n_kv_head * head_dim // share
        size = batch * (length * (2 * r + 4 * queries) + 2 * queries * r)
        out.append(dict(op=f"latent_score {name}", bytes=size, launches=1))
    return out
