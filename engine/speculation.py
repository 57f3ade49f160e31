"""Self-speculation: a method drafts and exact attention verifies, with the same weights, keys and values.

Each token is drawn with noise that is fixed by its row and position (sampling.py). The method draws
a draft from its distribution p, exact attention draws from its own, q, with the same noise, and the draft is accepted
if both drew the same token. So the text is, token by token, what `full` writes with the same seed, greedy or not
(Daliri, Musco and Suresh 2024, Coupling without Communication and Drafter-Invariant Speculative Decoding). A draft is
accepted with probability at least (1 - d) / (1 + d), with d the total variation of p and q. The rule of Leviathan et
al. 2023 accepts with 1 - d, but preserves only q's distribution and needs p of every draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.compiled import Step, compile_verify
from model import Transformer

Draw = Callable[..., Tensor]  # logits [R, V], pos [R], keys [R], then seen [R, V] if there is a penalty -> tokens [R]


@dataclass
class Tally:
    """Counts of drafts that were checked and accepted, and of checks, over rows that were not done."""

    drafted: int = 0
    kept: int = 0
    checks: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted, not counting drafts after a rejected one."""
        return self.kept / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_check(self) -> float:
        """The mean number of tokens per check: the accepted drafts and one more."""
        return (self.kept + self.checks) / self.checks if self.checks else 0.0


def tokens_a_round(n: int, acceptance: float) -> float:
    """The mean number of tokens of a round: of n drafts, each right with this chance, those before the first wrong one,
    and one of the check."""
    return sum(acceptance**i for i in range(n + 1))


class Speculator:
    """Drafts up to `most` tokens before each check. adaptive (ours): halve the number after a check that accepted fewer
    than half, and double it after one that accepted all."""

    def __init__(self, model: Transformer, draw: Draw, most: int, compile: bool, adaptive: bool = False):
        self.model, self.draw, self.most, self.adaptive = model, draw, most, adaptive
        self.compile = compile
        self.n = most  # drafts before the next check
        self.checks: dict[int, Step] = {}  # by number of tokens
        methods = model.cache or ()
        self.in_step = any(m.in_step for m in methods)
        self.takes_back = any(m.takes_back for m in methods)

    def sizes(self) -> list[int]:
        """The possible numbers of drafts."""
        halves = [self.most >> i for i in range(self.most.bit_length())]
        return halves if self.adaptive else [self.most]

    def check(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        """The tokens that exact attention draws after each of tokens [B, n], the first ones at pos [B] -> [B, n];
        given: the result of `behind`."""
        n = tokens.shape[1]
        if n not in self.checks:
            self.checks[n] = compile_verify(self.model, self._choose) if self.compile else self._eager
        return self.checks[n](tokens, pos, *given).clone()  # under CUDA graphs the next replay reuses the memory

    def _eager(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        return self._choose(self.model.verify(tokens.clamp(min=0), pos), pos, *given)

    def _choose(self, logits: Tensor, pos: Tensor, keys: Tensor, *seen: Tensor) -> Tensor:
        B, n, _ = logits.shape
        at = (pos[:, None] + torch.arange(n, device=pos.device)).flatten()
        rest = [x.flatten(0, 1) for x in seen]
        return self.draw(logits.flatten(0, 1), at, keys.repeat_interleave(n), *rest).view(B, n)

    def round(
        self, step: Step, first: Tensor, pos: Tensor, left: Tensor, given: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft after the tokens `first` [B] at pos [B], then check. left [B]: how many more tokens a row may have.

        Returns tokens [B, n + 1], of which the first count [B] belong to the text, count, and agreed [B], the numbers
        of accepted drafts.
        """
        B, drafts, seen = len(pos), [first], given[1:]
        for i in range(self.n):
            if seen:
                seen = [seen[0].scatter(1, drafts[-1].clamp(min=0)[:, None], True)]
            drafts.append(step(drafts[-1], pos + i, given[0], *seen).clone())
        block = torch.stack(drafts, 1)
        after = behind(given, block)
        if self.takes_back:
            self.model.rewind(pos, pos + self.n)
        chosen = self.check(block, pos, *after)
        agreed = (chosen[:, :-1] == block[:, 1:]).long().cumprod(1).sum(1)
        count = (agreed + 1).minimum(left)
        if self.in_step:
            count = count.amin().expand(B)
        if self.takes_back:
            self.model.rewind(pos + count, pos + self.n + 1)
        for before, every in zip(given[1:], after[1:], strict=True):  # tokens now in the text; the last is not fed yet
            last = every[torch.arange(B, device=pos.device), (count - 1).clamp(min=0)]
            before.copy_(torch.where((count > 0)[:, None], last, before))
        return chosen, count, agreed

    def feed(self, tokens: list[int], pos: Tensor, given: list[Tensor]) -> Tensor:
        """Feed the same tokens, up to `most` + 1, to every row by exact attention -> the next tokens [B]."""
        n, rows = len(tokens), torch.tensor(tokens + tokens[-1:] * (self.most + 1 - len(tokens)), device=pos.device)
        block = rows.expand(len(pos), -1).contiguous()
        chosen = self.check(block, pos, *behind(given, block))
        if self.takes_back:
            self.model.rewind(pos + n, pos + self.most + 1)
        if len(given) > 1:
            given[1].scatter_(1, block, True)
        return chosen[:, n - 1].contiguous()

    def adapt(self, kept: int, drafted: int) -> None:
        if self.adaptive and drafted:
            sizes = self.sizes()
            at = sizes.index(self.n) + (1 if 2 * kept < drafted else -1 if kept == drafted else 0)
            self.n = sizes[min(max(at, 0), len(sizes) - 1)]


def behind(given: list[Tensor], tokens: Tensor) -> list[Tensor]:
    """The arguments of a draw, keys [B] and seen [B, V] if there is a penalty -> those behind each of tokens [B, n]."""
    return [given[0], *(seen_behind(seen, tokens) for seen in given[1:])]


def seen_behind(seen: Tensor, tokens: Tensor) -> Tensor:
    """seen [B, V] bool, updated with the first 1 to n of tokens [B, n] -> [B, n, V]."""
    n = tokens.shape[1]
    out = seen[:, None].repeat(1, n, 1)
    for i, token in enumerate(tokens.clamp(min=0).unbind(1)):
        out[:, i:].scatter_(2, token[:, None, None].expand(-1, n - i, 1), True)
    return out
