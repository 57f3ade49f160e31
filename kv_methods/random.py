"""Control: tokens at random. The floor of every selection: where it does well, a test measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.gather_attention import gather_attention
from kernels.select import budget_select
from kv_methods.base import KVMethod, budget_tokens, check_budget, check_forced, selection_cap, selection_size


class Random(KVMethod):
    paper = "none: the floor that selection methods are compared with"
    lossless = dict(budget=1.0)

    @dataclass
    class Args:
        budget: int | float = field(default=0.125, metadata=dict(help="tokens attended, sinks and recent included"))
        sinks: int = field(default=4, metadata=dict(help="first tokens always attended"))
        recent: int = field(default=16, metadata=dict(help="newest tokens always attended"))

        def __post_init__(self):
            check_budget(self.budget)
            check_forced("random", self.budget, self.sinks, self.recent)

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
        H, T = self.shape.n_kv_head, self.shape.max_seq_len
        # a hash of position, head and slot instead of a generator: a row of a batch draws what it draws alone
        head, slot = torch.arange(H, device=q.device)[:, None] + self.layer * H, torch.arange(T, device=q.device)
        x = (pos[:, None, None] * 0x9E3779B1 + head * 0x85EBCA77 + slot * 0xC2B2AE3D) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        scores = (x ^ (x >> 16)).float()
        wanted = budget_tokens(self.args.budget, pos + 1)
        return budget_select(scores, pos, wanted, self.k_static, self.args.sinks, self.args.recent)

    def attend(self, q, idx, count, pos):
        return gather_attention(q, self.k, self.v, idx, count)

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * s.max_seq_len * s.head_dim * s.dtype.itemsize

    def traffic(self, pos):
        """Keys and values of the chosen tokens."""
        s, n = self.shape, selection_size(self.args.budget, pos, self.args.sinks + self.args.recent)
        return s.max_batch * s.n_kv_head * s.head_dim * s.dtype.itemsize * 2 * n
