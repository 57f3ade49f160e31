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
        self.filled[: len(k)] = self.num_kept(lengths)
        for b, (T, N) in enumerate(zip(lengths.tolist(), self.filled[: len(k)].tolist(), strict=True)):
            at = torch.linspace(0, int(n[b]) - 1, min(int(n[b]), self.args.samples), device=k.device).round().long()
            one = queries[b, :, at].unflatten(0, (k.shape[1], -1)).flatten(1, 2)  # [Hkv, g * samples, D]
            self.k[b, :, :N], self.v[b, :, :N], self.bias[b, :, :N], self.place[b, :, :N] = self.compact(
                one.double(), k_rot[b, :, :T].double(), v[b, :, :T].double(), N
            )

    def compact(self, q: Tensor, k: Tensor, v: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [H, n, D], k and v [H, T, D] -> N keys and values [H, N, D], biases and positions [H, N]."""
        if k.shape[1] == N:
            return k, v, torch.zeros_like(k[..., 0]), torch.arange(N, device=k.device).expand(len(k), N)
        logits = q @ k.mT * q.shape[2] ** -0.5  # [H, n, T]
        e = (logits - logits.amax(2, keepdim=True)).exp()
        total = e.sum(2, keepdim=True)
        newest = torch.arange(k.shape[1], device=k.device) >= k.shape[1] - self.args.recent
        if self.args.keys == "attention":
            score = (e / total).square().mean(1).masked_fill(newest, float("inf"))
            place = best_tokens(score, N)
        else:
            place = self.pursuit(e, total, newest, N)
        place = place.sort(-1).values
        weight = self.weights(e.gather(2, place[:, None].expand(-1, e.shape[1], -1)), total)
        bias = weight[..., 0].log()
        p = (logits.gather(2, place[:, None].expand(-1, e.shape[1], -1)) + bias[:, None]).softmax(-1)
        values = least_squares(p, e / total @ v)
        return k.gather(1, place[..., None].expand(-1, -1, k.shape[2])), values, bias, place

    def weights(self, e: Tensor, total: Tensor) -> Tensor:
        """w [H, N, 1] within the bounds, with which e [H, n, N] sums up to total [H, n, 1]."""
        low, high = BOUNDS[self.args.keys]
        w = least_squares(e, total).clamp(low, high)
        step = torch.linalg.matrix_norm(e, 2)[..., None, None].square().clamp(min=1e-30)
        for _ in range(STEPS[self.args.keys]):
            w = (w - e.mT @ (e @ w - total) / step).clamp(low, high)
        return w

    def pursuit(self, e: Tensor, total: Tensor, newest: Tensor, N: int) -> Tensor:
        """N of the keys, one after another: those whose e [H, n, T] is most like what is missing of total [H, n, 1]."""
        chosen = newest.nonzero().T[:, -N:].expand(len(e), -1)
        missing = total
        while (n := chosen.shape[1]) < N:
            if n and (n // AT_ONCE) % EVERY == 0:
                part = e.gather(2, chosen[:, None].expand(-1, e.shape[1], -1))
                missing = total - part @ self.weights(part, total)
            like = (e.mT @ missing)[..., 0].scatter(1, chosen, float("-inf"))
            chosen = torch.cat((chosen, best_tokens(like, min(AT_ONCE, N - n))), 1)
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


def least_squares(a: Tensor, y: Tensor) -> Tensor:
    """x [H, N, c] of the least |a x - y|: a [H, n, N], y [H, n, c]."""
    moments = a.mT @ a
    ridge = RIDGE * moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None].clamp(min=1e-30)
    return torch.linalg.solve(moments + ridge * torch.eye(moments.shape[1], device=a.device, dtype=a.dtype), a.mT @ y)
