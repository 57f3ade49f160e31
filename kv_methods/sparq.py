"""SparQ Attention: the channels in which the query is largest score all tokens; the mean value stands for the rest.

All of K and V is kept, and K a second time, channel by channel, so that scoring reads r of its D channels and nothing
else (half as much memory again). The best k tokens are attended to exactly. The attention that they miss, by the same
estimate, goes to the mean of all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import Attended, knob
from cache.budget import TopP, check_part, part_of
from cache.selecting import Selecting
from kernels.channel_score import append_channels, channel_score, largest_channels
from kernels.latent_score import head_scores
from kernels.mean_value import attended_share, join_mean, with_mean
from kernels.top_p import group_weights
from runtime.errors import InputError

PRESETS = {
    "sparq-1xk": dict(copies=1),  # Double Sparsity, Table 1, SparQ (1xK): one copy of K, token by token
    "sparq-64": dict(channels=0.5),  # r = 64 of 128
    "sparq-16": dict(channels=0.125),  # r = 16
    "sparq-no-mean": dict(mean_value=False),  # SparQ without reallocation to the mean value
}


class SparQ(Selecting):
    paper = "Ribar et al. 2024, SparQ Attention: Bandwidth-Efficient LLM Inference"

    kt: Tensor  # [B, Hkv, D, T]: K, channel by channel
    v_mean: Tensor  # fp32 [B, Hkv, D]
    share: Tensor  # fp32 [B, Hq], alpha of the step

    @dataclass
    class Args(Selecting.Args):
        budget: int | float | TopP = knob(129, "tokens attended: k = 128 and the current one (published code)")
        sinks: int = knob(0, "first tokens always attended; the paper forces none", low=0)
        recent: int = knob(33, "newest tokens always attended: l = k / 4 and the current one (published code)", low=1)
        channels: int | float = knob(0.25, "r, a number or a share of head_dim (r = 32 of 128)", 0, 10**6)
        mean_value: bool = knob(True, "attention that is missed goes to the mean value (SparQ, step 3)")
        copies: Literal[1, 2] = knob(2, "2: K twice, also channel by channel; 1: scoring reads it token by token")

        def __post_init__(self):
            super().__post_init__()
            check_part("channels", self.channels)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        self.r = part_of(args.channels, D)
        if self.r > D:
            raise InputError(f"sparq: {self.r} channels do not fit in a head_dim of {D}: lower channels")
        if args.copies == 2:
            self.buffer("kt", (B, H, D, T))
        if args.mean_value:
            self.buffer("v_mean", (B, H, D), torch.float32), self.buffer("share", (B, shape.n_head), torch.float32)

    def compress(self, q, k, v, lengths):
        super().compress(q, k, v, lengths)
        B, S = len(k), k.shape[2]
        if self.args.copies == 2:
            self.kt[:B, ..., :S] = k.mT
        if self.args.mean_value:
            real = torch.arange(S, device=k.device) < lengths[:, None]
            kept = torch.where(real[:, None, :, None], v.float(), 0)  # what is past the end may be NaN
            self.v_mean[:B] = kept.sum(2) / lengths[:, None, None]

    def append(self, k, v, pos):
        super().append(k, v, pos)
        if self.args.copies == 2:
            append_channels(self.kt, k, pos)
        if self.args.mean_value:
            join_mean(v, self.v_mean, pos)

    def rewind(self, pos, end):
        if self.args.mean_value:  # the mean of those that stay
            B, at = len(pos), pos[:, None] + torch.arange(self.shape.drafts + 1, device=pos.device)
            row, gone = torch.arange(B, device=pos.device)[:, None], (at < end[:, None])[..., None, None]
            values = self.v[row, :, at.clamp(max=self.v.shape[2] - 1)]  # [B, n, Hkv, D]
            total = self.v_mean[:B] * end[:, None, None] - torch.where(gone, values.float(), 0).sum(1)
            self.v_mean[:B] = total / pos.clamp(min=1)[:, None, None]

    def logits(self, q, pos):
        return self._logits(q, pos).flatten(1, 2)

    def scores(self, q, pos):
        return self._logits(q, pos).sum(2)

    def _logits(self, q, pos):
        """Step 1: the r channels that are largest in the group's sum of |q|, and the temperature: [B, Hkv, g, T]."""
        few, channels = largest_channels(q, self.shape.n_kv_head, self.r)
        if self.args.copies == 2:
            return channel_score(few, channels, self.kt, pos)
        # a token's other channels share its cache lines, so whole keys are read, by queries of their dtype
        groups, at = q.unflatten(1, (self.shape.n_kv_head, -1)), channels[:, :, None].expand(few.shape)
        whole = torch.zeros_like(groups).scatter(3, at, groups.gather(3, at))
        covered = whole.float().abs().sum(-1) / groups.float().abs().sum(-1).clamp(min=1e-30)
        return head_scores(whole, self.k, pos) / (covered * q.shape[2]).clamp(min=1e-30).sqrt()[..., None]

    def select(self, q, pos):
        """Step 2: the best k tokens by the group's sum (published code), and alpha, their share of the attention."""
        logits = self._logits(q, pos)
        if self.p is None:
            idx, count = self.pick(logits.sum(2), pos)
        else:
            idx, count = self.pick_mass(group_weights(logits, pos), pos)
        if self.args.mean_value:
            attended_share(logits, idx, count, pos, self.share)
        return idx, count

    def attend(self, q, idx, count, pos):
        """Step 3."""
        y = super().attend(q, idx, count, pos)
        return with_mean(y, self.share, self.v_mean) if self.args.mean_value else y

    def attended(self, q, idx, count, pos):
        """The mean value is one place that stands for many tokens, with a weight of its own for each query head."""
        if not self.args.mean_value:
            return super().attended(q, idx, count, pos)
        (B, Hq, D), g = q.shape, q.shape[1] // idx.shape[1]
        a = super().attended(q, idx.repeat_interleave(g, 1), count.repeat_interleave(g, 1), pos)
        inside = torch.where(a.position >= 0, (a.k.float() @ q.float()[..., None])[..., 0] * D**-0.5, float("-inf"))
        share = self.share[:B].clamp(1e-12, 1 - 1e-7)
        logit = inside.logsumexp(-1) + (1 / share - 1).log()
        key = q.float() * (logit * D**0.5 / q.float().square().sum(-1).clamp(min=1e-30))[..., None]
        mean = self.v_mean[:B].repeat_interleave(Hq // self.shape.n_kv_head, 1)
        many = torch.full_like(a.position[..., :1], -1)
        k, v = (torch.cat((x.float(), y[:, :, None]), 2) for x, y in ((a.k, key), (a.v, mean)))
        return Attended(torch.cat((a.position, many), 2), q, k, v)

    # ---- accounting ----

    def score_bytes(self, pos):
        """r channels of every key; with one copy whole keys, as a cache line holds many channels."""
        read = (pos + 1) * (self.r if self.args.copies == 2 else self.shape.head_dim)
        mean = 4 * self.shape.head_dim if self.args.mean_value else 0
        return read * self.shape.dtype.itemsize + mean
