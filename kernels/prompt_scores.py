"""Scores of a prompt's tokens by the attention that its last queries pay to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def snapkv_scores(q: Tensor, k: Tensor, lengths: Tensor, window: int = 32, pool: int = 7) -> Tensor:
    """Attention mass that the last `window` queries of each prompt give its tokens (SnapKV, Li et al. 2024, Sec. 4).

    q [B, Hq, S, D], k [B, Hkv, S, D] rotated, lengths [B] -> fp32 [B, Hkv, S]: softmax, summed over the queries and
    the group's heads, max-pooled over `pool` neighbours; -inf past the prompt's end.
    """
    B, Hq, S, D = q.shape
    Hkv = k.shape[1]
    at = lengths[:, None] - window + torch.arange(window, device=q.device)  # [B, W] positions of the last queries
    last = q.gather(2, at.clamp(min=0)[:, None, :, None].expand(B, Hq, window, D))
    t = torch.arange(S, device=q.device)
    seen = t <= at[..., None]  # causal; a negative position (prompt shorter than the window) sees nothing
    logits = last.view(B, Hkv, -1, D).float() @ k.float().transpose(2, 3) * D**-0.5  # [B, Hkv, g * W, S]
    logits = logits.view(B, Hkv, -1, window, S).masked_fill(~seen[:, None, None], float("-inf"))
    mass = logits.softmax(-1).nan_to_num(0).sum((2, 3))  # [B, Hkv, S]
    if pool > 1:
        mass = F.max_pool1d(mass, pool, stride=1, padding=pool // 2)
    return mass.masked_fill((t >= lengths[:, None])[:, None], float("-inf"))


def best_tokens(scores: Tensor, n: int) -> Tensor:
    """The n tokens of the highest scores, best first: [..., S] -> int64 [..., min(n, S)].

    Pooling makes equal scores: a stable sort takes the same tokens of them, the first, however far a batch is padded.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]


def best_in_order(scores: Tensor, n: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """The best count [B] <= n tokens of each row in the order of the text: scores [B, S] -> int64 [B, n], and which of
    these are there, the first count: bool [B, n]."""
    S, ranked = scores.shape[1], best_tokens(scores, n)
    there = torch.arange(ranked.shape[1], device=scores.device) < count[:, None]
    return torch.where(there, ranked, S).sort(-1).values.clamp(max=S - 1), there
