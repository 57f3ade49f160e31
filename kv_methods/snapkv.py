"""SnapKV: once a prompt is read, keep the tokens that its last queries attend to, and their neighbours.

The observation window, the last 32 tokens, votes: its attention to every earlier token is summed, pooled over 7
neighbours, and the best tokens of each KV head are kept beside the window. Decoded tokens stay; with a `decode_budget`,
the newest queries vote on them every `decode_every` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import knob
from cache.compacting import Compacting
from cache.prompt_evicting import PromptEvicting
from kernels.prompt_scores import pooled
from runtime.errors import InputError

PRESETS = {
    "snapkv-50": dict(budget=0.5),  # OjaKV, Table 6, SnapKV (Token Sel. only)
    "snapkv-160": dict(budget=160),  # Self-Indexing KVCache, Table 1, SnapKV
    "snapkv-7.5": dict(budget=0.075),  # Self-Indexing KVCache, Table 2, SnapKV
    "chunkkv": dict(chunk_length=10, kernel=1),  # ChunkKV (Liu et al. 2025): chunks of 10 in place of pooling
    "snapkv-published": dict(budget=2048, kernel=5, pool="avg"),  # published code: github.com/FasterDecoding/SnapKV
}


class SnapKV(Compacting, PromptEvicting):
    paper = "Li, Huang et al. 2024, SnapKV: LLM Knows What You are Looking for Before Generation"
    stress = dict(budget=12, recent=4)

    @dataclass
    class Args(PromptEvicting.Args):
        budget: int | float = knob(
            1024, "tokens kept of a prompt, its window included, or their share (SnapKV: 1024 to 4096)"
        )
        recent: int = knob(32, "observation window: last tokens, which choose and are kept", 1, 4096)
        kernel: int = knob(7, "neighbours pooled, an odd number (LongBench runs: 7; published default: 5)", 1, 10**4)
        pool: Literal["max", "avg"] = knob("max", "how they are pooled (LongBench runs: max; published default: avg)")
        group: Literal["mean", "max"] = knob(
            "mean", "of a group's query heads, as in kvpress, or their max (AdaKV); the paper has one query per key"
        )
        decode_budget: int | None = knob(
            None, "decoded tokens kept, of which the last `recent` vote on the others (ours); None: all", 1
        )
        decode_every: int = knob(64, "steps between two votes on decoded tokens (ours)", 1)

        def __post_init__(self):
            super().__post_init__()
            if self.decode_budget is not None and self.decode_budget < self.recent:
                raise InputError(f"decode_budget={self.decode_budget} is less than the window of {self.recent} tokens")
            if self.decode_budget is not None and self.adaptive:
                raise InputError("decode_budget evicts from heads that hold equally many tokens: use adaptive=False")
            if self.kernel % 2 == 0:
                raise InputError(f"kernel={self.kernel} has no middle: give an odd number")

    def __init__(self, args, shape, layer, rope, calib=None):
        self.lookback, self.group = args.recent, "max" if args.group == "max" else "sum"
        self.every = 0 if args.decode_budget is None else args.decode_every
        super().__init__(args, shape, layer, rope, calib)

    def prompt_scores(self, q, k, v, mass, lengths):
        """Votes for the tokens before the window alone, then pooled."""
        before = torch.arange(mass.shape[2], device=mass.device) < (lengths - self.recent(lengths))[:, None]
        return pooled(mass * before[:, None], self.args.kernel, self.args.pool)

    def decode_slots(self):
        if self.every:
            return min(self.args.decode_budget + self.every, self.shape.max_decoded)
        return super().decode_slots()

    @classmethod
    def room_if_unknown(cls, args):
        return args.decode_slots if args.decode_budget is None else None

    def later_scores(self, q, q_pos, k, v, place, filled):
        """Scores of decoded tokens; what is kept of the prompt stays."""
        scores = super().later_scores(q, q_pos, k, v, place, filled)
        return scores.masked_fill(place < self.prompt_len[:, None, None], float("inf"))

    def stay(self, place, read):
        of_prompt = ((place >= 0) & (place < self.prompt_len[:, None, None])).sum(2).amax(1)
        return of_prompt + self.args.decode_budget
