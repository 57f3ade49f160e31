"""Control: tokens at random. The floor of every selection: where it does well, a test measures nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from cache.selecting import Selecting


class Random(Selecting):
    paper = "none: the floor that selection methods are compared with"
    number: Tensor  # int64 [Hkv, 1]: of each head among those of all layers; a buffer, so that layers share a graph
    slot: Tensor  # int64 [max_seq_len]: a number of each slot

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        heads = torch.tensor(shape.own_heads)[:, None] + layer * shape.layer_heads
        self.constant("number", (shape.n_kv_head, 1), heads, torch.int64)
        # stored, since inductor would multiply by this number in 32 bits
        self.constant("slot", (shape.max_seq_len,), torch.arange(shape.max_seq_len) * 0xC2B2AE3D, torch.int64)

    def scores(self, q, pos):
        # a hash of position, head and slot instead of a generator: a row of a batch draws what it draws alone
        x = (pos[:, None, None] * 0x9E3779B1 + self.number * 0x85EBCA77 + self.slot) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return (x ^ (x >> 16)).float()
