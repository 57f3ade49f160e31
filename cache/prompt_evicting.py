"""Evicts from the prompt only, once it is read; decoded tokens stay. Three knobs apply to every way of scoring:

adaptive (AdaKV, Feng et al. 2024): a layer's budget goes to the best tokens of all its KV heads together. Heads then
hold different numbers of tokens, one head's slots after another's; the total is that of equal shares.
value_aware (CriticalKV, Feng et al. 2025): a part of a head's tokens is chosen by score, the rest by the score times
the size of what the token's value adds to the layer's output, |W_O v|_1.
chunk_length (ChunkKV, Liu et al. 2025): neighbours stay together. A chunk's score is the mean of its tokens', summed
over the layer's heads, which so keep the same chunks; the last one is cut to the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.base import Attended, knob
from cache.evicting import Evicting
from kernels.prompt_scores import best_tokens, newest_first
from kernels.ragged_attention import ragged_append, ragged_attention, spans
from runtime.errors import InputError


class PromptEvicting(Evicting):
    evicts = False
    first: Tensor  # int64 [B, Hkv + 1], adaptive only: each head's first slot of the row's Hkv * N, then the end

    @dataclass
    class Args(Evicting.Args):
        decode_slots: int = knob(512, "slots for decoded tokens if max_new_tokens is not known (ours)", 0)
        adaptive: bool = knob(False, "share a layer's budget over its KV heads by score (AdaKV)")
        safeguard: float = knob(0.2, "with adaptive: the part of the budget guaranteed to each head (AdaKV)", 0, 1)
        value_aware: bool = knob(False, "after the best by score, choose by score times |W_O v|_1 (CriticalKV)")
        first_stage: float = knob(0.5, "with value_aware: the part chosen by score alone (CriticalKV)", 0, 1)
        chunk_length: int = knob(
            0, "tokens of a chunk that stays or goes as a whole (ChunkKV: 10; kvpress: 20); 0: off", 0
        )

        def __post_init__(self):
            super().__post_init__()
            if self.chunk_length and (self.adaptive or self.value_aware):
                raise InputError(
                    "chunk_length keeps the same chunks in all heads: use adaptive=False and value_aware=False"
                )

    def decode_slots(self):
        return self.args.decode_slots if self.shape.max_new_tokens is None else self.shape.max_decoded

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        if args.adaptive:
            if shape.ranks.size > 1:
                raise InputError(f"{type(self).__name__}: adaptive shares a layer's slots among all its heads, which "
                                 f"{shape.ranks.size} processes hold separately: use adaptive=False")  # fmt: skip
            self.joins_heads = True
            self.buffer("first", (shape.max_batch, shape.n_kv_head + 1), torch.int64)
            self.reset()
        self.joins_heads = self.joins_heads or args.chunk_length > 0

    # ---- the prompt ----

    def keep(self, k, v, scores, lengths, place=None, read=None):
        (B, H, S, _), t = k.shape, torch.arange(k.shape[2], device=k.device)
        recent, kept = self.recent(lengths), self.num_kept(lengths)
        before = (t < (lengths - recent)[:, None])[:, None]
        scores = scores.expand(B, H, S).masked_fill(~before, float("-inf"))
        if self.args.chunk_length:
            scores = self.sum_over_ranks(chunk_means(scores, before, self.args.chunk_length).sum(1, keepdim=True))
        count = (kept - recent)[:, None].expand(B, H)  # tokens of each head beside its recent ones
        if self.args.adaptive:
            count = shared_budget(scores, kept - recent, self.args.safeguard)
        if self.args.value_aware:
            first = ranks(scores) < (count * self.args.first_stage).long()[..., None]
            least = scores.masked_fill(scores == -math.inf, math.inf).amin(-1, keepdim=True).clamp(max=0)
            # from 0 on, or a large value would let a score below 0 fall further
            scores = ((scores - least) * self.value_sizes(v)).masked_fill(first, float("inf"))
            scores = scores.masked_fill(~before, float("-inf"))
        if not self.args.adaptive:
            return super().keep(k, v, scores, lengths, place, read)
        count = count + recent[:, None]
        self.first[:B, 1:] = (count - kept[:, None] + self.k.shape[2]).cumsum(1)  # heads get equally many free slots
        newest = ~before & (t < lengths[:, None])[:, None]
        order = best_tokens(newest_first(scores, newest), S)
        # every slot takes a token of the head that it lies in; what lies behind a head's last one is never read
        slot = torch.arange(H * self.k.shape[2], device=k.device).repeat(B, 1)  # of a row
        head = torch.searchsorted(self.first[:B, 1:].contiguous(), slot, right=True)
        nth = (slot - self.first[:B].gather(1, head)).clamp(max=S - 1)
        token = order.flatten(1).gather(1, head * S + nth)  # [B, Hkv * N]
        row = torch.arange(B, device=k.device)[:, None]
        for store, x in ((self.k, k), (self.v, v)):
            store.flatten(1, 2)[:B] = x.flatten(1, 2)[row, head * S + token]
        self.place.flatten(1, 2)[:B] = token.int()
        self.filled[:B] = kept

    def value_sizes(self, v: Tensor) -> Tensor:
        """|W_O v|_1 for v [B, Hkv, S, D], averaged over a group's query heads -> fp32 [B, Hkv, S]."""
        if self.output_weights is None:
            raise InputError(f"{type(self).__name__}: value_aware needs the model's W_O: set `output_weights`")
        w, g = self.output_weights().float(), self.shape.n_head // self.shape.n_kv_head
        if len(w) < g:
            raise InputError(f"{type(self).__name__}: value_aware needs W_O of all {g} query heads of a KV head, and "
                             f"this process holds {len(w)}: start no more processes than KV heads")  # fmt: skip
        w = w.unflatten(0, (-1, g))
        w = w if self.heads is None else w[self.heads.to(w.device)]
        out = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
        for row, head in product(*map(range, v.shape[:2])):
            out[row, head] = sum((v[row, head].float() @ each).abs().sum(-1) for each in w[head]) / w.shape[1]
        return out

    # ---- heads of different lengths ----

    def spans(self, B: int) -> tuple[Tensor, Tensor]:
        """Each head's first slot and the end of its filled slots, both [B, Hkv], within its row."""
        return spans(self.first[:B], self.filled[:B], self.k.shape[2])

    def append(self, k, v, pos):
        if not self.args.adaptive:
            return super().append(k, v, pos)
        ragged_append(k, v, pos, self.k, self.v, self.place, self.first, self.filled)  # full: see `maintain`

    def attend(self, q, idx, count, pos):
        if not self.args.adaptive or idx is not None:
            return super().attend(q, idx, count, pos)
        return ragged_attention(q, self.k, self.v, self.first, self.filled)

    def attended(self, q, idx, count, pos):
        if not self.args.adaptive:
            return super().attended(q, idx, count, pos)
        start, stop = self.spans(len(q))
        slot = start[..., None] + torch.arange(int((stop - start).max()), device=q.device)
        there, row = slot < stop[..., None], torch.arange(len(q), device=q.device)[:, None, None]
        slot = torch.where(there, slot, 0)
        k, v, place = (x.flatten(1, 2)[row, slot] for x in (self.k, self.v, self.place))
        return Attended(torch.where(there, place.long(), -2), q, k, v)

    def reset(self):
        super().reset()
        if self.args.adaptive:
            self.first.copy_(torch.arange(self.first.shape[1], device=self.first.device) * self.k.shape[2])

    def layout(self, tokens):
        """Adaptive heads lie one after another, each before its free slots: their number decides every slot."""
        names = ("k", "v", "place", "first") if self.args.adaptive else ()
        return dict.fromkeys(names, self.k.shape[2])

    def carry(self, name, saved, layout, pos):
        first, (H, N) = saved["first"], self.k.shape[1:3]
        moved = first + (N - layout) * torch.arange(H + 1, device=first.device)
        if name == "first":
            return moved
        row, slot = (torch.arange(n, device=first.device) for n in (len(first), H * N))
        head = torch.searchsorted(moved[:, 1:].contiguous(), slot.repeat(len(row), 1), right=True)
        at = (first.gather(1, head) + slot - moved.gather(1, head)).clamp(max=H * layout - 1)
        return saved[name].flatten(1, 2)[row[:, None], at].unflatten(1, (H, N))

    def traffic(self, pos):
        lists = 8 * (self.shape.n_kv_head + 1) if self.args.adaptive else 0
        return super().traffic(pos) + self.shape.max_batch * lists


def ranks(scores: Tensor) -> Tensor:
    """Each token's rank by score, 0 for the best; of equal scores the first comes first: [..., S] -> int64 [..., S]."""
    return best_tokens(scores, scores.shape[-1]).argsort(-1)


def chunk_means(scores: Tensor, counted: Tensor, size: int) -> Tensor:
    """The mean score of each token's chunk of `size` tokens, of which those count that counted [B, 1, S] says; -inf for
    others: scores [B, H, S] -> [B, H, S]."""
    S, both = scores.shape[2], (scores.masked_fill(~counted, 0), counted.float())
    size = min(size, S)
    total, n = (F.pad(x, (0, -S % size)).unflatten(2, (-1, size)).sum(3) for x in both)
    means = (total / n.clamp(min=1)).repeat_interleave(size, 2)[:, :, :S]
    return means.masked_fill(~counted, float("-inf"))


def shared_budget(scores: Tensor, n: Tensor, safeguard: float) -> Tensor:
    """How many tokens each head keeps of scores [B, H, S], -inf for padding: the best H * n of all heads together, n
    [B], among which each head's best safeguard * n always are -> int64 [B, H]."""
    B, H, S = scores.shape
    safe = ranks(scores) < (n.double() * safeguard).long()[:, None, None]
    order = best_tokens(scores.masked_fill(safe, float("inf")).flatten(1), H * S)
    among = torch.arange(H * S, device=n.device) < H * n[:, None]
    return torch.zeros(B, H, dtype=torch.int64, device=n.device).scatter_add_(1, order // S, among.long())
