"""Compactor: keep tokens whose keys are outliers, and those that get attention from their neighbours on both sides.

A key's leverage is its weight in the least-squares fit of all keys: k (K^T K)^-1 k, of centred keys before rotation
that a random sketch projects to fewer dimensions. Its attention is summed over the queries of its block, later ones and
earlier ones, times the norm of its value. Both are standardized over a layer's heads and tokens, and added. No question
needs to be known. A layer's heads share the budget; decoded tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.prompt_evicting import PromptEvicting
from kernels.prompt_scores import pooled

RIDGE = 1e-5  # part of the mean diagonal that is added to that of K^T K (published code: 5e-3, whatever the keys' size)
NEAR = 3  # neighbours over which attention is averaged (published code)


class Compactor(PromptEvicting):
    paper = "Chari & Van Durme 2025, Compactor: Calibrated KV Cache Compression with Approximate Leverage Scores"
    stress = dict(budget=12, sinks=2, recent=2, block=16, sketch=8)
    lookback = 0
    scores_pre_rope = True
    joins_heads = True

    @dataclass
    class Args(PromptEvicting.Args):
        budget: int | float = knob(0.5, "tokens kept of a prompt, or their share (half, as in kvpress's README)")
        recent: int = knob(4, "last tokens of a prompt, kept and left out of the statistics (kvpress: 4)", low=0)
        sinks: int = knob(8, "first tokens, likewise (kvpress: 8)", low=0)
        block: int = knob(256, "tokens that attend to each other (kvpress: 256; compactor-vllm: 128)", 2)
        sketch: int = knob(48, "dimensions of the sketch of keys (kvpress: 48)", 1, 4096)
        blend: float = knob(0.5, "weight of leverage beside attention (compactor-vllm: 0.5; kvpress: share dropped)", 0)
        seed: int = knob(0, "seed of the sketch", 0)
        adaptive: bool = knob(True, "share a layer's budget over its KV heads by score (compactor-vllm)")
        safeguard: float = knob(0.0, "with adaptive: the part of its budget that each head has (theirs: none)", 0, 1)

    def prompt_scores(self, q, k, v, mass, lengths):
        a, t = self.args, torch.arange(k.shape[2], device=k.device)
        inner = ((t >= a.sinks) & (t < (lengths - self.recent(lengths))[:, None]))[:, None]  # [B, 1, S]
        attention = pooled(self.attention(q, k, inner) * v.float().norm(dim=-1).masked_fill(~inner, 0), NEAR, "avg")
        score = a.blend * self.standard(self.leverage(k, inner), inner) + self.standard(attention, inner)
        return score.masked_fill((t < a.sinks) & (t < lengths[:, None])[:, None], float("inf"))

    def leverage(self, k: Tensor, inner: Tensor) -> Tensor:
        """Of k [B, H, S, D] before rotation -> fp32 [B, H, S]."""
        drawn = torch.randn(k.shape[3], self.args.sketch, generator=torch.Generator().manual_seed(self.args.seed))
        x = k.float().masked_fill(~inner[..., None], 0)
        x = (x - x.sum(2, keepdim=True) / inner.sum(2).clamp(min=1)[..., None, None]).masked_fill(~inner[..., None], 0)
        x = x @ (drawn * self.args.sketch**-0.5).to(k.device)
        moments = x.mT @ x
        ridge = RIDGE * moments.diagonal(dim1=2, dim2=3).mean(-1)[..., None, None].clamp(min=1e-30)
        return (torch.linalg.solve(moments + ridge * torch.eye(x.shape[3], device=k.device), x.mT).mT * x).sum(-1)

    def attention(self, q: Tensor, k: Tensor, inner: Tensor) -> Tensor:
        """What each key gets from all queries of its block, mean of the group: q [B, Hq, S, D], k [B, H, S, D] before
        rotation -> fp32 [B, H, S]. Logits are not scaled (published code, both)."""
        q, k = (self.rope.rotate_prompt(x).float().masked_fill(~inner[..., None], 0) for x in (q, k))
        out, block = torch.zeros(k.shape[:3], device=k.device), self.args.block
        for first in range(self.args.sinks, k.shape[2], block):
            part = slice(first, first + block)
            logits = q[:, :, part].unflatten(1, (k.shape[1], -1)) @ k[:, :, None, part].mT  # [B, H, g, n, n]
            there = inner[:, :, None, None, part]
            p = logits.masked_fill(~there, float("-inf")).softmax(-1).masked_fill(~(there & there.mT), 0)
            out[:, :, part] = p.sum(3).mean(2)
        return out

    def standard(self, x: Tensor, inner: Tensor) -> Tensor:
        """x [B, H, S] less its mean and over its deviation, of a row's heads and tokens that are `inner`."""
        x = x.double().masked_fill(~inner, 0)
        sums = torch.stack((x.sum((1, 2)), x.square().sum((1, 2)), x.shape[1] * inner.sum((1, 2)).double()))
        total, squares, n = self.sum_over_ranks(sums)[..., None, None]
        mean, n = total / n.clamp(min=1), n.clamp(min=1)
        least = 1e-12 * mean.square() + 1e-100  # where all are equal, up to rounding
        return ((x - mean) / (squares / n - mean.square()).maximum(least).sqrt()).float()
