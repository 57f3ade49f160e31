"""Self-speculation: a method drafts, exact attention checks, from one set of weights and one store of keys and values.

Each token is drawn by noise that its row and its position fix (`exponential_noise`, engine.py). A draft is drawn from
the method's distribution p by the noise of its place, and exact attention draws from its own, q, by the same noise: the
draft is kept if both drew the same. So the text is, token by token, what `full` writes with the same seed, greedy or
not (Daliri, Musco and Suresh 2024, Coupling without Communication and Drafter-Invariant Speculative Decoding). A draft
is kept with a chance of at least (1 - d) / (1 + d), d the total variation of p and q, where the rule of Leviathan et
al. 2023 keeps 1 - d, promises q's distribution alone, and needs p of every draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled import Step, compile_verify
from model import Transformer

Draw = Callable[..., Tensor]  # logits [R, V], pos [R], keys [R], then seen [R, V] if there is a penalty -> tokens [R]


@dataclass
class Tally:
    """Drafts that were checked and kept, of rows that went on, and how often they were checked."""

    drafted: int = 0
    kept: int = 0
    checks: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the drafts, of those that stood behind none that was refused."""
        return self.kept / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_check(self) -> float:
        """The drafts that were kept, and one that every check gives."""
        return (self.kept + self.checks) / self.checks if self.checks else 0.0


def tokens_a_round(n: int, acceptance: float) -> float:
    """Of n drafts, each right with this chance: those up to the first wrong one, and one of the check."""
    return sum(acceptance**i for i in range(n + 1))


class Speculator:
    """Up to `most` drafts before each check. adaptive (ours): half as many after a check that kept fewer than half,
    twice as many after one that kept all."""

    def __init__(self, model: Transformer, draw: Draw, most: int, compile: bool, adaptive: bool = False):
        self.model, self.draw, self.most, self.adaptive = model, draw, most, adaptive
        self.compile = compile
        self.n = most  # drafts before the next check
        self.checks: dict[int, Step] = {}  # by tokens
        methods = model.cache or ()
        self.in_step = any(m.in_step for m in methods)
        self.takes_back = any(m.takes_back for m in methods)

    def sizes(self) -> list[int]:
        """The numbers of drafts that may come."""
        halves = [self.most >> i for i in range(self.most.bit_length())]
        return halves if self.adaptive else [self.most]

    def check(self, tokens: Tensor, pos: Tensor, *given: Tensor) -> Tensor:
        """What exact attention draws behind each of tokens [B, n], the first ones at pos [B] -> [B, n]; given: `behind`
        them."""
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
        """Draft behind the tokens `first` [B] at pos [B], and check. left [B]: how many more tokens a row may have.

        -> tokens [B, n + 1], of which the first count [B] are the text's, and agreed [B], how many drafts were right.
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
        for before, every in zip(given[1:], after[1:], strict=True):  # what is in the text now, its last token not fed
            last = every[torch.arange(B, device=pos.device), (count - 1).clamp(min=0)]
            before.copy_(torch.where((count > 0)[:, None], last, before))
        return chosen, count, agreed

    def feed(self, tokens: list[int], pos: Tensor, given: list[Tensor]) -> Tensor:
        """The same next tokens for every row, up to `most` + 1, by exact attention -> what comes behind them [B]."""
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
    """Keys, and seen if there is a penalty, of a row -> the same behind each of its tokens [B, n]."""
    return [given[0], *(seen_behind(seen, tokens) for seen in given[1:])]


def seen_behind(seen: Tensor, tokens: Tensor) -> Tensor:
    """seen [B, V] bool, and with the tokens [B, n] so far: [B, n, V]."""
    n = tokens.shape[1]
    out = seen[:, None].repeat(1, n, 1)
    for i, token in enumerate(tokens.clamp(min=0).unbind(1)):
        out[:, i:].scatter_(2, token[:, None, None].expand(-1, n - i, 1), True)
    return out
