"""Dense attention over every key and value: the yardstick of all other methods.

A layer with a sliding window keeps the tokens of its window, in a ring: position p lies in slot p mod window.
"""

from __future__ import annotations

import torch

from cache.base import Attended
from cache.dense import Dense
from kernels.dense_attention import decode_attention
from kernels.ring import ring_positions
from kernels.rotate_append import rotate_token


class Full(Dense):
    paper = "none: exact attention"
    supports_window = True

    @property
    def ring(self) -> int | None:
        """The length of the ring; None: slot = position. Tokens that may be taken back must not overwrite others."""
        return None if self.shape.drafts else self.shape.window

    @property
    def slots(self):
        return self.ring or self.shape.max_seq_len

    def newest(self, last):
        """The newest position up to last [B] that lies in each slot of the ring [B, slots]; below 0: none."""
        return ring_positions(last, self.slots)

    def compress(self, q, k, v, lengths):
        if self.ring:
            at = self.newest(lengths - 1).clamp(min=0)[:, None, :, None].expand(*k.shape[:2], -1, k.shape[3])
            k, v = k.gather(2, at), v.gather(2, at)
        super().compress(q, k, v, lengths)

    def rotate_append(self, q, k, v, pos):
        if not self.ring:
            return super().rotate_append(q, k, v, pos)
        q, k = rotate_token(q, k, self.rope.cos, self.rope.sin, pos)
        self.append(k, v, self.once_a_step(pos, "slot", lambda: pos % self.ring))
        return q

    def filled(self, pos):
        """The number of the ring's slots that hold a token, [B]."""
        return self.once_a_step(pos, "filled", lambda: (pos + 1).clamp(max=self.ring))

    def attend(self, q, idx, count, pos):
        if self.ring:  # attention does not depend on the order of keys
            return decode_attention(q, self.k, self.v, None, self.filled(pos))
        return decode_attention(q, self.k, self.v, self.first(pos), self.once_a_step(pos, "end", lambda: pos + 1))

    def attended(self, q, idx, count, pos):
        B, H, T, _ = self.k[: len(q)].shape
        t = self.newest(pos) if self.ring else torch.arange(T, device=q.device)
        first = self.first(pos)
        seen = (t <= pos[:, None]) & (t >= (0 if first is None else first[:, None]))
        return Attended(torch.where(seen, t, -2)[:, None].expand(B, H, T), q, self.k[:B], self.v[:B])

    def layout(self, tokens):
        return dict(k=self.ring, v=self.ring) if self.ring and tokens > self.ring else {}

    def card_nbytes(self):
        s = self.shape
        return s.max_batch * s.n_kv_head * self.slots * self.token_bytes()

    def traffic(self, pos):
        s = self.shape
        return s.max_batch * s.n_kv_head * min(pos + 1, s.window or pos + 1) * self.token_bytes()
