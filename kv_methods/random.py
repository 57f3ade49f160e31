"""Control: tokens at random. The floor of every selection: where it does well, a test measures nothing."""

from __future__ import annotations

import torch

from cache.selecting import Selecting


class Random(Selecting):
    paper = "none: the floor that selection methods are compared with"

    def scores(self, q, pos):
        heads, T = self.shape.own_heads, self.shape.max_seq_len
        # a hash of position, head and slot instead of a generator: a row of a batch draws what it draws alone
        head = torch.arange(heads.start, heads.stop, device=q.device)[:, None] + self.layer * self.shape.layer_heads
        slot = torch.arange(T, device=q.device)
        x = (pos[:, None, None] * 0x9E3779B1 + head * 0x85EBCA77 + slot * 0xC2B2AE3D) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return (x ^ (x >> 16)).float()
