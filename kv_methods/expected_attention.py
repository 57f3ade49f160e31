"""Expected Attention: keep the tokens that future queries are expected to attend to, judging by the prompt's queries.

The queries before rotation, of the prompt without its first tokens or of a calibration's text, are modelled as a
Gaussian and rotated by the mean of the next positions' rotations: q ~ N(m, C). The expected weight of a key is then
E exp(q . k / sqrt(D)) = exp(m . k / sqrt(D) + k C k / 2D), normalized over the keys and multiplied by the norm of its
value. Decoded tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import knob
from cache.prompt_evicting import PromptEvicting
from cache.statistic import Statistic
from kernels.rope import apply_rope

SINKS = 4  # first tokens, whose queries are like no others (published code)


class Queries(Statistic):
    """Mean and covariance of each head's queries before rotation, without those of a text's first tokens."""

    name, knobs = "queries", "queries=calibration"

    def measure(self, t):
        q = t.q[SINKS:].unflatten(1, (t.k.shape[1], -1))  # [S, Hkv, g, D]
        return dict(n=torch.ones_like(q[:, 0, 0, 0]).sum()[None], q=q.sum(0), qq=torch.einsum("snhd,snhe->nhde", q, q))

    def finish(self, mean):
        q, qq = mean["q"] / mean["n"], mean["qq"] / mean["n"]
        return dict(mean=q, moments=qq - q[..., :, None] * q[..., None, :])


class ExpectedAttention(PromptEvicting):
    paper = (
        "Devoto et al. 2025, Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution"
    )
    stress = dict(budget=12, sinks=2)
    lookback = 0
    scores_pre_rope = True

    mean: Tensor  # fp32 [Hkv, g, D], with queries="calibration" only
    moments: Tensor  # fp32 [Hkv, g, D, D], central; likewise

    @dataclass
    class Args(PromptEvicting.Args):
        budget: int | float = knob(0.5, "tokens kept of a prompt, or their share (half, as in kvpress's README)")
        recent: int = knob(0, "last tokens of a prompt that are kept in any case (ours; published: none)", low=0)
        queries: Literal["prompt", "calibration"] = knob(
            "prompt", "queries behind mean and covariance: the prompt's, or a calibration's (published code: either)"
        )
        sinks: int = knob(SINKS, "first tokens: kept, and left out of the queries' statistics (published code)", low=0)
        future: int = knob(512, "next positions whose rotations are averaged (published code)", 1, 10**5)
        covariance: bool = knob(True, "False: score by the mean query only (published code: an option)")
        value_norm: bool = knob(
            True, "False: score by attention only (published code: an option, off with value_aware)"
        )
        epsilon: float = knob(0.01, "added to the attention before |v| (published evaluation)", 0)
        adaptive: bool = knob(True, "share a layer's budget over its KV heads by score (published evaluation: AdaKV)")

    @classmethod
    def needs(cls, args):
        return (Queries(),) if args.queries == "calibration" else ()

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        for s in self.needs(args):
            size = (shape.n_kv_head, shape.n_head // shape.n_kv_head, shape.head_dim)
            for part, more in (("mean", ()), ("moments", size[2:])):
                value = calib.get(layer, f"{s.name}.{part}") if calib else None
                self.constant(part, size + more, value, torch.float32)

    def prompt_scores(self, q, k, v, mass, lengths):
        a, (B, H, S, D) = self.args, k.shape
        t, n = torch.arange(S, device=k.device), lengths[:, None]
        seen = (t >= a.sinks) & (t < n)  # [B, S]
        cos, sin = self.rope.mean(n + torch.arange(a.future, device=k.device))
        keys = self.rope.rotate_prompt(k).float().masked_fill(~seen[:, None, :, None], 0)
        score = torch.zeros(B, H, S, device=k.device)
        for i, x in enumerate(q.unflatten(1, (H, -1)).unbind(2)):  # each query head of the groups: x [B, H, S, D]
            mean, moments = self.distribution(i, x, seen)
            logits = keys @ apply_rope(mean, cos, sin).mT * D**-0.5  # [B, H, S, 1]
            if a.covariance:
                half = apply_rope(moments, cos, sin)  # rotates the rows, then the columns
                logits = logits + ((keys @ apply_rope(half.mT, cos, sin)) * keys).sum(-1, keepdim=True) / (2 * D)
            score += logits[..., 0].masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num()
        score = score / (self.shape.n_head // H)
        if a.value_norm and not a.value_aware:
            score = (score + a.epsilon) * v.float().norm(dim=-1)
        return score.masked_fill((t < a.sinks) & (t < n)[:, None], float("inf"))

    def distribution(self, i: int, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [.., Hkv, 1, D] and central moments [.., Hkv, D, D] of the queries of each group's head i.
        x [B, Hkv, S, D]: the prompts' queries, which count where seen [B, S] is true."""
        if self.args.queries == "calibration":
            return self.mean[:, i, None], self.moments[:, i]
        there, n = seen[:, None, :, None], seen.sum(1).clamp(min=1).view(-1, 1, 1, 1)
        x = x.float().masked_fill(~there, 0)
        mean = x.sum(2, keepdim=True) / n
        x = (x - mean).masked_fill(~there, 0)
        return mean, x.mT @ x / n
