"""Attention of one query per row over gathered tokens: each KV head has its own list of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dense_attention import masked_attention


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
    chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]
    return masked_attention(q, gather_rows(k, idx), gather_rows(v, idx), chosen)
