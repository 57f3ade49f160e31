"""R-KV: while a long reasoning is decoded, keep tokens that the newest queries attend to and that are not redundant.

Decoded tokens fill a buffer. Whenever it is full, all tokens held compete: a token's score is 0.1 times the attention
that the last 8 queries pay to it, less 0.9 times the similarity of its key to the others'; of similar keys, the newest
does not count as redundant. The best stay, with the last 8 tokens. A prompt longer than the budget is cut likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.base import knob
from cache.compacting import Compacting
from cache.evicting import Evicting
from kernels.prompt_scores import pooled
from runtime.errors import InputError

BLOCK = 256  # tokens whose cosines with all others are held at a time


class RKV(Compacting):
    paper = "Cai, Xiao et al. 2025, R-KV: Redundancy-aware KV Cache Compression for Reasoning Models"
    stress = dict(budget=20, recent=4, buffer=6)

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(1024, "tokens that stay, the newest included, or their share (R-KV: 128 to 3072)")
        recent: int = knob(8, "alpha: the newest tokens, whose queries score and which stay (published code: 8)", 1)
        buffer: int = knob(128, "decoded tokens between two evictions (published code: 128)", 1)
        mix: float = knob(0.1, "lambda: the part of attention in a score (R-KV: 0.1; published code: 0.07)", 0, 1)
        kernel: int = knob(7, "neighbours whose largest attention counts, an odd number (published code: 7)", 1, 10**4)
        alike: float = knob(0.5, "keys of a larger cosine are alike (published code: 0.5)", -1, 1)
        spared: int = knob(1, "beta: so many of the newest that are like a token do not count as such", 0, 10**4)

        def __post_init__(self):
            super().__post_init__()
            if self.kernel % 2 == 0:
                raise InputError(f"kernel={self.kernel} has no middle: give an odd number")

    def __init__(self, args, shape, layer, rope, calib=None):
        self.lookback, self.every = args.recent, args.buffer
        super().__init__(args, shape, layer, rope, calib)

    def decode_slots(self):
        return min(self.args.buffer, self.shape.max_decoded)

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        self.keep(k_rot, v, self.scores_of_prompt(q_rot, k_rot, v, lengths), lengths)
        self.note_queries(q_rot, lengths)

    def scores_of_prompt(self, q, k, v, lengths):
        q_pos = lengths[:, None] - self.lookback + torch.arange(self.lookback, device=k.device)
        newest = q.gather(2, q_pos.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        place = torch.arange(k.shape[2], device=k.device).expand(k.shape[:3])
        k = k.masked_fill((place >= lengths[:, None, None])[..., None], 0)
        return self.later_scores(newest, q_pos, k, v, place, lengths)

    def later_scores(self, q, q_pos, k, v, place, filled):
        """Z = lambda I - (1 - lambda) R for the tokens before the window."""
        t = torch.arange(k.shape[2], device=k.device)
        before = (t < (filled - self.recent(filled))[:, None])[:, None]  # [B, 1, N]
        importance, redundancy = self.importance(q, q_pos, k, before), self.redundancy(k, filled)
        return self.args.mix * importance - (1 - self.args.mix) * redundancy

    def importance(self, q: Tensor, q_pos: Tensor, k: Tensor, before: Tensor) -> Tensor:
        """The newest queries' mean softmax over the tokens before them, of a group's largest logits (published code),
        max-pooled over neighbours."""
        logits = (q.unflatten(1, (k.shape[1], -1)).float() @ k.float().mT[:, :, None]).amax(2) * q.shape[3] ** -0.5
        p = logits.masked_fill(~before[:, :, None], float("-inf")).softmax(-1)  # [B, Hkv, W, N]
        there = (q_pos >= 0)[:, None, :, None] & before[:, :, None]
        mean = p.masked_fill(~there, 0).sum(2) / (q_pos >= 0).sum(1).clamp(min=1)[:, None, None]
        return pooled(mean, self.args.kernel)

    def redundancy(self, k: Tensor, filled: Tensor) -> Tensor:
        """Softmax over tokens of the mean cosine of a token's key with the others'. The newest `spared` tokens that are
        similar to a token do not count as redundant to it."""
        n, t = k.shape[2], torch.arange(k.shape[2], device=k.device)
        unit, total = F.normalize(k.float(), dim=-1), k.new_zeros(k.shape[:3], dtype=torch.float32)
        spared = min(self.args.spared, n)
        for first in range(0, n, BLOCK):
            row = t[first : first + BLOCK]
            cos = unit[:, :, first : first + BLOCK] @ unit.mT  # [B, Hkv, BLOCK, N]
            cos = cos.masked_fill(row[:, None] == t, 0)
            if spared:
                alike = (cos > self.args.alike) & (t < filled[:, None, None, None])
                newest, at = torch.where(alike, t, -1).topk(spared, -1)
                cos = cos.scatter(3, at, torch.where(newest >= 0, 0, cos.gather(3, at)))
            total += cos.sum(2)  # missing keys are zeros
        mean = total / filled.clamp(min=1)[:, None, None]
        return mean.masked_fill(t >= filled[:, None, None], float("-inf")).softmax(-1)
