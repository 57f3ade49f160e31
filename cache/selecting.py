"""All tokens are kept, a few are attended: a subclass scores them at every step.

    class Mine(Selecting):
        def scores(self, q, pos):        # q [B, Hq, D] rotated, pos [B] -> fp32 [B, Hkv, T]
            ...

is a method with a budget, sinks and a recent window, its own knobs beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import Attended, knob
from cache.budget import Selection
from cache.dense import Dense
from kernels.gather_attention import gather_attention, gather_rows
from kernels.select import budget_select


class Selecting(Dense):
    lossless = dict(budget=1.0)
    stress = dict(budget=24, sinks=4, recent=16)

    @dataclass
    class Args:
        budget: int | float = knob(0.125, "tokens attended, sinks and recent included")
        sinks: int = knob(4, "first tokens always attended", low=0)
        recent: int = knob(16, "newest tokens always attended", low=1)

        def __post_init__(self):
            self.selection()

        def selection(self) -> Selection:
            return Selection(self.budget, self.sinks, self.recent)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.selection = args.selection()
        self.k_static = self.selection.of(shape.max_seq_len)

    def scores(self, q: Tensor, pos: Tensor) -> Tensor:
        """How much each token matters to this step: q [B, Hq, D], pos [B] -> [B, Hkv, T].

        What stands after pos may score anything. A selection is made once per KV head: reduce the group's queries; or,
        what costs g times the reading, once per query head: [B, Hq, T].
        """
        raise NotImplementedError

    def select(self, q, pos):
        a = self.args
        return budget_select(self.scores(q, pos), pos, self.selection.at(pos + 1), self.k_static, a.sinks, a.recent)

    def attend(self, q, idx, count, pos):
        H = self.shape.n_kv_head
        if idx.shape[1] <= H:
            return gather_attention(q, self.k, self.v, idx, count)
        parts = (x.unflatten(1, (H, -1)).unbind(2) for x in (q, idx, count))  # every query of a group reads for itself
        each = [
            gather_attention(q.contiguous(), self.k, self.v, idx, count) for q, idx, count in zip(*parts, strict=True)
        ]
        return torch.stack(each, 2).flatten(1, 2)

    def attended(self, q, idx, count, pos):
        chosen = torch.arange(idx.shape[2], device=idx.device) < count[..., None]
        at = torch.where(chosen, idx, 0)
        k, v = (x.repeat_interleave(max(1, idx.shape[1] // x.shape[1]), 1) for x in (self.k, self.v))
        return Attended(torch.where(chosen, idx, -2), q, gather_rows(k, at), gather_rows(v, at))

    # ---- accounting ----

    def score_bytes(self, pos: int) -> int:
        """What `scores` reads of one row and KV head, the newest token at pos."""
        return 0

    def chosen(self, pos: int) -> int:
        """Tokens attended, the newest at pos."""
        return self.selection.of(pos + 1)

    def traffic(self, pos):
        """What scoring reads, and the keys and values of the chosen tokens."""
        heads = self.shape.max_batch * self.shape.n_kv_head
        return heads * (self.score_bytes(pos) + self.chosen(pos) * self.token_bytes())
