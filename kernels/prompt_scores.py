"""Scores of a prompt's tokens by the attention that its last queries pay to them, and the choice of the best."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.observed_attention import last_mass


def snapkv_scores(q: Tensor, k: Tensor, lengths: Tensor, window: int = 32, pool: int = 7) -> Tensor:
    """Attention mass that the last `window` queries of each prompt give its tokens (SnapKV, Li et al. 2024).

    q [B, Hq, S, D], k [B, Hkv, S, D] rotated, lengths [B] -> fp32 [B, Hkv, S]: softmax, summed over the queries and
    the group's heads, max-pooled over `pool` neighbours; -inf past the prompt's end.
    """
    mass = pooled(last_mass(q, k, lengths, window), pool)
    t = torch.arange(k.shape[2], device=k.device)
    return mass.masked_fill((t >= lengths[:, None])[:, None], float("-inf"))


def pooled(mass: Tensor, kernel: int, pool: str = "max") -> Tensor:
    """The largest ("max") or the mean ("avg") of `kernel` neighbours, an odd number: [B, H, S] >= 0 -> [B, H, S].

    Neighbours outside the prompt count as 0, in the mean too.
    """
    reduce = F.max_pool1d if pool == "max" else F.avg_pool1d
    return mass if kernel == 1 else reduce(mass, kernel, stride=1, padding=kernel // 2)


def best_tokens(scores: Tensor, n: int) -> Tensor:
    """The n tokens with the highest scores, best first: [..., S] -> int64 [..., min(n, S)].

    Pooling makes equal scores: of these, a stable sort takes the first ones, however far a batch is padded.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]


def newest_first(scores: Tensor, newest: Tensor) -> Tensor:
    """Scores by which the newest tokens, where newest says so, come before all others: those of infinity, too."""
    return scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(newest, float("inf"))


def best_in_order(scores: Tensor, n: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """The best count [B] <= n tokens of each row in the order of the text: scores [B, S] -> int64 [B, n], and which of
    these are valid, the first count: bool [B, n]."""
    S, ranked = scores.shape[1], best_tokens(scores, n)
    there = torch.arange(ranked.shape[1], device=scores.device) < count[:, None]
    return torch.where(there, ranked, S).sort(-1).values.clamp(max=S - 1), there
