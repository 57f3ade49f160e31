"""Exact attention: causal over a prompt (prefill), and one query per row over the filled slots of a cache (decode).

The torch versions here are the reference for every kernel that computes the same thing. `decode_attention` is a
registered operator, so that a compiled graph calls it with fixed shapes while it reads filled slots alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 1024  # queries per call under a sliding window: bounds the mask to QUERY_BLOCK x (QUERY_BLOCK + window)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of a prompt over itself; `window` keeps the last `window` keys, the query's own included.

    q [B, Hq, S, D], k and v [B, Hkv, S, D] (rotated) -> [B, Hq, S, D]. Scale 1/sqrt(D). K and V are not repeated.
    """
    S, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or window >= S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    out = torch.empty_like(q)
    for i in range(0, S, QUERY_BLOCK):
        j, lo = min(i + QUERY_BLOCK, S), max(0, i - window + 1)
        rows, cols = torch.arange(i, j, device=q.device)[:, None], torch.arange(lo, j, device=q.device)[None]
        mask = (cols <= rows) & (cols > rows - window)
        out[:, :, i:j] = F.scaled_dot_product_attention(
            q[:, :, i:j], k[:, :, lo:j], v[:, :, lo:j], attn_mask=mask, enable_gqa=grouped
        )
    return out


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query per row over T slots, some of which are masked and may hold anything, NaN included. Softmax in fp32.

    q [B, Hq, D], k and v [B, Hkv, T, D] (rotated), mask [B, 1 or Hkv, T] bool, True = attend -> [B, Hq, D].
    """
    B, Hq, D = q.shape
    Hkv = k.shape[1]
    scores = q.view(B, Hkv, Hq // Hkv, D) @ k.transpose(2, 3)  # [B, Hkv, g, T]
    scores = torch.where(mask[:, :, None], scores.float() * D**-0.5, float("-inf"))
    # 0 * NaN is NaN: values of masked slots must not reach the product
    y = scores.softmax(-1).to(v.dtype) @ v.masked_fill(~mask[..., None], 0)
    return y.view(B, Hq, D)


_lib = torch.library.Library("kv_fast", "DEF")
_lib.define("decode_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor stop) -> Tensor")


def decode_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """One query per row over slots start <= t < stop of its row.

    q [B, Hq, D], k and v [B, Hkv, T, D] (rotated), start and stop [B] int64 -> [B, Hq, D]. Scale 1/sqrt(D).
    """
    return torch.ops.kv_fast.decode_attention(q, k, v, start, stop)


def _decode_attention_cpu(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Reads filled slots only: rows that agree on them in one call, others row by row."""
    B, Hq, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, D)  # the group's queries stand where SDPA expects query positions
    spans = list(zip(start.tolist(), stop.tolist(), strict=True))
    if len(set(spans)) == 1:
        lo, hi = spans[0]
        return F.scaled_dot_product_attention(grouped, k[:B, :, lo:hi], v[:B, :, lo:hi]).reshape(B, Hq, D)
    rows = [
        F.scaled_dot_product_attention(grouped[b : b + 1], k[b : b + 1, :, lo:hi], v[b : b + 1, :, lo:hi])
        for b, (lo, hi) in enumerate(spans)
    ]
    return torch.cat(rows).reshape(B, Hq, D)


def _decode_attention_masked(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """On other devices no length may reach the host: every slot is read and masked."""
    t = torch.arange(k.shape[2], device=q.device)
    mask = (t >= start[:, None]) & (t < stop[:, None])
    return masked_attention(q, k[: len(q)], v[: len(q)], mask[:, None])


_lib.impl("decode_attention", _decode_attention_cpu, "CPU")
_lib.impl("decode_attention", _decode_attention_masked, "CUDA")
torch.library.register_fake("kv_fast::decode_attention", lambda q, k, v, start, stop: torch.empty_like(q), lib=_lib)
