"""KeyDiff: keep the keys that are least like the mean key, since distinctive keys get the most attention.

A token's score is minus the cosine of its key with the anchor, the mean of the keys' directions. No attention weights
are needed, so a prompt may come in blocks, after each of which no more than the budget is held (the paper's setting:
--prefill-chunk 128). While decoding, the anchor is that of the keys that are held, and moves with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.base import knob
from cache.evicting import Evicting


def distinct(k: Tensor, there: Tensor) -> Tensor:
    """Minus the cosine of each key with the anchor: k [B, H, N, D], of which `there` [B, N] count -> fp32 [B, H, N]."""
    directions = F.normalize(k.float().masked_fill(~there[:, None, :, None], 0), dim=-1)
    return -(directions @ F.normalize(directions.sum(2), dim=-1)[..., None])[..., 0]


class KeyDiff(Evicting):
    paper = "Park, Jones et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference"
    stress = dict(budget=24)
    lookback = 0
    reads_queries = False
    evicts_while_reading = True
    deviates = frozenset({"rereads"})

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(2048, "tokens kept, or their share of the length (KeyDiff: 8K of LongBench's texts)")
        recent: int = knob(0, "newest tokens never evicted (KeyDiff: none; its sliding-window variant: some)", low=0)

    def prompt_scores(self, q, k, v, mass, lengths):
        return distinct(k, torch.arange(k.shape[2], device=k.device) < lengths[:, None])

    def append(self, k, v, pos):
        """Evict the lowest score among the tokens held, scored anew against their current anchor."""
        B, slot = len(k), torch.arange(self.k.shape[2], device=k.device)
        self.score[:B] = distinct(self.k[:B], slot < self.filled[:B, None])
        super().append(k, v, pos)

    def traffic(self, pos):
        """Keys are also read to be scored."""
        s, tokens = self.shape, int(self.num_kept(torch.tensor([pos + 1])))
        return super().traffic(pos) + s.max_batch * s.n_kv_head * tokens * s.head_dim * s.dtype.itemsize
