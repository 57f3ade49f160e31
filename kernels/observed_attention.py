"""Attention that also returns its weights, by which evicting methods rank a cache's tokens.

A decode step reads keys once: logits go to a buffer, and become weights where the parts of a softmax are joined. Over a
prompt, the weights that make the output are the ones that are summed up: nothing is computed twice, and the weights
held at a time are bounded whatever the prompt's length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.dense_attention import prefill_attention
from kernels.op import operation, whole_vectors
from kernels.splits import COMBINE_D, block_size, blocks_of, split_count
from kernels.tiles import LOG2_E, dot, softmax_step, write_part
from kernels.tuned import tuned

# ---- prompts ----

QUERY_BLOCK = 256  # queries whose weights are held at a time: half of a block at the causal border is wasted
WEIGHTS = dict(cpu=1 << 22, gpu=1 << 25)  # most fp32 weights held: what a cache holds; enough for few launches


def prefill_attention_mass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    last: int | None,
    window: int | None = None,
    group: str = "sum",
) -> tuple[Tensor, Tensor]:
    """`prefill_attention` of right-padded prompts, and the attention mass that their tokens get.

    q [B, Hq, S, D], k and v [B, Hkv, S, D] (rotated), lengths [B] -> y [B, Hq, S, D] and mass fp32 [B, Hkv, S]: softmax
    weights summed over the `last` queries of each prompt (None: all of its queries) and over the group's query heads,
    or, where there is a `last`, the largest of these (group="max"); 0 past the prompt's end. `window` as in
    `prefill_attention`.
    """
    if last is None:
        assert group == "sum", "the attention of all queries is summed over a group's heads"
        return _attention_and_mass(q, k, v, lengths, window)
    return prefill_attention(q, k, v, window, lengths), last_mass(q, k, lengths, last, window, group)


def _most(x: Tensor) -> int:
    return WEIGHTS["cpu" if x.device.type == "cpu" else "gpu"]


def _steps(B: int, H: int, most: int, weights: int) -> list[tuple[slice, slice]]:
    """Rows and KV heads to take at a time, if `most` weights may be held and each head of a row has `weights`."""
    n = max(1, most // weights)
    heads, rows = min(n, H), max(1, n // H)
    return [(slice(b, b + rows), slice(h, h + heads)) for b in range(0, B, rows) for h in range(0, H, heads)]


def last_mass(
    q: Tensor, k: Tensor, lengths: Tensor, last: int, window: int | None = None, group: str = "sum"
) -> Tensor:
    """The mass of the last queries alone, as in `prefill_attention_mass`; in fp32 whatever the dtype of keys."""
    (B, Hq, S, D), H = q.shape, k.shape[1]
    W, t = min(last, S), torch.arange(S, device=q.device)
    at = lengths[:, None] - W + torch.arange(W, device=q.device)  # [B, W] positions; negative before the prompt
    seen = t <= at[..., None]  # [B, W, S]
    if window is not None:
        seen &= t > at[..., None] - window
    x = q.gather(2, at.clamp(min=0)[:, None, :, None].expand(B, Hq, W, D)).unflatten(1, (H, -1))  # [B, H, g, W, D]
    mass = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    for b, h in _steps(B, H, _most(q), Hq // H * W * S):
        logits = x[b, h].flatten(2, 3).float() @ k[b, h].float().mT * D**-0.5  # [B, H, g * W, S]
        p = logits.unflatten(2, (-1, W)).masked_fill_(~seen[b, None, None], float("-inf")).softmax(-1)
        each = p.masked_fill_((at[b] < 0)[:, None, None, :, None], 0).sum(3)  # [B, H, g, S]
        mass[b, h] = each.sum(2) if group == "sum" else each.amax(2)
    return mass


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, n, D] times k [B, H, S, D] -> fp32 [B, H, n, S]; in 16 bits logits would be rounded, or overflow."""
    if q.is_cuda and q.dtype != torch.float32:  # tensor cores
        return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32).view(*q.shape[:3], -1)
    return q.float() @ k.float().mT


def _attention_and_mass(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Output and mass by blocks of queries, each from the same weights, with keys up to the causal border only."""
    (B, Hq, S, D), H = q.shape, k.shape[1]
    g, window, most = Hq // H, window or S, _most(q)
    size = min(QUERY_BLOCK, S, max(16, most // (g * S)))
    t = torch.arange(S, device=q.device)
    real = t < lengths[:, None]  # [B, S]
    y, mass = torch.empty_like(q), torch.zeros(B, H, S, dtype=torch.float32, device=q.device)
    queries, out = q.unflatten(1, (H, g)), y.unflatten(1, (H, g))
    for b, h in _steps(B, H, most, g * size * S):
        # padding may hold NaN, which would come through at weight 0
        keys, values = (x[b, h].masked_fill(~real[b, None, :, None], 0).contiguous() for x in (k, v))
        for i in range(0, S, size):
            j, lo = min(i + size, S), max(0, i - window + 1)
            x = queries[b, h, :, i:j].masked_fill(~real[b, None, None, i:j, None], 0).flatten(2, 3)
            logits = (_products(x, keys[:, :, lo:j]) * D**-0.5).unflatten(2, (g, -1))  # [B, H, g, n, j - lo]
            rows, cols = t[i:j, None], t[lo:j]
            logits[..., i - lo :].masked_fill_(cols[i - lo :] > rows, float("-inf"))
            if lo or j > window:
                logits[..., : j - i].masked_fill_(cols[: j - i] <= rows - window, float("-inf"))
            p = logits.softmax(-1).flatten(2, 3)
            counted = real[b, None, None, i:j].expand(-1, 1, g, -1).flatten(2, 3).float()  # [B, 1, g * n]
            mass[b, h, lo:j] += (counted[:, :, None] @ p)[:, :, 0]
            out[b, h, :, i:j] = (p.to(values.dtype) @ values[:, :, lo:j]).unflatten(2, (g, -1))
    return y, mass


# ---- decode: Triton ----

NUM_STAGES = 3  # as in dense attention
JOIN_TILE = 2048  # logits of a program that turns them into weights


@triton.jit
def _observed_attention_parts(
    q, k, v, stop, logits, part, lse, q_strides, k_strides, v_strides, H, S, width,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): attention of the group's G query heads over its part of the filled slots."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    heads = (offs_g[:, None] < G) & (offs_d < D)
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=heads, other=0.0).to(k.dtype.element_ty)

    filled = tl.load(stop + pid_b).to(tl.int32)
    step = tl.cdiv(tl.cdiv(filled, S), BLOCK_N) * BLOCK_N
    lo = split * step
    hi = tl.minimum(filled, lo + step)
    k += pid_b * k_strides[0] + pid_h * k_strides[1]
    v += pid_b * v_strides[0] + pid_h * v_strides[1]
    logits += pid_bh * G * width
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(lo, hi, BLOCK_N):
        slot, inside = (first + offs_n).to(tl.int64), first + offs_n < hi
        real = inside[:, None] & (offs_d < D)  # other slots may hold NaN: not even their values are loaded
        b_k = tl.load(k + slot[:, None] * k_strides[2] + offs_d, mask=real, other=0.0)
        b_v = tl.load(v + slot[:, None] * v_strides[2] + offs_d, mask=real, other=0.0)
        logit = dot(b_q, tl.trans(b_k)) * (D**-0.5 * LOG2_E)
        tl.store(logits + offs_g[:, None] * width + first + offs_n, logit, mask=(offs_g[:, None] < G) & inside)
        m_i, l_i, acc = softmax_step(logit, inside, b_v, m_i, l_i, acc)
    write_part(m_i, l_i, acc, part, lse, pid_bh * G + offs_g, offs_g, split, S, G, D, BLOCK_D)


@triton.jit
def _join(
    logits, part, lse, stop, y, weights, H, S, N, width,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block, row and KV head): weights of the slots' block, and the output of the channels' block."""
    pid_bh, pid_n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    offs_g, offs_s, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    filled = tl.load(stop + pid_bh // H)
    sums = tl.load(
        lse + (pid_bh * G + offs_g[:, None]) * S + offs_s,
        mask=(offs_g[:, None] < G) & (offs_s < S),
        other=float("-inf"),
    )
    m_i = tl.max(sums, 1)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    whole = m_i + tl.log2(tl.maximum(tl.sum(tl.exp2(sums - m_i[:, None]), 1), 1e-30))
    seen = (offs_g[:, None] < G) & (offs_n < filled)
    logit = tl.load(logits + (pid_bh * G + offs_g[:, None]) * width + offs_n, mask=seen, other=float("-inf"))
    tl.store(weights + pid_bh * N + offs_n, tl.sum(tl.exp2(logit - whole[:, None]), 0), mask=offs_n < N)

    CHANNELS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    if pid_n < G * CHANNELS:
        head, offs_d = pid_bh * G + pid_n // CHANNELS, pid_n % CHANNELS * BLOCK_D + tl.arange(0, BLOCK_D)
        weight = tl.load(lse + head * S + offs_s, mask=offs_s < S, other=float("-inf"))
        b_o = tl.load(
            part + (head * S + offs_s[:, None]) * D + offs_d, mask=(offs_s[:, None] < S) & (offs_d < D), other=0.0
        )
        most = tl.max(weight)
        weight = tl.exp2(weight - tl.where(most == float("-inf"), 0.0, most))
        mean = tl.sum(b_o * weight[:, None], 0) / tl.maximum(tl.sum(weight), 1e-30)
        tl.store(y + head * D + offs_d, mean.to(y.dtype.element_ty), mask=offs_d < D)


def join_config(G: int, D: int, splits: int) -> dict[str, int]:
    """Constants of `_join`."""
    heads = triton.next_power_of_2(G)
    block = max(64, JOIN_TILE // heads)
    return dict(G=G, D=D, BLOCK_G=heads, BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=COMBINE_D, BLOCK_N=block)


def parts_options(tile: dict[str, int], itemsize: int) -> dict[str, int]:
    """More warps if the query heads, which every warp holds, take too many registers for four."""
    return dict(num_warps=4 if tile["BLOCK_G"] * tile["BLOCK_D"] * itemsize < 8192 else 8, num_stages=NUM_STAGES)


JOIN_OPTIONS = dict(num_warps=4, num_stages=1)


def launch(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, block: int | None = None, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """The Triton version of `observed_attention`; tests give block (a power of two >= 16) and splits."""
    (B, Hq, D), (H, N) = q.shape, k.shape[1:3]
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1, "channels must be contiguous"
    tile = blocks_of(Hq, H, D)
    block = block or block_size(B * H, N, tile["BLOCK_D"] * k.element_size(), q.device)
    options = tuned("_observed_attention_parts", BLOCK_N=block, **parts_options(tile, k.element_size()))
    splits = splits or split_count(B * H, N, options["BLOCK_N"], q.device)
    width = -(-N // 16) * 16  # whole vectors are stored and loaded
    logits, part, lse = (
        torch.empty(B, Hq, *size, dtype=torch.float32, device=q.device) for size in ((width,), (splits, D), (splits,))
    )
    y = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    weights = torch.empty(B, H, N, dtype=torch.float32, device=q.device)
    stop = stop.contiguous()
    _observed_attention_parts[(B * H, splits)](
        q, k, v, stop, logits, part, lse, q.stride(), k.stride(), v.stride(), H, splits, width,
        **tile, **options,
    )  # fmt: skip
    join = join_config(Hq // H, D, splits)
    grid = (max(triton.cdiv(N, join["BLOCK_N"]), Hq // H * triton.cdiv(D, COMBINE_D)), B * H)
    _join[grid](logits, part, lse, stop, y, weights, H, splits, N, width, **join, **tuned("_join", **JOIN_OPTIONS))
    return y, weights


# ---- decode: the operation ----


def _outputs(q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(len(q), *k.shape[1:3], dtype=torch.float32)


@operation(cpp=whole_vectors, fake=_outputs, opaque=True)
def observed_attention(q: Tensor, k: Tensor, v: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """One query per row over slots t < stop of its row, and each slot's softmax weight summed over a group's heads.

    q [B, Hq, D], k and v [>= B, Hkv, N, D] (rotated), stop [B] int64, at least 1 -> y [B, Hq, D] and weights fp32
    [B, Hkv, N], 0 at slots >= stop, which may hold anything. Scale 1/sqrt(D).
    """
    # on a CPU up to the last slot that any row has filled; on a GPU no length may reach the host
    (B, Hq, D), (H, N) = q.shape, k.shape[1:3]
    ends = stop.tolist() if q.device.type == "cpu" else []
    n = max(ends, default=N)
    keys, values = k[:B, :, :n].float(), v[:B, :, :n].float()
    empty = torch.arange(n, device=q.device) >= stop[:, None]  # [B, n]
    if min(ends, default=0) < n:
        values = values.masked_fill(empty[:, None, :, None], 0)  # 0 * NaN is NaN
    logits = q.reshape(B, H, -1, D).float() @ keys.mT * D**-0.5  # [B, H, g, n]
    p = logits.masked_fill(empty[:, None, None], float("-inf")).softmax(-1)
    y = (p @ values).to(q.dtype).view(B, Hq, D)
    return y, F.pad(p.sum(2), (0, N - n))


observed_attention.triton(launch)
