"""H2O: keep the heavy hitters, tokens that have received the most attention so far, and the newest ones.

A token's score is the attention that all queries since it came have paid to it, in the prompt and then at each step.
Every new token takes the place of the lowest score that is not recent. 20 % of the tokens are held by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.base import knob, rows
from cache.budget import budget_tokens, check_budget, min_tokens
from cache.evicting import Evicting


class H2O(Evicting):
    paper = "Zhang, Sheng et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs"
    lossless = dict(heavy=1.0)
    stress = dict(heavy=16, recent=8)
    lookback = None

    @dataclass
    class Args:
        heavy: int | float = knob(0.1, "tokens with the most attention, kept beside the recent ones, or a share")
        recent: int | float = knob(0.1, "newest tokens, never evicted, or a share (half of H2O's budget)")
        min_tokens: int = min_tokens()

        def __post_init__(self):
            check_budget(self.heavy, "heavy")
            check_budget(self.recent, "recent")

    def num_kept(self, length):
        heavy = budget_tokens(self.args.heavy, length, self.args.min_tokens)
        return (heavy + self.recent(length)).minimum(length)

    def observe(self, weights):
        """Scores accumulate the attention of every step, per KV head summed over its group's queries."""
        rows(self.score, len(weights)).add_(weights)
