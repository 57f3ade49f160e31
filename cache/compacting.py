"""Eviction at intervals while decoding: decoded tokens fill free slots, and every `every` steps the lowest scores go.

    class Mine(Compacting):
        def later_scores(self, q, q_pos, k, v, place, filled):   # newest queries; kept tokens in the order of the text
            ...                                                  # -> [B, Hkv, N]

With every = 0 no decoded token is evicted; with lookback = 0 scores are made without queries. Scores are computed
between steps, outside the graph, from what the graph stored: the slots and the newest `lookback` queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.evicting import Evicting
from kernels.gather_attention import gather_rows
from kernels.prompt_scores import best_tokens, newest_first
from kernels.ring import ring_positions


class Compacting(Evicting):
    evicts = False
    lookback: int
    every: int = 0  # steps between two evictions; 0: no evictions

    queries: Tensor  # [B, Hq, lookback, D] rotated; the query at position p is in slot p % lookback
    prompt_len: Tensor  # int64 [B]

    # ---- what a subclass defines ----

    def later_scores(self, q: Tensor, q_pos: Tensor, k: Tensor, v: Tensor, place: Tensor, filled: Tensor) -> Tensor:
        """How much each kept token is worth -> scores [B, Hkv, N]; a token that is never evicted may get infinity.

        q [B, Hq, W, D] are the newest queries, at positions q_pos [B, W], negative if there is none. k and v [B, Hkv,
        N, D] are in the order of the text, at positions place [B, Hkv, N]; the first filled [B] of them are tokens, the
        rest zeros. By default scores are those of a prompt: the attention of these queries.
        """
        if not self.lookback:
            return self.prompt_scores(q, k, v, k.new_empty(0), filled)
        H, there = k.shape[1], torch.arange(k.shape[2], device=k.device) < filled[:, None]
        seen = there[:, None, None] & (place[:, :, None] <= q_pos[:, None, :, None])  # [B, Hkv, W, N]
        logits = q.unflatten(1, (H, -1)).float() @ k.float().mT[:, :, None] * q.shape[3] ** -0.5
        p = logits.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
        each = p.masked_fill((q_pos < 0)[:, None, None, :, None], 0).sum(3)  # [B, Hkv, g, N]
        mass = each.sum(2) if self.group == "sum" else each.amax(2)
        return self.prompt_scores(q, k, v, mass.masked_fill(~there[:, None], 0), filled)

    def stay(self, place: Tensor, read: Tensor) -> Tensor:
        """How many of the stored tokens stay, after read [B] tokens -> [B]. place [B, Hkv, N] are their positions, -1
        for empty slots."""
        return self.num_kept(read)

    # ---- storage ----

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if self.every:
            self.buffer("queries", (shape.max_batch, shape.n_head, self.lookback, shape.head_dim))
            self.buffer("prompt_len", (shape.max_batch,), torch.int64)

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        super().store_prompt(q, k, q_rot, k_rot, v, lengths)
        self.note_queries(q_rot, lengths)

    def note_queries(self, q: Tensor, lengths: Tensor) -> None:
        """Store the newest queries of prompts, from q [B, Hq, S, D] rotated, lengths [B]."""
        if self.every:
            if self.lookback:
                newest = ring_positions(lengths - 1, self.lookback).clamp(min=0)[:, None]  # [B, 1, W]
                self.queries[: len(q)] = gather_rows(q, newest.expand(-1, q.shape[1], -1))
            self.prompt_len[: len(q)] = lengths

    def attend(self, q, idx, count, pos):
        if self.every and self.lookback:
            self.queries[torch.arange(len(pos), device=pos.device), :, pos % self.lookback] = q
        return super().attend(q, idx, count, pos)

    def room(self):
        return self.shape.max_decoded if self.every else super().room()

    def maintain(self, step):
        if not self.every:
            super().maintain(step)
        elif step % self.every == 0:
            self.compact()

    def compact(self) -> None:
        """Evict, and move the tokens that stay to the first slots."""
        N, slot = self.k.shape[2], torch.arange(self.k.shape[2], device=self.k.device)
        there = (slot < self.filled[:, None])[:, None]
        last = torch.iinfo(torch.int32).max
        order = torch.where(there, self.place, last).sort(dim=-1, stable=True).indices
        place = torch.where(there, self.place.gather(2, order).long(), -1)
        k, v = (gather_rows(x, order).masked_fill(~there[..., None], 0) for x in (self.k, self.v))
        read = place.amax((1, 2)) + 1
        q_pos = ring_positions(read - 1, self.lookback) if self.lookback else read.new_empty(len(read), 0)
        q = self.queries.masked_fill((q_pos < 0)[:, None, :, None], 0)
        scores = self.later_scores(q, q_pos, k, v, place, self.filled)
        newest = place >= (read - self.recent(read))[:, None, None]
        rank = newest_first(scores, newest).masked_fill(~there, float("-inf"))
        chosen = best_tokens(rank, N)
        self.k.copy_(gather_rows(k, chosen)), self.v.copy_(gather_rows(v, chosen))
        self.place.copy_(place.gather(2, chosen))
        self.filled.copy_(self.stay(place, read).minimum(self.filled))
