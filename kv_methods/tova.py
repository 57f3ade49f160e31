"""TOVA: drop the token that the newest query attends to least, the same one in every head of a layer.

A transformer as a recurrent network with a fixed number of states: no window, no sinks, no memory of earlier attention.
The weights of each step, averaged over the heads, are the scores by which the next step evicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache.base import knob, rows
from cache.evicting import Evicting


class TOVA(Evicting):
    paper = "Oren, Hassid et al. 2024, Transformers are Multi-State RNNs"
    stress = dict(budget=24)
    lookback = 1
    joins_heads = True

    @dataclass
    class Args(Evicting.Args):
        budget: int | float = knob(0.125, "states: tokens kept, or their share (TOVA: 1/8 is nearly the full model)")
        recent: int = knob(0, "newest tokens never evicted; the paper has none", low=0)
        heads: Literal["layer", "kv"] = knob(
            "layer", "one choice for a layer, by the mean of its heads (TOVA); kv: one per KV head (ours)"
        )

    def over_heads(self, weights):
        """Weights [B, Hkv, n], summed over each group -> summed over all heads of the layer, unless heads="kv"."""
        return weights if self.args.heads == "kv" else self.sum_over_ranks(weights.sum(1, keepdim=True))

    def prompt_scores(self, q, k, v, mass, lengths):
        return self.over_heads(mass)

    def observe(self, weights):
        rows(self.score, len(weights)).copy_(self.over_heads(weights))
