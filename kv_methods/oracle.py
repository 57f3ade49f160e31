"""Control: the tokens with the most true attention mass. The ceiling of every selection; it reads all keys."""

from __future__ import annotations

from cache.selecting import Selecting
from kernels.latent_score import head_scores


class Oracle(Selecting):
    paper = "none: the ceiling that selection methods are compared with"
    deviates = frozenset({"rereads"})

    def logits(self, q, pos):
        groups = q.unflatten(1, (self.shape.n_kv_head, -1))
        return head_scores(groups, self.k, pos).flatten(1, 2) * q.shape[2] ** -0.5

    def scores(self, q, pos):
        # a selection is made once per KV head: the mass of its query heads counts
        return self.weights(self.logits(q, pos), pos)

    def score_bytes(self, pos):
        return (pos + 1) * self.token_bytes() // 2  # every key
