"""Selection of tokens: exact top-k under a mask, and SnapKV's scores of a prompt by its last queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def topk_select(scores: Tensor, mask: Tensor, k: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` highest-scoring allowed slots of every row and head, highest first.

    scores [B, H, T], mask [B, 1 or H, T] bool, True = may be chosen; k static slots, count [B, H] wanted of them
    -> idx [B, H, k] int64, count [B, H] clamped to what is allowed and to k. Entries past the count point anywhere.
    """
    scores = torch.where(mask, scores, float("-inf"))
    idx = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    allowed = mask.expand_as(scores).sum(-1)
    return idx, torch.minimum(count, allowed).clamp(max=idx.shape[-1])


def budget_select(
    scores: Tensor, pos: Tensor, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0
) -> tuple[Tensor, Tensor]:
    """The `wanted` highest-scoring tokens of each row and head, the first `sinks` and last `recent` ones forced in.

    scores [B, H, T], slot t holding the token at position t; pos [B] of the newest token; wanted [B] in all, raised to
    what is forced in; k static slots -> idx [B, H, k] int64, count [B, H]. Entries past the count point anywhere.
    """
    t = torch.arange(scores.shape[-1], device=scores.device)
    forced = (t < sinks) | (t > pos[:, None] - recent)
    filled = t <= pos[:, None]
    scores = torch.where(forced[:, None], float("inf"), scores)
    wanted = torch.maximum(wanted, (sinks + recent * torch.ones_like(pos)).minimum(pos + 1))
    return topk_select(scores, filled[:, None], k, wanted[:, None].expand(scores.shape[:2]))


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
