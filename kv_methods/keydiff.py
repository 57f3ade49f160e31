"""KeyDiff: keep the keys that are least like the mean key, since distinctive keys get the most attention.

A token's score is minus the cosine of its key with the anchor, the mean of the keys' directions. No attention weights
are needed, so a prompt may come in blocks, after each of which no more than the budget is held (the paper's setting:
--prefill-chunk 128). While decoding, the anchor is that of the keys that are held, and moves with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.base import knob, rows
from cache.evicting import Evicting
from kernels.distinct_keys import distinct_keys


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
        return distinct_keys(k, lengths)

    def append(self, k, v, pos):
        """Evict the lowest score among the tokens held, scored anew against their current anchor."""
        rows(self.score, len(k)).copy_(distinct_keys(self.k, rows(self.filled, len(k))))
        super().append(k, v, pos)

    def traffic(self, pos):
        """Keys are also read to be scored."""
        s, tokens = self.shape, int(self.num_kept(torch.tensor([pos + 1])))
        return super().traffic(pos) + s.max_batch * s.n_kv_head * tokens * s.head_dim * s.dtype.itemsize
