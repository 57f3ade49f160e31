"""Skip softmax (BLASST): exact keys, no index; values of blocks that would weigh next to nothing are not read.

A step computes all logits. Of a block of 32 tokens whose largest logit lies below the largest before it by more than
the logarithm of scale / length, for all query heads of its KV head, it reads no values. Nothing is dropped, nothing is
stored beside keys and values, and how much is read depends on the text (`note_read`). Prompts, for which BLASST has a
threshold of its own, are attended to exactly here. A layer with a sliding window reads all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.base import knob
from kernels.skipping_attention import SHORTEST, in_read_blocks, skipping_attention
from kv_methods.full import Full


class SkipSoftmax(Full):
    paper = "Yuan, Shinn et al. 2025, BLASST: Dynamic Blocked Attention Sparsity via Softmax Thresholding"
    lossless = dict(scale=0.0)
    stress = dict(scale=39.0, shortest=1)

    @dataclass
    class Args:
        scale: float = knob(8.0, "threshold of a block's weight, times the length (ours)", 0)
        shortest: int = knob(SHORTEST, "shorter contexts have the threshold of this length (ours; BLASST: 1)", 1)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.note_reads()

    def attend(self, q, idx, count, pos):
        if self.shape.slides:
            return super().attend(q, idx, count, pos)
        end = self.once_a_step(pos, "end", lambda: pos + 1)
        y, values = skipping_attention(q, self.k, self.v, end, self.args.scale, self.args.shortest)
        self.note_read(values, pos, keys=True)
        return y

    def attended(self, q, idx, count, pos):
        every = super().attended(q, idx, count, pos)
        if self.shape.slides:
            return every
        there = (every.position != -2)[:, :, None]
        logits = every.q.float().unflatten(1, (every.k.shape[1], -1)) @ every.k.float().mT * every.k.shape[3] ** -0.5
        logits = torch.where(there, logits, float("-inf"))
        read = in_read_blocks(logits, pos + 1, self.args.scale, self.args.shortest)
        every.position = every.position.where(read, -2)
        return every

    def card_nbytes(self):
        return super().card_nbytes() + self.noted.nbytes

    def traffic(self, pos):
        tokens = self.tokens_read(pos)
        return super().traffic(pos if tokens is None else tokens - 1)
