"""Expected Attention: keep the tokens that future queries are expected to attend to, judging by the prompt's queries.

The prompt's queries before rotation, the first few aside, are taken for a Gaussian, and rotated by the mean of the next
positions' rotations, q ~ N(m, C). Then E exp(q . k / sqrt(D)) = exp(m . k / sqrt(D) + k C k / 2D) of every key, which
is normalized over the keys and multiplied by the length of the value. What is decoded afterwards stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.prompt_evicting import PromptEvicting
from kernels.rope import apply_rope, rope_inv_freq


class ExpectedAttention(PromptEvicting):
    paper = "Devoto et al. 2025, Expected Attention: KV Cache Compression by Estimating Attention from Future Queries"
    stress = dict(budget=12, sinks=2)
    lookback = 0
    scores_pre_rope = True

    @dataclass
    class Args(PromptEvicting.Args):
        budget: int | float = knob(0.5, "tokens kept of a prompt, or their share (Expected Attention: 0.1 to 0.9)")
        recent: int = knob(0, "last tokens of a prompt that are kept in any case (ours; published: none)", low=0)
        sinks: int = knob(4, "first tokens, which are kept, and are no sample of the queries (published code)", low=0)
        future: int = knob(512, "positions to come whose rotations are averaged (published code)", 1, 10**5)
        covariance: bool = knob(True, "False: by the mean query alone (published code: an option)")
        value_norm: bool = knob(True, "False: by attention alone (published code: an option, off with value_aware)")
        epsilon: float = knob(0.01, "added to the attention before |v| (published evaluation)", 0)
        adaptive: bool = knob(True, "share a layer's budget over its KV heads by score (published evaluation: AdaKV)")

    def prompt_scores(self, q, k, v, mass, lengths):
        a, (B, H, S, D) = self.args, k.shape
        t, n = torch.arange(S, device=k.device), lengths[:, None]
        seen = (t >= a.sinks) & (t < n)  # [B, S]
        cos, sin = self.mean_rotation(lengths)
        keys = self.rope.rotate_prompt(k).float().masked_fill(~seen[:, None, :, None], 0)
        score = torch.zeros(B, H, S, device=k.device)
        for x in q.unflatten(1, (H, -1)).unbind(2):  # each query head of the groups: x [B, H, S, D]
            x = x.float().masked_fill(~seen[:, None, :, None], 0)
            many = seen.sum(1).clamp(min=1).view(B, 1, 1, 1)
            mean = x.sum(2, keepdim=True) / many
            logits = keys @ apply_rope(mean, cos, sin).mT * D**-0.5  # [B, H, S, 1]
            if a.covariance:
                x = (x - mean).masked_fill(~seen[:, None, :, None], 0)
                half = apply_rope(x.mT @ x / many, cos, sin)  # rows turned, then columns
                logits = logits + ((keys @ apply_rope(half.mT, cos, sin)) * keys).sum(-1, keepdim=True) / (2 * D)
            score += logits[..., 0].masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num()
        score = score / (self.shape.n_head // H)
        if a.value_norm and not a.value_aware:
            score = (score + a.epsilon) * v.float().norm(dim=-1)
        return score.masked_fill((t < a.sinks) & (t < n)[:, None], float("inf"))

    def mean_rotation(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, 1, D/2], each the mean over the `future` positions behind prompts of lengths [B]."""
        pos = lengths.cpu()[:, None] + torch.arange(self.args.future)
        frequency, scale = rope_inv_freq(*self.rope.of, pos + 1)
        angle = pos[..., None].double() * frequency
        mean = (torch.stack((angle.cos(), angle.sin())).mean(2) * scale).float().to(lengths.device)
        return mean[0, :, None, None], mean[1, :, None, None]
