"""Control: the tokens with the most true attention mass. The ceiling of every selection; it reads all keys."""

from __future__ import annotations

import torch

from cache.selecting import Selecting


class Oracle(Selecting):
    paper = "none: the ceiling that selection methods are compared with"

    def scores(self, q, pos):
        B, H, T, D = self.k[: len(q)].shape
        logits = q.view(B, H, -1, D).float() @ self.k[:B].float().mT * D**-0.5
        filled = torch.arange(T, device=q.device) <= pos[:, None]
        # a selection is made once per KV head: the mass of its query heads is summed
        return torch.where(filled[:, None, None], logits, float("-inf")).softmax(-1).sum(2)

    def score_bytes(self, pos):
        return (pos + 1 - self.chosen(pos)) * self.token_bytes() // 2  # the keys of the others, too
