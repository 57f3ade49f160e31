"""Q-Filters: keep the keys that lie furthest along the direction in which their head's queries lie.

Queries and keys of a head are spread along one shared direction, so the projection of a key on the queries' principal
direction estimates its mean attention over all queries. The direction of each query head comes from a pass over text
(calibrate.py); those of a group are averaged. A token's score needs no attention and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.evicting import Evicting
from cache.statistic import Statistic, principal


class QueryDirections(Statistic):
    """The first right singular vector of each head's rotated queries, turned so that their mean lies along it."""

    name = "qfilters"

    def measure(self, t):
        return dict(q=t.groups.sum(0), qq=torch.einsum("shgd,shge->hgde", t.groups, t.groups))

    def finish(self, mean):
        first = principal(mean["qq"])[1][..., 0]  # [Hkv, g, D]
        along = (first * mean["q"]).sum(-1, keepdim=True)
        return dict(direction=torch.where(along < 0, -first, first).mean(1))


class QFilters(Evicting):
    paper = "Godey, Devoto et al. 2025, Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression"
    statistics = (QueryDirections(),)
    lookback = 0
    reads_queries = False
    evicts_while_reading = True
    direction: Tensor  # fp32 [Hkv, D]

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(512, "tokens kept, the newest included, or their share (Q-Filters: 512)")
        recent: int = knob(64, "newest tokens, never evicted (published example: 64)", low=0)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        value = calib.get(layer, "qfilters.direction") if calib else None
        self.constant("direction", (shape.n_kv_head, shape.head_dim), value, torch.float32)

    def prompt_scores(self, q, k, v, mass, lengths):
        return (k.float() @ self.direction[..., None])[..., 0]

    def token_score(self, k):
        return (k.float() * self.direction).sum(-1)
