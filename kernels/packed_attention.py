"""Attention of one query per row over the first slots of a packed cache and one token that stands for many.

The torch versions here are the reference for every kernel that computes the same thing. `packed_attention` is a
registered operator, as `decode_attention` is: a compiled graph calls it with fixed shapes while it reads filled slots
alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define(
    "packed_attention(Tensor q, Tensor k, Tensor v, Tensor stop, "
    "Tensor? mean_k, Tensor? mean_v, Tensor? count) -> Tensor"
)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stop: Tensor,
    mean_k: Tensor | None = None,
    mean_v: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Softmax attention over slots t < stop of each row and, with weight `count`, over one more token (RazorAttention).

    q [B, Hq, D], k and v [>= B, Hkv, C, D] (rotated), stop [B] int64 >= 1; mean_k and mean_v [>= B, Hkv, D] fp32 and
    count [B] int64, together or not at all -> [B, Hq, D]. Scale 1/sqrt(D). The extra token counts as `count` tokens of
    the same key and value (Eq. 5): log(count) is added to its scaled logit. Where count is 0 there is none, and what
    mean_k and mean_v hold does not matter; slots from stop on may hold anything, too.
    """
    return torch.ops.kv_fast.packed_attention(q, k, v, stop, mean_k, mean_v, count)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None, mask=None
) -> Tensor:
    """All of k and v [B, Hkv, n, D], or where mask [B, n] is True; the rest as in `packed_attention`."""
    B, Hq, D = q.shape
    n, scale = k.shape[2], D**-0.5
    grouped = q.reshape(B, k.shape[1], -1, D)
    logits = (grouped @ k.transpose(2, 3)).float() * scale  # [B, Hkv, g, n]
    if mask is not None:
        logits = torch.where(mask[:, None, None], logits, float("-inf"))
        v = v.masked_fill(~mask[:, None, :, None], 0)  # 0 * NaN is NaN
    if mean_k is None or mean_v is None or count is None:
        return (logits.softmax(-1).to(v.dtype) @ v).reshape(B, Hq, D)
    some = (count > 0).view(B, 1, 1, 1)
    extra = (grouped.float() * mean_k[:B, :, None]).sum(-1, keepdim=True) * scale + count.log().view(B, 1, 1, 1)
    logits = torch.cat((logits, torch.where(some, extra, float("-inf"))), -1)
    p = logits.softmax(-1)
    y = (p[..., :n].to(v.dtype) @ v).float() + p[..., n:] * torch.where(some, mean_v[:B, :, None], 0)
    return y.to(q.dtype).reshape(B, Hq, D)


def _packed_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    """Reads filled slots only: rows that agree on them in one call, others row by row."""
    ends = stop.tolist()
    if len(set(ends)) == 1:
        return _attend(q, k[: len(q), :, : ends[0]], v[: len(q), :, : ends[0]], mean_k, mean_v, count)
    out = []
    for b, n in enumerate(ends):
        extra = (None if t is None else t[b : b + 1] for t in (mean_k, mean_v, count))
        out.append(_attend(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], *extra))
    return torch.cat(out)


def _packed_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    """On other devices no length may reach the host: every slot is read and masked."""
    mask = torch.arange(k.shape[2], device=q.device) < stop[:, None]
    return _attend(q, k[: len(q)], v[: len(q)], mean_k, mean_v, count, mask)


_lib.impl("packed_attention", _packed_attention_cpu, "CPU")
_lib.impl("packed_attention", _packed_attention_masked, "CUDA")
torch.library.register_fake(
    "kv_fast::packed_attention", lambda q, k, v, stop, mean_k, mean_v, count: q.new_empty(q.shape), lib=_lib
)
