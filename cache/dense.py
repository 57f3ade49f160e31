"""Keeps every key and value in the cache's dtype, slot = position: the base of `full` and the selecting methods."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cache.base import KVMethod
from kernels.rotate_append import append_token, rotate_append
from kernels.verify_attention import verify_attention


class Dense(KVMethod):
    k: Tensor  # [B, Hkv, slots, D], rotated unless pre_rope
    v: Tensor
    reads_queries = False
    verifies = rewinds = True
    layout = KVMethod.first_slots
    own_basis: ClassVar[bool] = False  # stores keys in a basis of its own, in which `rotate_append` returns the query

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        size = (shape.max_batch, shape.n_kv_head, self.slots, shape.head_dim)
        self.buffer("k", size), self.buffer("v", size)

    @property
    def slots(self) -> int:
        """The number of tokens that the buffers hold."""
        return self.shape.max_seq_len

    def compress(self, q, k, v, lengths):
        B, _, S, _ = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v

    def rotate_append(self, q, k, v, pos):
        if self.pre_rope or type(self).append is not Dense.append:  # a subclass needs the rotated key, too
            return super().rotate_append(q, k, v, pos)
        return rotate_append(q, k, v, self.rope.cos, self.rope.sin, pos, self.k, self.v)

    def append(self, k, v, pos):
        append_token(k, v, pos, self.k, self.v)

    def first(self, pos: Tensor) -> Tensor | None:
        """The first position that the token at pos [B] attends to; None: position 0."""
        n = self.shape.window
        return self.once_a_step(pos, "first", lambda: (pos - n + 1).clamp(min=0)) if n else None

    def verify(self, q, k, v, pos):
        tokens = zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True)
        each = [self.rotate_append(*token, pos + i) for i, token in enumerate(tokens)]
        n = self.shape.window  # the first one's may begin before the text, and the next ones' then move by less
        start = pos - n + 1 if n else None
        y = verify_attention(torch.stack(each, 2), self.k, self.v, start, pos + len(each))
        return self.out_of_units(y)

    def token_bytes(self) -> int:
        """Bytes of K and V of one token and KV head."""
        return 2 * self.shape.head_dim * self.shape.dtype.itemsize
