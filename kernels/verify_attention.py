"""Exact attention of a few consecutive tokens over a cache that holds them, by which drafts are checked.

The attention of one token is bound by the bytes of K and V, and so is that of a few: every key and value is read once
for all tokens and all query heads of a group. The kernels are those of `decode_attention`, with each token's query as a
query head of its own, whose slots end one later than those of the token before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dense_attention import attend_where, split_attention
from kernels.op import operation, whole_vectors

MOST = 64  # query heads times tokens of a Triton program: beyond, registers spill


@operation(cpp=whole_vectors, opaque=True)
def verify_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    """n tokens per row, causal among themselves: the last one sees the slots before its row's stop, the one before it
    one slot less. start: where the first one's slots begin, below 0 if before the text, the next one's a slot later;
    None: all begin at 0.

    q [B, Hq, n, D], k and v [B, Hkv, T, D] (rotated), start and stop [B] int64 -> [B, Hq, n, D]. Scale 1/sqrt(D).
    """
    t, i = torch.arange(k.shape[2], device=q.device), torch.arange(q.shape[2], device=q.device)[:, None]
    seen = t < (stop[:, None] - q.shape[2] + 1)[..., None] + i
    if start is not None:
        seen &= t >= start[:, None, None] + i
    filled = seen.any(1)[:, None, :, None]  # other slots may hold NaN
    keys, values = (x[: len(q)].masked_fill(~filled, 0) for x in (k, v))
    return attend_where(q, keys, values, seen)


@verify_attention.triton
def _split(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor) -> Tensor:
    """Run in parts of as many tokens as a program holds; each part reads K and V."""
    n, parts = q.shape[2], []
    most = max(1, MOST * k.shape[1] // q.shape[1])
    for i in range(0, n, most):
        part = q[:, :, i : i + most]
        m = part.shape[2]
        ends = stop - (n - i - m), None if start is None else start + i
        parts.append(split_attention(part.flatten(1, 2), k, v, *ends, tokens=m).unflatten(1, (-1, m)))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
