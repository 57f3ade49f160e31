"""Attention of one query per row over gathered tokens: each KV head has its own list of slots.

The Triton kernel reads the list, and by it whole rows of K and V (2 * D elements a token, contiguous: a row of 128
channels in bf16 is two full lines of the cache), once for all query heads of the group. It is split over the chosen
tokens as `decode_attention` is over all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native
from kernels.backend import (
    Aot,
    combine,
    dot,
    multiprocessors,
    on_cpu,
    split_count,
    tl,
    triton,
    use_native,
    use_triton,
)


def gather_rows(buffer: Tensor, idx: Tensor) -> Tensor:
    """Rows idx [B, H or 1, K] of buffer [>= B, H, T, C] -> [B, H, K, C]; one list serves all heads if it has one.

    By index_select over flattened rows: on a CPU it copies whole rows, where an expanded gather moves single elements.
    """
    _, H, T, C = buffer.shape
    B, _, K = idx.shape
    base = torch.arange(B * H, device=idx.device).view(B, H, 1) * T
    return buffer.reshape(-1, C).index_select(0, (idx + base).reshape(-1)).view(B, H, K, C)


def gather_attention(q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor) -> Tensor:
    """Softmax attention over the first `count` of the slots idx; later entries may point anywhere.

    q [B, Hq, D], k and v [>= B, Hkv, T, D] (rotated), idx [B, Hkv or 1, K] int64, count [B, Hkv or 1] -> [B, Hq, D].
    """
    if use_triton(q) or use_native(q, q.shape[2]):
        return torch.ops.kv_fast.gather_attention(q, k, v, idx, count)
    B, Hq, D = q.shape
    chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]  # [B, Hkv or 1, K]
    idx = torch.where(chosen, idx, idx[..., :1])  # in place of what may hold NaN a token that is chosen, at weight 0
    grouped = q.view(B, k.shape[1], -1, D)  # the group's queries stand where SDPA expects query positions
    y = F.scaled_dot_product_attention(grouped, gather_rows(k, idx), gather_rows(v, idx), chosen[:, :, None])
    return y.view(B, Hq, D)


# ---- Triton ----

TILE_BYTES = 16384  # of K or V in a block of tokens: 72 KB of shared memory a program, three on an H100
NUM_STAGES = 5  # the list runs ahead of the rows: five stages keep two blocks of rows in flight
LOG2_E = tl.constexpr(1.4426950408889634)
AOT_CHOSEN = 160  # the list of Self-Indexing KVCache


@triton.jit
def softmax_step(logits, inside, values, top, total, y):
    """Online softmax over a block of tokens of which the first is inside: logits [G, N] in units of log 2,
    inside [N], values [N, D]; top, total [G] and y [G, D] are the running maximum, sum and output, and returned."""
    logits = tl.where(inside[None, :], logits, float("-inf"))
    new = tl.maximum(top, tl.max(logits, 1))
    p, shrink = tl.exp2(logits - new[:, None]), tl.exp2(top - new)
    total = total * shrink + tl.sum(p, 1)
    return new, total, dot(p.to(values.dtype), values, y * shrink[:, None])


@triton.jit
def write_part(top, total, y, part, lse, head, g, split, S, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what a program has seen, of query heads `head` [G] of the batch: normalized, and the log of its weight."""
    d = tl.arange(0, BLOCK_D)
    total = tl.maximum(total, 1e-30)  # a program without tokens writes zeros and -inf
    at = head * S + split
    y = (y / total[:, None]).to(part.dtype.element_ty)
    tl.store(part + at[:, None] * D + d, y, mask=(g[:, None] < G) & (d < D))
    if lse is not None:
        tl.store(lse + at, top + tl.log2(total), mask=g < G)


@triton.jit
def _gather_attention(
    q, k, v, idx, count, part, lse,
    q_row, q_head, k_row, k_head, k_slot, v_row, v_head, v_slot, idx_row, idx_head, count_row, count_head, H, K, S,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): attention of the group's G query heads over its part of the list."""
    group, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = group // H, group % H
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    x = tl.load(q + b * q_row + (h * G + g[:, None]) * q_head + d, mask=(g[:, None] < G) & (d < D), other=0.0)

    # what is split is the count, not the list: all programs have work at any length
    chosen = tl.minimum(tl.load(count + b * count_row + h * count_head), K).to(tl.int32)
    step = tl.cdiv(tl.cdiv(chosen, S), BLOCK_N) * BLOCK_N
    lo = split * step
    hi = tl.minimum(chosen, lo + step)
    idx += b * idx_row + h * idx_head
    k += b * k_row + h * k_head
    v += b * v_row + h * v_head
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    y = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(lo, hi, BLOCK_N):
        inside = first + n < hi
        slot = tl.load(idx + first + n, mask=inside, other=0).to(tl.int64)
        real = inside[:, None] & (d < D)
        keys = tl.load(k + slot[:, None] * k_slot + d, mask=real, other=0.0)
        values = tl.load(v + slot[:, None] * v_slot + d, mask=real, other=0.0)
        logits = dot(x, tl.trans(keys)) * (D**-0.5 * LOG2_E)
        top, total, y = softmax_step(logits, inside, values, top, total, y)
    write_part(top, total, y, part, lse, group * G + g, g, split, S, G, D, BLOCK_D)


def block_size(programs: int, n: int, row_bytes: int, device: torch.device) -> int:
    """Tokens per block: tiles of TILE_BYTES, smaller where that many would leave multiprocessors idle.

    A list is short (160 tokens in Self-Indexing KVCache): one row of it in blocks of 64 is three programs a head.
    """
    block = max(16, min(128, TILE_BYTES // row_bytes))
    while block > 16 and programs * triton.cdiv(n, block) < 2 * multiprocessors(device):
        block //= 2
    return block


def blocks_of(n_head: int, n_kv_head: int, head_dim: int) -> dict[str, int]:
    """G, D and their tiles: a group's query heads are padded to the 16 rows of a tensor-core instruction."""
    G = n_head // n_kv_head
    return dict(G=G, D=head_dim, BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_D=triton.next_power_of_2(head_dim))


def options_of(tile: dict[str, int], itemsize: int) -> dict[str, int]:
    """More warps where the query heads, which every warp holds, are too many registers for four."""
    return dict(num_warps=4 if tile["BLOCK_G"] * tile["BLOCK_D"] * itemsize <= 8192 else 8, num_stages=NUM_STAGES)


def parts_of(q: Tensor, splits: int) -> tuple[Tensor, Tensor | None]:
    """Where `splits` programs a head write: their outputs and weights; one alone writes the result."""
    if splits == 1:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), None
    part = torch.empty(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    return part, torch.empty(part.shape[:3], dtype=torch.float32, device=q.device)


def launch(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, count: Tensor, block: int | None = None, splits: int | None = None
) -> Tensor:
    """The Triton version of `gather_attention`; tests give block (a power of two >= 16) and splits."""
    B, Hq, D = q.shape
    H, K = k.shape[1], idx.shape[2]
    assert q.stride(2) == k.stride(3) == v.stride(3) == idx.stride(2) == 1, "the last dimension must be contiguous"
    tile = blocks_of(Hq, H, D)
    block = block or block_size(B * H, K, tile["BLOCK_D"] * k.element_size(), q.device)
    splits = splits or split_count(B * H, K, block, q.device)
    part, lse = parts_of(q, splits)
    lists = [x.stride()[:2] if x.shape[1] > 1 else (x.stride(0), 0) for x in (idx, count)]  # one may serve all heads
    _gather_attention[(B * H, splits)](
        q, k, v, idx, count, part, lse,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *lists[0], *lists[1], H, K, splits,
        **tile, BLOCK_N=block, **options_of(tile, k.element_size()),
    )  # fmt: skip
    return part if lse is None else combine(part, lse, q.dtype)


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define("gather_attention(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor count) -> Tensor")
_lib.impl("gather_attention", on_cpu(launch, native.gather_attention), "CPU")
_lib.impl("gather_attention", lambda *args: launch(*args), "CUDA")
torch.library.register_fake("kv_fast::gather_attention", lambda q, k, v, idx, count: q.new_empty(q.shape), lib=_lib)


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    names = _gather_attention.arg_names
    tile = blocks_of(n_head, n_kv_head, head_dim)
    entries: list[Aot] = []
    for name, dtype, batch in (("gather", "bf16", 64), ("gather, batch 1", "bf16", 1), ("gather fp32", "fp32", 64)):
        itemsize = 4 if dtype == "fp32" else 2
        block = block_size(batch * n_kv_head, AOT_CHOSEN, tile["BLOCK_D"] * itemsize, torch.device("cpu"))
        constexprs: dict[str, Any] = tile | dict(BLOCK_N=block)
        types = dict.fromkeys(names, "i64:16") | dict.fromkeys(("q", "k", "v"), f"*{dtype}")
        types |= dict.fromkeys(("idx", "count"), "*i64") | dict.fromkeys(("part", "lse"), "*fp32")
        types |= dict.fromkeys(("count_row", "count_head", "H", "K", "S"), "i32")
        types |= dict.fromkeys(constexprs, "constexpr")
        entries.append((name, _gather_attention, types, constexprs, options_of(tile, itemsize)))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer that chooses one token in eight: bytes read and written in bf16, launches."""
    chosen, groups, device = length // 8, batch * n_kv_head, torch.device("cpu")
    block = block_size(groups, chosen, blocks_of(n_head, n_kv_head, head_dim)["BLOCK_D"] * 2, device)
    splits = split_count(groups, chosen, block, device)
    parts = 2 * 4 * batch * n_head * splits * (head_dim + 1) if splits > 1 else 0  # written, and read to combine them
    size = groups * chosen * (2 * head_dim * 2 + 8) + parts + 2 * batch * n_head * head_dim * 2
    return [dict(op="gather_attention, 1/8 of the tokens", bytes=size, launches=1 + (splits > 1))]
