"""A cache of fixed slots: a subclass scores the prompt's tokens, and the lowest score makes room for a new token.

    class Mine(Evicting):
        def prompt_scores(self, mass, lengths):    # [B, Hkv, S], what the prompt's last queries look at
            return mass

        def observe(self, weights):                # [B, Hkv, N], what this step looked at; leave it out to freeze
            self.score[: len(weights)] += weights

The weights are those of the attention itself: neither a prompt nor a step computes them twice. With evicts = False
what is decoded stays: only the prompt is compressed, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cache.base import Attended, KVMethod, knob
from cache.budget import budget_tokens, check_budget
from errors import InputError
from kernels.dense_attention import decode_attention
from kernels.gather_attention import gather_rows
from kernels.observed_attention import last_mass, observed_attention, prefill_attention_mass
from kernels.prompt_scores import best_tokens


class Evicting(KVMethod):
    lossless = dict(budget=1.0)
    stress = dict(budget=24, recent=8)
    lookback: int | None = 32  # the prompt's last queries whose attention is its score; None: of all of them
    group: Literal["sum", "max"] = "sum"  # of the attention of a group's query heads
    evicts: ClassVar[bool] = True  # False: a prompt loses tokens, a decoded token takes one of the slots of `room`

    k: Tensor  # [B, Hkv, N, D] rotated, in any order
    v: Tensor
    score: Tensor  # fp32 [B, Hkv, N]: the lowest is evicted; not there if none is
    place: Tensor  # int32 [B, Hkv, N]: positions in the text
    filled: Tensor  # int64 [B]: slots in use, the first ones

    @dataclass
    class Args:
        budget: int | float = knob(0.25, "tokens kept, or their share of the length; recent included")
        recent: int = knob(32, "newest tokens, never evicted", low=1)

        def __post_init__(self):
            check_budget(self.budget)
            if isinstance(self.budget, int) and self.budget < self.recent:
                raise InputError(f"the budget of {self.budget} tokens is smaller than its {self.recent} recent ones")

    # ---- what a subclass says ----

    def prompt_scores(self, mass: Tensor, lengths: Tensor) -> Tensor:
        """mass fp32 [B, Hkv, S], the attention of the last `lookback` queries, by `group` of its heads, to each token
        of the prompts, lengths [B] -> scores [B, Hkv or 1, S]."""
        return mass

    # (weights fp32 [B, Hkv, N] of a step, summed over the group): updates self.score in place
    observe: ClassVar[Any] = None

    def recent(self, length: Tensor) -> Tensor:
        """How many of the newest tokens are never evicted, at lengths [B] -> [B] int64."""
        return budget_tokens(self.args.recent, length)

    def held(self, length: Tensor) -> Tensor:
        """How many tokens a row holds at most, `room` aside, at lengths [B] -> [B] int64, at most the length.

        A layer may have a budget of its own: self.layer is one of self.shape.n_layer.
        """
        return budget_tokens(self.args.budget, length).maximum(self.recent(length))

    def most_held(self, n: int) -> int:
        """The largest `held` of all lengths up to n."""
        return int(self.held(torch.arange(1, n + 1)).max())

    def room(self) -> int:
        """Slots beyond the budget, for decoded tokens: none are evicted before they are full."""
        return 0

    # ---- storage ----

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        N = min(T, self.most_held(T) + self.room())
        self.buffer("k", (B, H, N, D)), self.buffer("v", (B, H, N, D))
        if self.evicts:
            self.buffer("score", (B, H, N), torch.float32)
        self.buffer("place", (B, H, N), torch.int32)
        self.buffer("filled", (B,), torch.int64)

    def prefill(self, q, k, v, lengths):
        q, k = self.rope.rotate_prompt(q), self.rope.rotate_prompt(k)
        y, mass = prefill_attention_mass(q, k, v, lengths, self.lookback, group=self.group)
        self._keep(k, v, self.prompt_scores(mass, lengths), lengths)
        return y

    def compress(self, q, k, v, lengths):
        if self.lookback is None:
            mass = prefill_attention_mass(q, k, v, lengths, None)[1]
        else:
            mass = last_mass(q, k, lengths, self.lookback, group=self.group)
        self._keep(k, v, self.prompt_scores(mass, lengths), lengths)

    def _keep(self, k, v, score, lengths):
        """The newest tokens, and of the others those of the highest score."""
        (B, H, S, _), t = k.shape, torch.arange(k.shape[2], device=k.device)
        newest, outside = t >= (lengths - self.recent(lengths))[:, None], t >= lengths[:, None]
        rank = score.expand(B, H, S).masked_fill(newest[:, None], float("inf"))
        rank = rank.masked_fill(outside[:, None], float("-inf"))
        keep = best_tokens(rank, self.k.shape[2])
        n = keep.shape[2]
        self.k[:B, :, :n], self.v[:B, :, :n] = gather_rows(k, keep), gather_rows(v, keep)
        self.place[:B, :, :n] = keep.int()
        if self.evicts:
            self.score[:B, :, :n] = score.expand(B, H, S).gather(2, keep)
        self.filled[:B] = self.held(lengths)

    # ---- one token per row ----

    def append(self, k, v, pos):
        """Into the next free slot, or, where the row holds what it may, in place of the lowest score."""
        (B, H), filled = k.shape[:2], self.filled[: len(k)]
        slots = self.k.shape[2]
        # nothing decoded is lost: what a longer prompt would keep, which may be less, does not matter
        most = (self.held(pos + 1) + self.room()).clamp(max=slots) if self.evicts else slots
        grows = filled < most
        slot = filled[:, None].clamp(max=slots - 1)
        if self.evicts:
            slot = torch.where(grows[:, None], slot, self._lowest(pos))  # [B, Hkv]
        row, head = torch.arange(B, device=k.device)[:, None], torch.arange(H, device=k.device)
        self.k[row, head, slot], self.v[row, head, slot] = k, v
        self.place[row, head, slot] = pos[:, None].int().expand(B, H)
        if self.evicts:
            self.score[row, head, slot] = 0.0
        self.filled[:B] = filled + grows

    def _lowest(self, pos):
        """[B, Hkv], the slot of the lowest score among those of tokens that are not recent; the first of equals."""
        B, slot = len(pos), torch.arange(self.k.shape[2], device=pos.device)
        recent = self.place[:B] > (pos - self.recent(pos + 1))[:, None, None]
        fixed = recent | (slot >= self.filled[:B, None])[:, None]
        return self.score[:B].masked_fill(fixed, float("inf")).argmin(-1)

    def attend(self, q, idx, count, pos):
        filled = self.filled[: len(q)]
        if self.observe is None:
            return decode_attention(q, self.k, self.v, None, filled)
        y, weights = observed_attention(q, self.k, self.v, filled)
        self.observe(weights)
        return y

    def attended(self, q, idx, count, pos):
        B, slot = len(q), torch.arange(self.k.shape[2], device=q.device)
        there = (slot < self.filled[:B, None])[:, None]
        return Attended(torch.where(there, self.place[:B].long(), -2), q, self.k[:B], self.v[:B])

    def maintain(self, step):
        if not self.evicts and self.room() < step and self.k.shape[2] < self.shape.max_seq_len:
            raise InputError(
                f"{type(self).__name__}: after {step} decoded tokens their {self.room()} slots are full: set the cache "
                "up with max_new_tokens, or give more room"
            )

    def reset(self):
        self.filled.zero_()

    def traffic(self, pos):
        """All of `pos` taken as prompt, where decoded tokens come on top: see `room`."""
        s, tokens = self.shape, int(self.held(torch.tensor([pos + 1])))
        ranks = 8 if self.evicts else 0  # score and place
        return s.max_batch * (s.n_kv_head * tokens * (2 * s.head_dim * s.dtype.itemsize + ranks) + 8)
