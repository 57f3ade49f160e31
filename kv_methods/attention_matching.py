"""Attention Matching: a prompt becomes few keys and values, fitted so that queries get the same attention from them.

Of each KV head, a few keys stay as they are. For reference queries, a weight per key is fitted by least squares so that
the weighted sum of exp(q . k / sqrt(D)) is that over all keys, and its logarithm is added to the key's logits ever
after. Then values are fitted so that the attention output is that of all values. Reference queries are the prompt's, or
those with which the model repeats it. Keys are chosen by their attention, or one after another by orthogonal matching
pursuit: the key that best explains what is missing of the sums. Decoded tokens stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import knob
from cache.evicting import Evicting
from cache.prompt import Text
from kernels.gather_attention import weighted_gather_attention
from kernels.prompt_scores import best_tokens

ASK = "\n\nRepeat the previous context."  # published: followed by the context
RIDGE = 1e-6  # part of the mean diagonal added to normal equations (ours: some are singular)
BOUNDS = dict(attention=(math.exp(-3), math.exp(3)), omp=(1e-12, math.exp(7)))  # of weights (published code)
STEPS = dict(attention=2, omp=0)  # of projected gradient after the bounds are imposed (published code)
AT_ONCE, EVERY = 4, 2  # omp: keys chosen at a time, and how often weights are fitted anew (published: AM-OMP-fast)


class AttentionMatching(Evicting):
    paper = "Zweiger, Fu et al. 2026, Fast KV Compaction via Attention Matching"
    stress = dict(budget=12)
    lookback = 0
    evicts = False
    deviates = frozenset({"copies"})  # attention with a bias per slot has no kernel yet
    asked: tuple[Tensor, Tensor] | None = None  # queries [B, Hq, n, D] of the repetition, and how many [B]
    bias: Tensor  # fp32 [B, Hkv, N]: what is added to a slot's logits

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(0.1, "keys that a prompt is compacted to, or their share (paper: 1/10 to 1/50)")
        recent: int = knob(0, "last tokens of a prompt whose keys are chosen in any case (ours)", low=0)
        keys: Literal["attention", "omp"] = knob(
            "attention", "choose by mean squared attention (the cheapest), or by matching pursuit (the best)"
        )
        queries: Literal["prompt", "repeat"] = knob(
            "prompt", "reference queries: the prompt's, or of a second reading that repeats it (repeat-prefill)"
        )
        samples: int = knob(512, "reference queries of each query head, evenly spaced (ours: published up to 50000)", 1)
        decode_slots: int = knob(512, "slots for decoded tokens if max_new_tokens is not known (ours)", 0)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.buffer("bias", self.place.shape, torch.float32)
        self.most = self.max_kept(shape.max_seq_len)  # keys of a prompt
        self.exact_prefill = args.queries == "prompt"  # nothing can be stored before the prompt is read again

    def decode_slots(self):
        return self.args.decode_slots if self.shape.max_new_tokens is None else self.shape.max_decoded

    # ---- the prompt ----

    def second_pass(self, tokens, lengths, encode):
        if self.args.queries == "prompt":
            return ()
        ask = torch.tensor(encode(ASK), dtype=torch.int64, device=tokens.device)
        return [Text(torch.cat((ask.expand(len(tokens), -1), tokens), 1), lengths + len(ask))]

    def reread(self, q, k, v, lengths, text):
        self.asked = q, text.lengths
        return super().reread(q, k, v, lengths, text)

    def store_prompt(self, q, k, q_rot, k_rot, v, lengths):
        (queries, n), self.asked = self.asked or (q_rot, lengths), None
        kept = self.num_kept(lengths)
        self.filled[: len(k)] = kept
        for b in range(len(k)):  # a row at a time: weights of all reference queries are held
            row = slice(b, b + 1)
            some, there = self.references(queries[row], n[row], k.shape[1])
            fitted = self.compact(some, there, k_rot[row].double(), v[row].double(), lengths[row], kept[row])
            for buffer, x in zip((self.k, self.v, self.bias, self.place), fitted, strict=True):
                buffer[row, :, : x.shape[2]] = x.to(buffer.dtype)

    def references(self, q: Tensor, n: Tensor, n_kv_head: int) -> tuple[Tensor, Tensor]:
        """`samples` evenly spaced of n [B] queries q [B, Hq, S, D] -> [B, Hkv, g * samples, D], and which are there."""
        most = min(self.args.samples, q.shape[2])
        i, taken = torch.arange(most, device=q.device), n.clamp(max=most)[:, None]
        at = (i * ((n[:, None] - 1) / (taken - 1).clamp(min=1).double())).round().long().clamp(max=q.shape[2] - 1)
        some = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])).double()
        there = (i < taken)[:, None].expand(-1, q.shape[1] // n_kv_head, -1).flatten(1)
        return some.unflatten(1, (n_kv_head, -1)).flatten(2, 3), there[:, None, :, None]

    def compact(
        self, q: Tensor, there: Tensor, k: Tensor, v: Tensor, lengths: Tensor, kept: Tensor
    ) -> tuple[Tensor, ...]:
        """q [B, H, n, D], of which those count that are there [B, 1, n, 1], k and v [B, H, S, D] -> keys and values
        [B, H, N, D], biases and positions [B, H, N], of which the first kept [B] count."""
        t, n = torch.arange(k.shape[2], device=k.device), lengths.view(-1, 1, 1, 1)
        k, v = (x.masked_fill(t[:, None] >= n, 0) for x in (k, v))
        logits = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(t >= n, float("-inf"))  # [B, H, n, S]
        e = (logits - logits.amax(3, keepdim=True)).exp() * there
        total = e.sum(3, keepdim=True)
        p = e / total.masked_fill(~there, 1)
        newest = t >= (lengths - self.recent(lengths))[:, None, None]
        N = min(self.most, k.shape[2])
        if self.args.keys == "attention":
            place = best_tokens(p.square().sum(2).masked_fill(newest, float("inf")).masked_fill(t >= n[..., 0], -1), N)
        else:
            place = self.pursuit(e, total, newest, N)
        held = (torch.arange(N, device=k.device) < kept[:, None])[:, None]  # [B, 1, N]
        place = torch.where(held, place, k.shape[2]).sort(-1).values.clamp(max=k.shape[2] - 1)
        each, row = place[:, :, None].expand(-1, -1, e.shape[2], -1), place[..., None].expand(-1, -1, -1, k.shape[3])
        bias = self.weights(e.gather(3, each) * held[:, :, None], total, kept)[..., 0].log()
        matched = (logits.gather(3, each) + bias[:, :, None]).masked_fill(~held[:, :, None], float("-inf")).softmax(-1)
        values = least_squares(matched * there, p @ v, kept)
        whole = (kept == lengths).view(-1, 1, 1)  # nothing is left out
        values, bias = torch.where(whole[..., None], v.gather(2, row), values), bias.masked_fill(whole, 0)
        return k.gather(2, row), values, bias, place

    def weights(self, e: Tensor, total: Tensor, n: Tensor) -> Tensor:
        """w [B, H, N, 1] within the bounds, with which e [B, H, n, N] sums up to total; n [B] columns are keys."""
        low, high = BOUNDS[self.args.keys]
        w = least_squares(e, total, n).clamp(low, high)
        if STEPS[self.args.keys]:
            # of numbers out of range, which the logits will show, an SVD raises an exception
            step = torch.linalg.matrix_norm(e.nan_to_num(), 2)[..., None, None].square().clamp(min=1e-30)
        for _ in range(STEPS[self.args.keys]):
            w = (w - e.mT @ (e @ w - total) / step).clamp(low, high)
        return w

    def pursuit(self, e: Tensor, total: Tensor, newest: Tensor, N: int) -> Tensor:
        """N of the keys, one after another: the newest, then those whose e [B, H, n, S] is most like what is missing of
        total [B, H, n, 1]."""
        chosen, missing = newest.new_empty(*e.shape[:2], 0, dtype=torch.int64), total
        while (n := chosen.shape[2]) < N:
            if n and (n // AT_ONCE) % EVERY == 0:
                part = e.gather(3, chosen[:, :, None].expand(-1, -1, e.shape[2], -1))
                missing = total - part @ self.weights(
                    part, total, torch.full_like(newest[:, 0, 0], n, dtype=torch.int64)
                )
            like = (e.mT @ missing)[..., 0].masked_fill(newest, float("inf"))
            like = like.masked_fill(e.sum(2) == 0, float("-inf")).scatter(2, chosen, float("-inf"))
            chosen = torch.cat((chosen, best_tokens(like, min(AT_ONCE, N - n))), 2)
        return chosen

    # ---- one token per row ----

    def append(self, k, v, pos):
        self.bias[torch.arange(len(k), device=k.device), :, self.filled[: len(k)].clamp(max=self.bias.shape[2] - 1)] = 0
        super().append(k, v, pos)

    def attend(self, q, idx, count, pos):
        slot = torch.arange(self.k.shape[2], device=q.device).expand(len(q), 1, -1)
        return weighted_gather_attention(q, self.k, self.v, slot, self.filled[: len(q), None], self.bias[: len(q)])

    def attended(self, q, idx, count, pos):
        seen = super().attended(q, idx, count, pos)
        seen.tokens = self.bias[: len(q)].exp()
        return seen

    def traffic(self, pos):
        tokens = int(self.num_kept(torch.tensor([pos + 1])))
        return super().traffic(pos) + 4 * self.shape.max_batch * self.shape.n_kv_head * tokens


def least_squares(a: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """x [B, H, N, c] of the least |a x - y|: a [B, H, m, N], of which n [B] columns are not zero, y [B, H, m, c]."""
    moments = a.mT @ a
    ridge = RIDGE * (moments.diagonal(dim1=2, dim2=3).sum(-1) / n[:, None]).clamp(min=1e-30)[..., None, None]
    return torch.linalg.solve(moments + ridge * torch.eye(moments.shape[2], device=a.device, dtype=a.dtype), a.mT @ y)
