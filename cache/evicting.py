"""A cache of fixed slots: a subclass scores the prompt's tokens, and the lowest score makes room for a new token.

    class Mine(Evicting):
        def prompt_scores(self, mass, lengths):    # [B, Hkv, S], what the prompt's last queries look at
            return mass

        def observe(self, weights):                # [B, Hkv, N], what this step looked at; leave it out to freeze
            self.score[: len(weights)] += weights

The weights are those of the attention itself: neither a prompt nor a step computes them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob
from cache.budget import budget_cap, budget_tokens, check_budget
from kernels.dense_attention import decode_attention
from kernels.gather_attention import gather_rows
from kernels.observed_attention import observed_attention, prefill_attention_mass


class Evicting(KVMethod):
    lossless = dict(budget=1.0)
    stress = dict(budget=24, recent=8)
    lookback: ClassVar[int | None] = 32  # the prompt's last queries whose attention is its score; None: of all of them

    k: Tensor  # [B, Hkv, N, D] rotated, in any order
    v: Tensor
    score: Tensor  # fp32 [B, Hkv, N]: the lowest is evicted
    place: Tensor  # int32 [B, Hkv, N]: positions in the text
    filled: Tensor  # int64 [B]: slots in use, the first ones

    @dataclass
    class Args:
        budget: int | float = knob(0.25, "tokens kept, or their share of the length; recent included")
        recent: int = knob(32, "newest tokens, never evicted", low=1)

        def __post_init__(self):
            check_budget(self.budget)

    # ---- what a subclass says ----

    def prompt_scores(self, mass: Tensor, lengths: Tensor) -> Tensor:
        """mass fp32 [B, Hkv, S], the attention of the last `lookback` queries and the group's heads to each token of
        the prompts, lengths [B] -> scores [B, Hkv or 1, S]."""
        return mass

    observe: ClassVar = None  # (weights fp32 [B, Hkv, N] of a step, summed over the group): updates self.score in place

    def layer_budget(self) -> int | float:
        """The budget of this layer, as `budget`: self.layer is one of self.shape.n_layer."""
        return self.args.budget

    def room(self) -> int:
        """Slots beyond the budget, for decoded tokens: none are evicted before they are full."""
        return 0

    # ---- storage ----

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.budget = self.layer_budget()
        B, H, T, D = shape.kv
        N = min(T, max(budget_cap(self.budget, T), args.recent) + self.room())
        self.buffer("k", (B, H, N, D)), self.buffer("v", (B, H, N, D))
        self.buffer("score", (B, H, N), torch.float32)
        self.buffer("place", (B, H, N), torch.int32)
        self.buffer("filled", (B,), torch.int64)

    def prefill(self, q, k, v, lengths):
        q, k = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        y, mass = prefill_attention_mass(q, k, v, lengths, self.lookback)
        self._keep(k, v, self.prompt_scores(mass, lengths), lengths)
        return y

    def compress(self, q, k, v, lengths):
        _, mass = prefill_attention_mass(q, k, v, lengths, self.lookback)
        self._keep(k, v, self.prompt_scores(mass, lengths), lengths)

    def _keep(self, k, v, score, lengths):
        """The newest tokens, and of the others those of the highest score."""
        (B, H, S, _), t = k.shape, torch.arange(k.shape[2], device=k.device)
        newest, outside = t >= lengths[:, None] - self.args.recent, t >= lengths[:, None]
        rank = score.expand(B, H, S).masked_fill(newest[:, None], float("inf"))
        rank = rank.masked_fill(outside[:, None], float("-inf"))
        # a stable sort takes the same of equal scores, however far the batch is padded
        keep = rank.sort(dim=-1, descending=True, stable=True).indices[..., : self.k.shape[2]]
        n = keep.shape[2]
        self.k[:B, :, :n], self.v[:B, :, :n] = gather_rows(k, keep), gather_rows(v, keep)
        self.score[:B, :, :n], self.place[:B, :, :n] = score.expand(B, H, S).gather(2, keep), keep.int()
        self.filled[:B] = self._limit(lengths, 0).minimum(lengths)

    def _limit(self, length, room):
        """How many tokens a row of `length` [B] may hold."""
        wanted = budget_tokens(self.budget, length).clamp(min=self.args.recent)
        return (wanted + room).clamp(max=self.k.shape[2])

    # ---- one token per row ----

    def append(self, k, v, pos):
        """Into the next free slot, or, where the row holds what it may, in place of the lowest score."""
        (B, H), filled = k.shape[:2], self.filled[: len(k)]
        slot_of = torch.arange(self.k.shape[2], device=k.device)
        fixed = (self.place[:B] > (pos - self.args.recent)[:, None, None]) | (slot_of >= filled[:, None])[:, None]
        lowest = self.score[:B].masked_fill(fixed, float("inf")).argmin(-1)  # [B, Hkv], the first of equals
        grows = filled < self._limit(pos + 1, self.room())
        slot = torch.where(grows[:, None], filled[:, None], lowest)
        row, head = torch.arange(B, device=k.device)[:, None], torch.arange(H, device=k.device)
        self.k[row, head, slot], self.v[row, head, slot] = k, v
        self.score[row, head, slot], self.place[row, head, slot] = 0.0, pos[:, None].int().expand(B, H)
        self.filled[:B] = filled + grows

    def attend(self, q, idx, count, pos):
        filled = self.filled[: len(q)]
        if self.observe is None:
            return decode_attention(q, self.k, self.v, torch.zeros_like(filled), filled)
        y, weights = observed_attention(q, self.k, self.v, filled)
        self.observe(weights)
        return y

    def attended(self, q, idx, count, pos):
        B, slot = len(q), torch.arange(self.k.shape[2], device=q.device)
        there = (slot < self.filled[:B, None])[:, None]
        return Attended(torch.where(there, self.place[:B].long(), -2), q, self.k[:B], self.v[:B])

    def reset(self):
        self.filled.zero_()

    def traffic(self, pos):
        s, tokens = self.shape, min(pos + 1, self.k.shape[2])
        return s.max_batch * (s.n_kv_head * tokens * (2 * s.head_dim * s.dtype.itemsize + 8) + 8)
