"""Attention sinks and a sliding window: the first few tokens and the newest ones, everything between is forgotten.

Storage is `sinks` slots and a ring of `recent` slots. With positions="cache" (StreamingLLM, Section 3.2) keys are
stored before rotation and every step rotates them by their place in the cache, so that positions never exceed
the window; with "original" they keep the positions of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from errors import InputError
from kernels.dense_attention import decode_attention
from kv_methods.base import KVMethod
from model import apply_rope


class Streaming(KVMethod):
    paper = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    lossless = dict(recent=1_000_000)
    supports_window = True

    @dataclass
    class Args:
        sinks: int = field(default=4, metadata=dict(help="first tokens kept (Table 2: four suffice)"))
        recent: int = field(default=1020, metadata=dict(help="newest tokens kept (Table 2: 4 + 1020)"))
        positions: Literal["original", "cache"] = field(
            default="original", metadata=dict(help="rotate keys by their place in the text, or in the cache")
        )

        def __post_init__(self):
            if self.sinks < 0 or self.recent < 1:
                raise InputError(f"streaming needs sinks >= 0 and recent >= 1, got {self.sinks} and {self.recent}")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.sinks = min(args.sinks, shape.max_seq_len)
        # a narrower model window bounds the ring, and then sees no sinks: they lie outside of it
        self.window = min(args.recent, shape.max_seq_len - self.sinks)
        if shape.window:
            self.sinks, self.window = 0, min(args.recent, shape.window)
        self.pre_rope = args.positions == "cache"
        size = (shape.max_batch, shape.n_kv_head, self.sinks + self.window, shape.head_dim)
        self.k, self.v = self.buffer("k", size), self.buffer("v", size)

    def slot(self, pos):
        """Where a position is stored: sinks first, then the ring."""
        if not self.window:
            return pos
        return torch.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % self.window)

    def compress(self, q, k, v, lengths):
        B, H, S, D = k.shape
        slots = torch.arange(self.k.shape[2], device=k.device)
        # the newest position that each slot would hold at the end of each row's prompt
        last = lengths[:, None] - 1
        ring = last - (last - slots) % max(self.window, 1)
        held = torch.where(slots < self.sinks, slots.expand(B, -1), ring)
        at = held.clamp(0, S - 1)[:, None, :, None].expand(B, H, -1, D)
        self.k[:B], self.v[:B] = k.gather(2, at), v.gather(2, at)

    def append(self, k, v, pos):
        row = torch.arange(len(pos), device=pos.device)
        self.k[row, :, self.slot(pos)], self.v[row, :, self.slot(pos)] = k, v

    def attend(self, q, idx, count, pos):
        cap = self.k.shape[2]
        none, filled = torch.zeros_like(pos), (pos + 1).clamp(max=cap)  # slots fill in order
        if not self.pre_rope:  # in which order they are read does not matter to attention
            return decode_attention(q, self.k, self.v, none, filled)
        slots = torch.arange(cap, device=pos.device)
        age = (self.slot(pos)[:, None] - slots) % max(self.window, 1)  # of ring slots, 0 = this token
        place = torch.where(slots < self.sinks, slots, (pos.clamp(max=cap - 1)[:, None] - age))
        place = torch.where((pos < self.sinks)[:, None], slots, place)
        k = apply_rope(self.k[: len(pos)], *(t[:, None] for t in self.rope.at(place.clamp(min=0))))
        return decode_attention(self.rope.rotate(q, filled - 1), k, self.v, none, filled)

    def card_nbytes(self):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * (self.sinks + self.window) * s.head_dim * s.dtype.itemsize

    def traffic(self, pos):
        s = self.shape
        return 2 * s.max_batch * s.n_kv_head * min(pos + 1, self.k.shape[2]) * s.head_dim * s.dtype.itemsize
