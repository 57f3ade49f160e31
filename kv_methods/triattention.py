"""TriAttention: score keys by the attention that a head's mean query will pay to them from where the text goes on.

Before rotation a head's queries lie close to one centre m, whatever their position. Its logit with a key at a distance
is then a trigonometric series: sum_f |m_f| |k_f| cos(w_f distance + phase_f), the rotated centre times the rotated key.
It is averaged over the distances from 1, 2, 4, ... tokens ahead. What queries deviate from the centre adds
sum_f (E|q_f| - |m_f|) |k_f|. Scores are standardized over the tokens, and a group's largest counts. Decoded tokens fill
a buffer; whenever it is full, all tokens compete. A prompt longer than the budget is cut likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import knob
from cache.compacting import Compacting
from cache.evicting import Evicting
from cache.statistic import Statistic
from kernels.rope import apply_rope


def sizes(x: Tensor) -> Tensor:
    """The size of each frequency's pair of channels: x [..., D] -> [..., D/2]."""
    return torch.hypot(*x.chunk(2, -1))


class QueryCentres(Statistic):
    """Of each head's queries before rotation the mean, and by frequency the mean size."""

    name = "triattention"

    def measure(self, t):
        q = t.q.unflatten(1, (t.k.shape[1], -1))  # [S, Hkv, g, D]
        return dict(mean=q.sum(0), size=sizes(q).sum(0))


class TriAttention(Compacting):
    paper = "Mao, Lin et al. 2026, TriAttention: Efficient Long Reasoning with Trigonometric KV Compression"
    stress = dict(budget=20, buffer=6)
    statistics = (QueryCentres(),)
    lookback = 0
    scores_pre_rope = True

    mean: Tensor  # fp32 [1 or B, Hkv, g, D]
    size: Tensor  # fp32 [1 or B, Hkv, g, D/2]

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(2048, "tokens that stay, or their share (published: 2048; DS-Llama-8B: 512)")
        recent: int = knob(0, "newest tokens that stay in any case (ours; published: none)", low=0)
        buffer: int = knob(128, "beta: decoded tokens between two evictions (published code: 128)", 1)
        reach: int = knob(65536, "the farthest of the distances 1, 2, 4, ... (published code: 65536)", 1, 1 << 30)
        queries: Literal["calibration", "prompt"] = knob(
            "calibration", "queries behind the statistics: a calibration's (published), or the prompt's (ours)"
        )

    @classmethod
    def needs(cls, args):
        return cls.statistics if args.queries == "calibration" else ()

    def __init__(self, args, shape, layer, rope, calib=None):
        self.every = args.buffer
        super().__init__(args, shape, layer, rope, calib)
        g, D = shape.n_head // shape.n_kv_head, shape.head_dim
        for part, n in (("mean", D), ("size", D // 2)):
            if args.queries == "prompt":
                self.buffer(part, (shape.max_batch, shape.n_kv_head, g, n), torch.float32)
            else:
                value = calib.get(layer, f"triattention.{part}")[None] if calib else None
                self.constant(part, (1, shape.n_kv_head, g, n), value, torch.float32)

    def decode_slots(self):
        return min(self.args.buffer, self.shape.max_decoded)

    def prompt_scores(self, q, k, v, mass, lengths):
        if self.args.queries == "prompt":
            there = torch.arange(q.shape[2], device=q.device) < lengths[:, None]
            x = q.float().masked_fill(~there[:, None, :, None], 0).unflatten(1, (k.shape[1], -1))
            n = lengths.view(-1, 1, 1, 1)
            self.mean[: len(q)], self.size[: len(q)] = x.sum(3) / n, sizes(x).sum(3) / n
        return self.scores(self.rope.rotate_prompt(k), lengths, lengths)

    def later_scores(self, q, q_pos, k, v, place, filled):
        return self.scores(k, place.amax((1, 2)) + 1, filled)

    def scores(self, k: Tensor, read: Tensor, filled: Tensor) -> Tensor:
        """Of rotated keys k [B, Hkv, N, D], the first filled [B] of them, after read [B] tokens -> [B, Hkv, N]."""
        mean, size = self.mean[: len(k)], self.size[: len(k)]
        ahead = 2 ** torch.arange(self.args.reach.bit_length(), device=k.device)
        there = (torch.arange(k.shape[2], device=k.device) < filled[:, None])[:, None, :, None]
        k, n = k.float().masked_fill(~there, 0), filled.clamp(min=1).view(-1, 1, 1, 1)
        score = k @ apply_rope(mean, *self.rope.mean(read[:, None] + ahead)).mT  # [B, Hkv, N, g]
        score = score + sizes(k) @ ((size - sizes(mean)) * self.rope.cos[0, 0]).mT  # cos of 0 is the factor of yarn
        centred = (score - score.sum(2, keepdim=True) / n).masked_fill(~there, 0)
        spread = (centred.square().sum(2, keepdim=True) / n).sqrt()
        return (centred / spread.clamp(min=torch.finfo(spread.dtype).tiny)).amax(3)
