"""LagKV: of each window of tokens, keep those whose keys and values vary most against the range of the next window.

Behind the sinks, the text is cut into windows of `lag` tokens. Channel by channel, a window's keys are scaled by the
smallest and largest value of the next window; a token's score is the softmax over its window of the standard deviation
over channels, for keys and for values, summed. The last full window and what follows it stay, so a window is compressed
once, when the next one is full, in the prompt and while decoding. No query and no attention is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.compacting import Compacting
from runtime.errors import InputError


def varied(x: Tensor) -> Tensor:
    """Windows x [B, H, W, lag, D] -> softmax of the deviation in the next window's range, fp32 [B, H, W - 1, lag]."""
    low, high = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
    return ((x[:, :, :-1] - low) / (high - low).clamp(min=1e-12)).std(-1).softmax(-1)


class LagKV(Compacting):
    paper = "Liang, Zhang et al. 2025, LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important"
    lossless = dict(ratio=1.0)
    stress = dict(ratio=0.25, sinks=2, lag=8)
    lookback = 0
    reads_queries = False

    @dataclass
    class Args:
        ratio: float = knob(0.5, "share of each window that is kept (published code: 0.5)", 0, 1)
        sinks: int = knob(16, "first tokens, always kept (published code: 16; kvpress: 4)", low=0)
        lag: int = knob(1024, "tokens of a window (published code: 1024; kvpress: 128)", 2)

        def __post_init__(self):
            if self.ratio * self.lag < 1:
                raise InputError(f"ratio={self.ratio} of a window of {self.lag} tokens is none: raise it or lag")

    def __init__(self, args, shape, layer, rope, calib=None):
        self.every, self.stays = args.lag, int(args.ratio * args.lag)  # of a window
        super().__init__(args, shape, layer, rope, calib)

    def recent(self, length):
        """The last full window and the tokens behind it."""
        behind = length - self.args.sinks
        return torch.where(behind > 0, self.args.lag + behind % self.args.lag, length).minimum(length)

    def num_kept(self, length):
        full = (length - self.args.sinks).clamp(min=0) // self.args.lag
        return length - (full - 1).clamp(min=0) * (self.args.lag - self.stays)

    def decode_slots(self):
        return min(self.args.lag, self.shape.max_decoded)

    def prompt_scores(self, q, k, v, mass, lengths):
        return self.ranks(k, v, torch.full_like(lengths, self.args.sinks))

    def later_scores(self, q, q_pos, k, v, place, filled):
        gone = place.amax((1, 2)) + 1 - filled  # of windows that were compressed before
        return self.ranks(k, v, self.args.sinks + gone // max(1, self.args.lag - self.stays) * self.stays)

    def ranks(self, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """The rank of each token in its window, [B, H, N]. k and v [B, H, N, D] hold whole windows from first [B] on;
        what lies before stays. Ranks of the newest tokens do not count."""
        (B, H, N, _), lag = k.shape, self.args.lag
        score = torch.full((B, H, N), float("inf"), device=k.device)
        n = (N - self.args.sinks) // lag * lag
        if n < 2 * lag:
            return score
        at = first[:, None] + torch.arange(n, device=k.device)
        slot = at.clamp(max=N - 1)[:, None].expand(B, H, n)
        windows = (x.float().gather(2, slot[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        total = torch.stack([varied(x.unflatten(2, (-1, lag))) for x in windows]).sum(0)
        rank = total.argsort(-1).argsort(-1).float().flatten(2)
        return score.scatter(2, slot[:, :, : n - lag], rank)

    def traffic(self, pos):
        """No less than before the newest window was full and the one before was compressed."""
        before = max(0, pos - (pos + 1 - self.args.sinks) % self.args.lag - 1)
        return max(super().traffic(pos), super().traffic(before))
