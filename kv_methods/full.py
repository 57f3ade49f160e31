"""Dense attention over every key and value: the yardstick of all other methods."""

from __future__ import annotations

import torch

from cache.base import Attended
from cache.dense import Dense
from kernels.dense_attention import decode_attention


class Full(Dense):
    paper = "none: exact attention"
    supports_window = True

    def attend(self, q, idx, count, pos):
        return decode_attention(q, self.k, self.v, self.first(pos), self.ends(pos))

    def attended(self, q, idx, count, pos):
        B, H, T, _ = self.k[: len(q)].shape
        t = torch.arange(T, device=q.device)
        seen, first = t <= pos[:, None], self.first(pos)
        if first is not None:
            seen &= t >= first[:, None]
        return Attended(torch.where(seen, t, -2)[:, None].expand(B, H, T), q, self.k[:B], self.v[:B])

    def card_nbytes(self):
        B, H, T, _ = self.shape.kv
        return B * H * T * self.token_bytes()

    def traffic(self, pos):
        s = self.shape
        return s.max_batch * s.n_kv_head * min(pos + 1, s.window or pos + 1) * self.token_bytes()
