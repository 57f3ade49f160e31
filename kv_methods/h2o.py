"""H2O: the tokens that have gathered the most attention so far, the heavy hitters, and the newest ones; the rest goes.

A token's score is the attention that all queries since it came have paid to it: of the whole prompt, then of each step.
Every new token takes the place of the lowest score that is not recent. 20 % of the tokens are held by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.base import knob
from cache.budget import budget_tokens, check_budget
from cache.evicting import Evicting


class H2O(Evicting):
    paper = "Zhang, Sheng et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs"
    lossless = dict(heavy=1.0)
    stress = dict(heavy=16, recent=8)
    lookback = None

    @dataclass
    class Args:
        heavy: int | float = knob(0.1, "tokens of the most attention kept beside the recent ones, or a share")
        recent: int | float = knob(0.1, "newest tokens, never evicted, or a share (half of H2O's budget)")

        def __post_init__(self):
            for tokens in (self.heavy, self.recent):
                check_budget(tokens)

    def num_kept(self, length):
        return (budget_tokens(self.args.heavy, length) + self.recent(length)).minimum(length)

    def observe(self, weights):
        """The score function accumulates; per KV head, by the sum over its group's queries."""
        self.score[: len(weights)] += weights
