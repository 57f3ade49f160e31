"""Attention sinks and a sliding window: keep the first few tokens and the newest ones, drop everything between.

Storage is `sinks` slots and a ring of `recent` slots. With positions="cache" (StreamingLLM) keys are stored before
rotation and every step rotates them by their place in the cache, so that positions never exceed the window; with
"original" they keep the positions of the text. Where the model's own window is as narrow, it bounds the ring, and sinks
are attended to until they leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import Attended, KVMethod, knob
from kernels.dense_attention import decode_attention
from kernels.rope import apply_rope
from kernels.rotate_append import append_token


class Streaming(KVMethod):
    paper = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    lossless = dict(recent=1_000_000)
    stress = dict(sinks=4, recent=16)
    supports_window = True
    reads_queries = False

    @dataclass
    class Args:
        sinks: int = knob(4, "first tokens kept (StreamingLLM: four suffice)", low=0)
        recent: int = knob(1020, "newest tokens kept (StreamingLLM: 4 + 1020)", low=1)
        positions: Literal["original", "cache"] = knob(
            "original", "rotate keys by their place in the text, or in the cache (StreamingLLM)"
        )

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.sinks = min(args.sinks, shape.max_seq_len)
        self.window = min(args.recent, shape.max_seq_len - self.sinks, shape.slides or args.recent)
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
        append_token(k, v, self.once_a_step(pos, "slot", lambda: self.slot(pos)), self.k, self.v)

    def attend(self, q, idx, count, pos):
        q, k, filled = self._as_they_meet(q, pos)
        return decode_attention(q, k, self.v, self.first(pos), filled)

    def first(self, pos):
        """The first sink within the model's own window, [B]; None: there is no such window."""
        n = self.shape.slides
        return self.once_a_step(pos, "first", lambda: (pos - n + 1).clamp(0, self.sinks)) if n else None

    def _as_they_meet(self, q, pos):
        """q and all keys, rotated, and the number of filled slots [B]; slots fill in order."""
        cap = self.k.shape[2]
        filled = self.once_a_step(pos, "filled", lambda: (pos + 1).clamp(max=cap))
        if not self.pre_rope:  # attention does not depend on the order of keys
            return q, self.k, filled
        slots = torch.arange(cap, device=pos.device)
        place = torch.where(slots < self.sinks, slots, (pos.clamp(max=cap - 1)[:, None] - self._age(slots, pos)))
        place = torch.where((pos < self.sinks)[:, None], slots, place)
        k = apply_rope(self.k[: len(pos)], *(t[:, None] for t in self.rope.at(place.clamp(min=0))))
        return self.rope.rotate(q, filled - 1), k, filled

    def _age(self, slots, pos):
        """Tokens since a ring slot was written [B, slots]; 0: the one at pos."""
        return (self.slot(pos)[:, None] - slots) % max(self.window, 1)

    def attended(self, q, idx, count, pos):
        B, slots = len(pos), torch.arange(self.k.shape[2], device=pos.device)
        q, k, filled = self._as_they_meet(q, pos)
        ring = torch.where((pos < self.sinks)[:, None], -2, pos[:, None] - self._age(slots, pos))
        at = torch.where(slots < self.sinks, slots.expand(B, -1), ring)
        first = self.first(pos)
        seen = (slots < filled[:, None]) & (slots >= (0 if first is None else first[:, None]))
        at = torch.where(seen, at, -2)[:, None].expand(B, k.shape[1], -1)
        return Attended(at, q, k[:B], self.v[:B])

    def layout(self, tokens):
        sizes = [self.sinks, self.window]
        return dict(k=sizes, v=sizes) if tokens > sum(sizes) else {}

    def traffic(self, pos):
        s = self.shape
        left = min(max(pos - s.slides + 1, 0), self.sinks) if s.slides else 0  # sinks that have left the window
        tokens = min(pos + 1, self.k.shape[2]) - left
        return 2 * s.max_batch * s.n_kv_head * tokens * s.head_dim * s.dtype.itemsize
