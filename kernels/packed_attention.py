"""Attention of one query per row over the first slots of a packed cache and one token that stands for many.

The torch versions here are the reference for every kernel that computes the same thing. `packed_attention` is a
registered operator, as `decode_attention` is: a compiled graph calls it with fixed shapes while it reads filled slots
alone. Its Triton kernels are those of `decode_attention`: programs are shared out by the real lengths of rows, and of
heads if they differ. The program that reads a head's first slots adds the extra token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.dense_attention import split_attention
from kernels.op import nbytes, operation, whole_vectors


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

    q [B, Hq, D], k and v [>= B, Hkv, C, D] (rotated), stop [B] or, where heads differ, [B, Hkv] int64 >= 1; mean_k and
    mean_v [>= B, Hkv, D] fp32 and count of stop's shape int64, together or not at all -> [B, Hq, D]. Scale 1/sqrt(D).
    The extra token counts as `count` tokens of the same key and value (Eq. 5): log(count) is added to its scaled logit.
    Where count is 0 there is none, and mean_k and mean_v may hold anything, as may slots from stop on.
    """
    if stop.dim() == 2:  # every head becomes a row of its own
        B, H = stop.shape
        k, v = (x[:B].flatten(0, 1)[:, None] for x in (k, v))
        mean_k, mean_v = (None if x is None else x[:B].flatten(0, 1)[:, None] for x in (mean_k, mean_v))
        count = None if count is None else count.flatten()
        rows = q.reshape(B * H, -1, q.shape[2])
        return packed_attention(rows, k, v, stop.flatten(), mean_k, mean_v, count).view(q.shape)
    return _packed_attention(q, k, v, stop, mean_k, mean_v, count)


@operation(
    cpp=whole_vectors,
    opaque=True,
)
def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    return (_packed_attention_cpu if q.device.type == "cpu" else _packed_attention_masked)(
        q, k, v, stop, mean_k, mean_v, count
    )


@_packed_attention.triton
def _(q: Tensor, k: Tensor, v: Tensor, stop: Tensor, *mean: Any) -> Tensor:
    return split_attention(q, k, v, stop, mean=None if mean[2] is None else mean)


@operation(
    fake=lambda cache, slot, x: cache.new_empty(x.shape),
    opaque=True,
    mutates=("cache",),
    reads=lambda cache, slot, x: dict(cache=nbytes(x)),
)
def replace_token(cache: Tensor, slot: Tensor, x: Tensor) -> Tensor:
    """In place, put x [B, H, D] into slot [B] of cache [>= B, H, C, D] -> what was there before, [B, H, D].

    An operator, because a compiled graph that reads a slot before it writes it copies the whole cache, at every step.
    """
    row = torch.arange(len(slot), device=slot.device)
    old = cache[row, :, slot]
    cache[row, :, slot] = x
    return old


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None, mask: Tensor
) -> Tensor:
    """Attention over k and v [B, Hkv, n, D] where mask [B, n] is True; the rest as in `packed_attention`."""
    B, Hq, D = q.shape
    n, scale = k.shape[2], D**-0.5
    grouped = q.reshape(B, k.shape[1], -1, D).float()
    logits = grouped @ k.float().mT * scale  # [B, Hkv, g, n]
    logits = torch.where(mask[:, None, None], logits, float("-inf"))
    v = v.masked_fill(~mask[:, None, :, None], 0)  # 0 * NaN is NaN
    if mean_k is None or mean_v is None or count is None:
        return (logits.softmax(-1).to(v.dtype) @ v).reshape(B, Hq, D)
    some = (count > 0).view(B, 1, 1, 1)
    extra = (grouped * mean_k[:B, :, None]).sum(-1, keepdim=True) * scale + count.log().view(B, 1, 1, 1)
    logits = torch.cat((logits, torch.where(some, extra, float("-inf"))), -1)
    p = logits.softmax(-1)
    y = (p[..., :n].to(v.dtype) @ v).float() + p[..., n:] * torch.where(some, mean_v[:B, :, None], 0)
    return y.to(q.dtype).reshape(B, Hq, D)


def _attend_filled(
    q: Tensor, k: Tensor, v: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    """`_attend` without a mask, by the kernel behind SDPA on a CPU, which also returns its softmax's log-sum-exp."""
    B, Hq, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, D)
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, k, v)
    if mean_k is None or mean_v is None or count is None:
        return y.reshape(B, Hq, D)
    some = (count > 0).view(B, 1, 1)
    extra = (grouped.float() * mean_k[:B, :, None]).sum(-1) * D**-0.5 + count.log().view(B, 1, 1)  # [B, Hkv, g]
    weight = torch.where(some, (extra - lse).sigmoid(), 0)[..., None]  # of the extra token, e^extra / (e^extra + e^lse)
    y = y.float() * (1 - weight) + torch.where(some[..., None], mean_v[:B, :, None], 0) * weight
    return y.to(q.dtype).reshape(B, Hq, D)


def _packed_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    """Read filled slots only: in one call if all rows have the same, otherwise row by row."""
    ends = stop.tolist()
    if len(set(ends)) == 1:
        return _attend_filled(q, k[: len(q), :, : ends[0]], v[: len(q), :, : ends[0]], mean_k, mean_v, count)
    out = []
    for b, n in enumerate(ends):
        extra = (None if t is None else t[b : b + 1] for t in (mean_k, mean_v, count))
        out.append(_attend_filled(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], *extra))
    return torch.cat(out)


def _packed_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, stop: Tensor, mean_k: Tensor | None, mean_v: Tensor | None, count: Tensor | None
) -> Tensor:
    """On a GPU no length may reach the host: every slot is read and masked."""
    mask = torch.arange(k.shape[2], device=q.device) < stop[:, None]
    return _attend(q, k[: len(q)], v[: len(q)], mean_k, mean_v, count, mask)
