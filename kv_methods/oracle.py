"""Control: the tokens with the most true attention mass. The ceiling of every selection; it reads all keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.gather_attention import gather_attention
from kernels.select import budget_select
from kv_methods.base import KVMethod, budget_tokens, check_budget, check_forced, selection_cap, selection_size


class Oracle(KVMethod):
    paper = "none: the ceiling that selection methods are compared with"
    lossless = dict(budget=1.0)

    @dataclass
    class Args:
        budget: int | float = field(default=0.125, metadata=dict(help="tokens attended, sinks and recent included"))
        sinks: int = field(default=4, metadata=dict(help="first tokens always attended"))
        recent: int = field(default=16, metadata=dict(help="newest tokens always attended"))

        def __post_init__(self):
            check_budget(self.budget)
            check_forced("oracle", self.budget, self.sinks, self.recent)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.k, self.v = self.buffer("k", shape.kv), self.buffer("v", shape.kv)
        self.k_static = selection_cap(args.budget, shape.max_seq_len, args.sinks + args.recent)

    def compress(self, q, k, v, lengths):
        B, _, S, _ = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v

    def append(self, k, v, pos):
        row = torch.arange(len(pos), device=pos.device)
        self.k[row, :, pos], self.v[row, :, pos] = k, v

    def select(self, q, pos):
        B, H = len(pos), self.shape.n_kv_head
        k = self.k[:B]
        logits = q.view(B, H, -1, self.shape.head_dim).float() @ k.float().transpose(2, 3) * self.shape.head_dim**-0.5
        filled = torch.arange(k.shape[2], device=q.device) <= pos[:, None]
        # a selection is made once per KV head: the mass of its query heads is summed
        scores = torch.where(filled[:, None, None], logits, float("-inf")).softmax(-1).sum(2)
        wanted = budget_tokens(self.args.budget, pos + 1)
        return budget_select(scores, pos, wanted, self.k_static, self.args.sinks, self.args.recent)

    def attend(self, q, idx, count, pos):
        return gather_attention(q, self.k, self.v, idx, count)

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * s.max_seq_len * s.head_dim * s.dtype.itemsize

    def traffic(self, pos):
        """Every key, to know the attention, and the values of the chosen tokens."""
        s, n = self.shape, selection_size(self.args.budget, pos, self.args.sinks + self.args.recent)
        return s.max_batch * s.n_kv_head * s.head_dim * s.dtype.itemsize * (pos + 1 + n)
