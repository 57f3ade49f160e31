"""Dense attention over every key and value: the yardstick of all other methods."""

from __future__ import annotations

import torch

from kernels.dense_attention import decode_attention
from kv_methods.base import KVMethod


class Full(KVMethod):
    paper = "none: exact attention"
    supports_window = True

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.k, self.v = self.buffer("k", shape.kv), self.buffer("v", shape.kv)

    def compress(self, q, k, v, lengths):
        B, _, S, _ = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v

    def append(self, k, v, pos):
        row = torch.arange(len(pos), device=pos.device)
        self.k[row, :, pos], self.v[row, :, pos] = k, v

    def attend(self, q, idx, count, pos):
        first = (pos - self.shape.window + 1).clamp(min=0) if self.shape.window else torch.zeros_like(pos)
        return decode_attention(q, self.k, self.v, first, pos + 1)

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * s.max_seq_len * s.head_dim * s.dtype.itemsize

    def traffic(self, pos):
        s = self.shape
        tokens = min(pos + 1, s.window or pos + 1)
        return 2 * s.max_batch * s.n_kv_head * tokens * s.head_dim * s.dtype.itemsize
