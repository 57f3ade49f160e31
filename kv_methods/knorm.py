"""Knorm: keep the keys of the smallest norm, which tend to get the most attention.

A token's score is minus the L2 norm of its key. It needs no query and no attention, and never changes. Keys of the
first two layers do not show this, so these keep everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.base import knob
from cache.evicting import Evicting


class Knorm(Evicting):
    paper = "Devoto, Zhao et al. 2024, A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
    stress = dict(budget=24)
    skip_layers = (0, 1)
    lookback = 0
    reads_queries = False
    evicts_while_reading = True

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(0.5, "tokens kept, or their share (Knorm: half, with no loss in language modelling)")
        recent: int = knob(0, "newest tokens never evicted (Knorm: none)", low=0)

    def prompt_scores(self, q, k, v, mass, lengths):
        return self.token_score(k)

    def token_score(self, k):
        return -k.float().norm(dim=-1)
