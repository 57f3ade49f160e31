"""Keeps all tokens and attends to a few; a subclass scores the tokens at every step.

    class Mine(Selecting):
        def scores(self, q, pos):        # q [B, Hq, D] rotated, pos [B] -> fp32 [B, Hkv, T]
            ...

is a method with a budget, sinks and a recent window, beside its own knobs. If it also estimates each query head's
`logits`, the budget may be a share of the attention, `budget=p0.95`, and a knob `heads` of type `Heads` may choose the
list of a KV head by softmax or largest logit, or one list per query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cache.base import Attended, knob
from cache.budget import Selection, TopP, min_tokens
from cache.dense import Dense
from kernels.gather_attention import gather_attention, gather_rows, weighted_gather_attention
from kernels.select import budget_select
from kernels.top_p import group_weights, top_p_count
from runtime.errors import InputError

# What chooses the list of a KV head: its group's sum of q . k, mean softmax or largest logit; or "query", one list for
# each query head, which reads g lists.
Heads = Literal["group", "softmax", "max", "query"]


class Selecting(Dense):
    lossless = dict(budget=1.0)
    stress = dict(budget=24, sinks=4, recent=16)

    by_query: bool = False  # every query head has a list of its own: scores are [B, Hq, T]

    @dataclass
    class Args:
        budget: int | float | TopP = knob(0.125, "tokens attended, sinks and recent included")
        sinks: int = knob(4, "first tokens always attended", low=0)
        recent: int = knob(16, "newest tokens always attended", low=1)
        cap: int | float = knob(0.25, "most tokens attended with budget=p0.95 (ours; Twilight: 8192 of 32K)")
        min_tokens: int = min_tokens()

        def __post_init__(self):
            self.selection()

        def selection(self) -> Selection:
            budget = self.cap if isinstance(self.budget, TopP) else self.budget
            return Selection(budget, self.sinks, self.recent, min_tokens=self.min_tokens)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.selection = args.selection()
        self.k_static = self.selection.of(shape.max_seq_len)
        self.p = args.budget.p if isinstance(args.budget, TopP) else None
        self.by = getattr(args, "heads", "group")  # of type Heads
        self.by_query = self.by == "query"
        if self.p is not None:
            if type(self).logits is Selecting.logits:
                name = type(self).__module__.rpartition(".")[2]
                raise InputError(f"{name} does not estimate logits: give its budget as a number or a share, not p")
            self.note_reads()

    def scores(self, q: Tensor, pos: Tensor) -> Tensor:
        """How much each token matters to this step: q [B, Hq, D], pos [B] -> [B, Hkv, T].

        Tokens after pos may score anything. The selection is made once per KV head, so reduce over the group's queries;
        or once per query head, [B, Hq, T], which reads g times as much.
        """
        raise NotImplementedError

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        """Estimates of q . k / sqrt(D), on that scale: q [B, Hq, D], pos [B] -> fp32 [B, Hq, T]."""
        raise NotImplementedError

    def weights(self, logits: Tensor, pos: Tensor) -> Tensor:
        """Estimated attention: logits [B, Hq, T] -> fp32 [B, Hkv, T], the mean softmax of each group; [B, Hq, T] if
        `by_query`."""
        lists = logits.shape[1] if self.by_query else self.shape.n_kv_head
        return group_weights(logits.unflatten(1, (lists, -1)), pos)

    def ranked(self, q: Tensor, pos: Tensor, last: Tensor | None = None) -> Tensor:
        """The scores that a list is chosen by, according to `heads`: fp32 [B, Hkv, T], or [B, Hq, T] if `by_query`.
        last [B]: the last filled slot, if it is not at pos."""
        if self.by == "softmax":
            return self.weights(self.logits(q, pos), pos if last is None else last)
        if self.by == "max":
            return self.logits(q, pos).unflatten(1, (self.shape.n_kv_head, -1)).amax(2)
        return self.scores(q, pos)

    def select(self, q, pos):
        if self.p is None:
            return self.pick(self.ranked(q, pos), pos)
        return self.pick_mass(self.weights(self.logits(q, pos), pos), pos)

    def wanted(self, pos: Tensor) -> Tensor:
        """How many tokens the budget allows with the newest at pos [B] -> [B] int64."""
        return self.once_a_step(pos, "wanted", lambda: self.selection.at(pos + 1))

    def pick(self, scores: Tensor, pos: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `wanted` [B] or [B, H] best tokens by scores [B, H, T] -> idx, count; None: as many as the budget."""
        a, wanted = self.args, self.wanted(pos) if wanted is None else wanted
        return budget_select(scores, pos, wanted, self.k_static, a.sinks, a.recent)

    def pick_mass(self, weights: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The fewest tokens, sinks and recent ones included, whose weights [B, H, T] reach p; at most `cap`."""
        assert self.p is not None
        need = top_p_count(weights, pos, self.p, self.args.sinks, self.args.recent)
        idx, count = self.pick(weights, pos, need.minimum(self.wanted(pos)[:, None]))
        self.note_read(count, pos)
        return idx, count

    def log_weights(self, idx: Tensor, count: Tensor, pos: Tensor) -> Tensor | None:
        """Terms added to the logits of a list's tokens, fp32 [B, Hkv, K] like idx, for tokens that were drawn or that
        others were merged into. None, the default, adds nothing."""
        return None

    def attend(self, q, idx, count, pos):
        H, weights = self.shape.n_kv_head, self.log_weights(idx, count, pos)
        gather: Any = gather_attention if weights is None else weighted_gather_attention
        given = (idx, count) if weights is None else (idx, count, weights)
        if idx.shape[1] <= H:
            return gather(q, self.k, self.v, *given)
        # each query head of a group attends to its own list
        parts = zip(*(x.unflatten(1, (H, -1)).unbind(2) for x in (q, *given)), strict=True)
        each = [gather(q.contiguous(), self.k, self.v, *lists) for q, *lists in parts]
        return torch.stack(each, 2).flatten(1, 2)

    def attended(self, q, idx, count, pos):
        chosen = torch.arange(idx.shape[2], device=idx.device) < count[..., None]
        at = torch.where(chosen, idx, 0)
        k, v = (x.repeat_interleave(max(1, idx.shape[1] // x.shape[1]), 1) for x in (self.k, self.v))
        weights = self.log_weights(idx, count, pos)
        tokens = None if weights is None else weights.exp()
        return Attended(torch.where(chosen, idx, -2), q, gather_rows(k, at), gather_rows(v, at), tokens)

    # ---- accounting ----

    def score_bytes(self, pos: int) -> int:
        """Bytes that `scores` reads for one row and KV head, with the newest token at pos."""
        return 0

    def lists(self) -> int:
        """The number of lists per KV head: one, or with `by_query` one per query head."""
        return self.shape.n_head // self.shape.n_kv_head if self.by_query else 1

    def scorings(self) -> int:
        """How often a KV head's tokens are scored: once for the group's sum, else once per query head."""
        each = self.p is not None or self.by in ("softmax", "max", "query")
        return self.shape.n_head // self.shape.n_kv_head if each else 1

    def chosen(self, pos: int) -> int:
        """The number of tokens attended, with the newest at pos. With a share p it is the noted one, or the cap before
        any step."""
        return self.tokens_read(pos) or self.selection.of(pos + 1)

    def traffic(self, pos):
        """Bytes that scoring reads, and those of the chosen tokens' keys and values."""
        heads = self.shape.max_batch * self.shape.n_kv_head
        return heads * (self.score_bytes(pos) + self.lists() * self.chosen(pos) * self.token_bytes())
