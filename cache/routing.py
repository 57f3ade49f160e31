"""Two methods in one layer: some KV heads are held by another method, the rest by this one.

A subclass calls `route` once in its constructor; its own compress, append, select and attend then see its own heads
alone, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cache.base import KVMethod
from cache.spec import inner_method


class Routed(KVMethod):
    order: Tensor  # int64 [Hkv]: the other's heads, then ours

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.other: KVMethod | None = None  # holds the KV heads that are not this method's
        self.n_other, self.n_own = 0, shape.n_kv_head

    def route(self, theirs: list[int], method: str) -> None:
        """Give the KV heads `theirs` to a method or preset, with knobs as `inner_method` reads them."""
        shape = self.shape
        own = [h for h in range(shape.n_kv_head) if h not in theirs]
        self.n_other, self.n_own = len(theirs), len(own)
        if not theirs:
            return
        if own:
            self.constant("order", (shape.n_kv_head,), torch.tensor(theirs + own), torch.int64)
        (cls, args), calib = inner_method(method), self.calib
        part = replace(shape, n_head=shape.n_head // shape.n_kv_head * len(theirs), n_kv_head=len(theirs))
        if calib is not None and own:
            calib = calib.heads(self.layer, theirs, shape.n_kv_head, cls.needs(args))
        self.other = cls(args, part, self.layer, self.rope, calib)
        self.predicts = self.other.predicts  # what the class says for all, layers may not
        self.exact_prefill = self.other.exact_prefill
        if own:
            self.other.heads, self.heads = torch.tensor(theirs), torch.tensor(own)

    def prefill(self, q, k, v, lengths):
        return self._by_head("prefill", super().prefill, q, k, v, lengths)

    def fill(self, q, k, q_rot, k_rot, v, lengths):
        if self.other is None:
            super().fill(q, k, q_rot, k_rot, v, lengths)
        elif not self.n_own:
            self.other.fill(q, k, q_rot, k_rot, v, lengths)
        else:
            fills: tuple[Callable[..., None], ...] = self.other.fill, super().fill
            for run, (_, parts) in zip(fills, self._split(q, k, q_rot, k_rot, v), strict=True):
                run(*parts, lengths)

    def decode(self, q, k, v, pos):
        return self._by_head("decode", super().decode, q, k, v, pos)

    def _by_head(self, step: str, ours: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """The other method's `step` on its heads, `ours` on the rest; heads stay in their order.

        q [B, Hq, ..., D], k and v [B, Hkv, ..., D], none of them rotated: the methods may differ in what they rotate.
        """
        if self.other is None:
            return ours(q, k, v, at)
        theirs = getattr(self.other, step)
        if not self.n_own:
            return theirs(q, k, v, at)
        y = torch.empty_like(q, memory_format=torch.contiguous_format).unflatten(1, (self.shape.n_kv_head, -1))
        for run, (heads, parts) in zip((theirs, ours), self._split(q, k, v), strict=True):
            y.index_copy_(1, heads, run(*parts, at).unflatten(1, (len(heads), -1)))
        return y.flatten(1, 2)

    def _split(self, *heads_of: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The other's KV heads and its part of every tensor [B, heads, ...], then ours."""
        H, P = self.shape.n_kv_head, self.n_other
        for heads in (self.order[:P], self.order[P:]):
            yield heads, [x.unflatten(1, (H, -1)).index_select(1, heads).flatten(1, 2) for x in heads_of]

    def prefetch(self, q_hat, pos):
        if self.other is not None:
            if self.n_own:
                groups = q_hat.unflatten(1, (self.shape.n_kv_head, -1))
                q_hat = groups.index_select(1, self.order[: self.n_other]).flatten(1, 2)
            self.other.prefetch(q_hat, pos)

    def maintain(self, step):
        if self.other is not None:
            self.other.maintain(step)

    def reset(self):
        if self.other is not None:
            self.other.reset()

    def traffic(self, pos):
        return self.other.traffic(pos) if self.other is not None else 0
