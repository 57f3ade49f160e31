"""Eviction while decoding, at intervals: decoded tokens fill free slots, and every so many steps the lowest scores go.

    class Mine(Compacting):
        def later_scores(self, q, at, k, v, place, filled):   # the newest queries, and what is held, as it stands in
            ...                                                # the text -> [B, Hkv, N]

With every = 0 nothing that is decoded goes. Scores are made between steps, outside the graph, of what the graph stored:
the slots themselves, and the newest `lookback` queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.evicting import Evicting
from kernels.gather_attention import gather_rows
from kernels.prompt_scores import best_tokens, newest_first
from kernels.ring import held


class Compacting(Evicting):
    evicts = False
    lookback: int
    every: int = 0  # steps between two evictions; 0: there are none

    queries: Tensor  # [B, Hq, lookback, D] rotated, that of position p in slot p % lookback
    prompt_len: Tensor  # int64 [B]

    # ---- what a subclass says ----

    def later_scores(self, q: Tensor, at: Tensor, k: Tensor, v: Tensor, place: Tensor, filled: Tensor) -> Tensor:
        """How much each held token is worth -> scores [B, Hkv, N]; what is never evicted may get infinity.

        q [B, Hq, W, D] of positions at [B, W], negative where there is none; k and v [B, Hkv, N, D] of positions place
        [B, Hkv, N], in the order of the text, of which the first filled [B] are there, zeros behind them. By default as
        of a prompt, by the attention of these queries.
        """
        H, there = k.shape[1], torch.arange(k.shape[2], device=k.device) < filled[:, None]
        seen = there[:, None, None] & (place[:, :, None] <= at[:, None, :, None])  # [B, Hkv, W, N]
        logits = q.unflatten(1, (H, -1)).float() @ k.float().mT[:, :, None] * q.shape[3] ** -0.5
        p = logits.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
        each = p.masked_fill((at < 0)[:, None, None, :, None], 0).sum(3)  # [B, Hkv, g, N]
        mass = each.sum(2) if self.group == "sum" else each.amax(2)
        return self.prompt_scores(q, k, v, mass.masked_fill(~there[:, None], 0), filled)

    def stay(self, place: Tensor, read: Tensor) -> Tensor:
        """How many tokens stay of those held, place [B, Hkv, N] (-1: none), when read [B] have come -> [B]."""
        return self.held(read)

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
        """The newest of prompts, q [B, Hq, S, D] rotated, lengths [B]."""
        if self.every:
            newest = held(lengths - 1, self.lookback).clamp(min=0)[:, None]  # [B, 1, W]
            self.queries[: len(q)] = gather_rows(q, newest.expand(-1, q.shape[1], -1))
            self.prompt_len[: len(q)] = lengths

    def attend(self, q, idx, count, pos):
        if self.every:
            self.queries[torch.arange(len(pos), device=pos.device), :, pos % self.lookback] = q
        return super().attend(q, idx, count, pos)

    def maintain(self, step):
        if not self.every:
            super().maintain(step)
        elif step % self.every == 0:
            self.compact()

    def compact(self) -> None:
        """Evict: what stays moves to the first slots."""
        N, slot = self.k.shape[2], torch.arange(self.k.shape[2], device=self.k.device)
        there = (slot < self.filled[:, None])[:, None]
        last = torch.iinfo(torch.int32).max
        order = torch.where(there, self.place, last).sort(dim=-1, stable=True).indices
        place = torch.where(there, self.place.gather(2, order).long(), -1)
        k, v = (gather_rows(x, order).masked_fill(~there[..., None], 0) for x in (self.k, self.v))
        read = place.amax((1, 2)) + 1
        at = held(read - 1, self.lookback)
        q = self.queries.masked_fill((at < 0)[:, None, :, None], 0)
        scores = self.later_scores(q, at, k, v, place, self.filled)
        newest = place >= (read - self.recent(read))[:, None, None]
        rank = newest_first(scores, newest).masked_fill(~there, float("-inf"))
        chosen = best_tokens(rank, N)
        self.k.copy_(gather_rows(k, chosen)), self.v.copy_(gather_rows(v, chosen))
        self.place.copy_(place.gather(2, chosen))
        self.filled.copy_(self.stay(place, read).minimum(self.filled))
