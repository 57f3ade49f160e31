"""How many tokens a share p of the attention takes: the fewest of the largest weights that sum to it (Twilight).

The kernel does not sort: weights are not negative, so their bits as integers have the same order, and the lowest weight
that is taken is found by bisection of its bits, in 31 steps that sum the weights not below the middle. Ties at that
weight are counted by a division. A row is one program, which reads it again at every step: it stays in L2. Selecting
that many tokens is in kernels/select.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation
from kernels.tuned import tuned

BLOCK, WARPS = 4096, 8  # weights summed at a time: 16 a thread


@operation(
    cpp=True,
    fake=lambda weights, *_: weights.new_empty(weights.shape[:2], dtype=torch.int64),
)
def top_p_count(weights: Tensor, pos: Tensor, p: float, sinks: int = 0, recent: int = 0) -> Tensor:
    """The fewest tokens whose weights sum to p or more, the first `sinks` and the last `recent` always among them.

    weights fp32 [B, H, T] >= 0, each row summing to 1 over slots 0 to pos [B]; later slots may hold anything -> int64
    [B, H], at most pos + 1. p = 1 takes all. Where a sum comes within fp32's rounding of p, versions may differ by one.
    """
    t, n = torch.arange(weights.shape[2], device=weights.device), (pos + 1).clamp(max=weights.shape[2])[:, None]
    there = (t < n)[:, None]
    forced = ((t < sinks) | (t >= n - recent))[:, None] & there
    if p >= 1:
        return n.expand(weights.shape[:2]).contiguous()
    held = torch.where(forced, weights, 0).sum(-1, dtype=torch.float64)
    free = torch.where(there & ~forced, weights, 0).sort(-1, descending=True).values.double()
    before = held[..., None] + free.cumsum(-1) - free  # a token is needed if less than p is taken before it
    return (forced.sum(-1) + (before < p).sum(-1)).minimum(n)


@operation(
    cpp=lambda logits, pos: logits.dtype == torch.float32,
    fake=lambda logits, pos: logits.new_empty(*logits.shape[:2], logits.shape[3]),
)
def group_weights(logits: Tensor, pos: Tensor) -> Tensor:
    """Softmax of each query over slots 0 to pos [B] >= 0, averaged over its group, and 0 for later slots, whose logits
    may be anything: logits fp32 [B, H, G, T] -> fp32 [B, H, T]."""
    filled = torch.arange(logits.shape[3], device=pos.device) <= pos[:, None]
    return torch.where(filled[:, None, None], logits, float("-inf")).softmax(-1).mean(2)


# ---- Triton ----


@triton.jit
def _top_p(weights, pos, count, weights_strides, H, T, sinks, recent, p, BLOCK: tl.constexpr):
    """Program (row and head)."""
    pid_b, pid_h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    seq_len = tl.minimum(tl.load(pos + pid_b) + 1, T).to(tl.int32)
    weights += pid_b * weights_strides[0] + pid_h * weights_strides[1]
    offs_n = tl.arange(0, BLOCK)
    held, sure = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, seq_len, BLOCK):
        offs_t = first + offs_n
        forced = ((offs_t < sinks) | (offs_t >= seq_len - recent)) & (offs_t < seq_len)
        held += tl.where(forced, tl.load(weights + offs_t, mask=offs_t < seq_len, other=0.0), 0.0)
        sure += forced.to(tl.int32)
    need, taken = p - tl.sum(held), tl.sum(sure)
    # the weights not below lo sum to `need` or more, those not below hi to less
    lo, hi, above, many, among = 0, 0x7F800000, 0.0, 0, seq_len  # among: the number of those not below lo
    while hi > lo + 1:
        middle = lo + ((hi - lo) >> 1)
        mass, number = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
        for first in range(0, seq_len, BLOCK):
            offs_t = first + offs_n
            weight = tl.load(
                weights + offs_t, mask=(offs_t < seq_len) & (offs_t >= sinks) & (offs_t < seq_len - recent), other=0.0
            )
            inside = weight.to(tl.int32, bitcast=True) >= middle
            mass += tl.where(inside, weight, 0.0)
            number += inside.to(tl.int32)
        total, found = tl.sum(mass), tl.sum(number)
        enough = total >= need
        lo, among = tl.where(enough, middle, lo), tl.where(enough, found, among)
        hi, above, many = tl.where(enough, hi, middle), tl.where(enough, above, total), tl.where(enough, many, found)
    lowest = lo.to(tl.float32, bitcast=True)  # type: ignore[attr-defined]
    # not more than there are: a tiny weight may be less than the rounding of the sums
    equal = tl.minimum(tl.ceil(tl.minimum((need - above) / tl.maximum(lowest, 1e-38), 1e9)).to(tl.int32), among - many)
    # a lowest weight of 0 means that all together stay below p
    more = tl.where(lo > 0, many + tl.maximum(equal, 1), seq_len)
    taken += tl.where(need > 0, more, 0)
    tl.store(count + tl.program_id(0), tl.minimum(taken, tl.maximum(seq_len, 0)).to(tl.int64))


@top_p_count.triton
def launch(weights: Tensor, pos: Tensor, p: float, sinks: int, recent: int, block: int = BLOCK) -> Tensor:
    """The Triton version of `top_p_count`; tests give weights per block."""
    B, H, T = weights.shape
    weights = weights if weights.stride(2) == 1 else weights.contiguous()
    if p >= 1:
        return (pos + 1).clamp(max=T)[:, None].expand(B, H).contiguous()
    count = torch.empty(B, H, dtype=torch.int64, device=weights.device)
    _top_p[(B * H,)](
        weights, pos.contiguous(), count, weights.stride(), H, T, sinks, recent, p,
        **tuned("_top_p", BLOCK=block, num_warps=WARPS),
    )  # fmt: skip
    return count
