"""Self-speculation: a method drafts and exact attention verifies, with the same weights, keys and values.

Each token is drawn with noise that is fixed by its row and position (`exponential_noise`, sampling.py). The method
draws a draft from its distribution p, exact attention draws from its own, q, with the same noise, and the draft is
accepted if both drew the same token. So the text is, token by token, what `full` writes with the same seed, greedy or
not (Daliri, Musco and Suresh 2024, Coupling without Communication and Drafter-Invariant Speculative Decoding). A draft
is accepted with probability at least (1 - d) / (1 + d), with d the total variation of p and q. The rule of Leviathan et
al. 2023 accepts with 1 - d, but preserves only q's distribution and needs p of every draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.compiled import Step, compile_step, eager_step
from engine.decode import Session
from model import Transformer

Draw = Callable[..., Tensor]  # logits [R, V], pos [R], keys [R], then seen [R, V] if there is a penalty -> tokens [R]


def tokens_a_round(n: int, acceptance: float) -> float:
    """The mean number of tokens of a round: of n drafts, each right with this chance, those before the first wrong one,
    and one of the check."""
    return sum(acceptance**i for i in range(n + 1))


class Speculator:
    """Drafts up to `most` tokens before each check. adaptive (ours): halve the number after a check that accepted fewer
    than half, and double it after one that accepted all."""

    def __init__(self, model: Transformer, draw: Draw, most: int, compile: bool, adaptive: bool = False):
        self.model, self.draw, self.most, self.adaptive = model, draw, most, adaptive
        self.make = compile_step if compile else eager_step
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
            self.checks[n] = self.make(self.model, self._choose)
        return self.checks[n](tokens, pos, *given).clone()  # under CUDA graphs the next replay reuses the memory

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
        return chosen[:, n - 1].clone()  # a captured graph overwrites its result

    def adapt(self, kept: int, drafted: int) -> None:
        if self.adaptive and drafted:
            sizes = self.sizes()
            at = sizes.index(self.n) + (1 if 2 * kept < drafted else -1 if kept == drafted else 0)
            self.n = sizes[min(max(at, 0), len(sizes) - 1)]


class Speculating(Session):
    """A session whose method drafts, while every token is drawn by exact attention."""

    def __init__(self, speculator: Speculator, *args: Any):
        super().__init__(*args)
        self.speculator = speculator

    def warm_step(self, tokens: Tensor, pos: Tensor, given: list[Tensor]) -> None:
        super().warm_step(tokens, pos, given)
        for n in self.speculator.sizes():
            block = tokens[:, None].repeat(1, n + 1)
            self.speculator.check(block, pos, *behind(given, block))

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> None:
        block = self.speculator.most + 1
        for i in range(0, len(tokens), block):
            self.own_cache()
            part = list(tokens[i : i + block])
            self.next, self.logits = self.speculator.feed(part, self.pos, self.given), None
            self.fed += [torch.full_like(self.pos, t) for t in part]
            self.pos = self.pos + len(part)
            self.decoded += len(part)
            self.model.maintain(self.decoded)

    @torch.inference_mode()
    def rewind(self, length: int) -> None:
        """Shorten each row's text to `length` tokens."""
        over = int((self.pos - length).amax())
        if over > 0:
            end, self.pos = self.pos, self.pos.clamp(max=length)
            self.model.rewind(self.pos, end)
            self.decoded -= over
            self.next, self.fed = torch.where(end > length, self.fed[-over], self.next), self.fed[:-over]
            if len(self.given) > 1:  # tokens of the text, without those taken back
                texts = [p + [int(t[row]) for t in self.fed] for row, p in enumerate(self.prompts)]
                keys, seen = self.given
                seen.copy_(self.sampling.given(keys, texts, seen.shape[1])[1])

    def tokens(self, n: int) -> Iterator[list[int | None]]:
        """The next n tokens of every row, drafted by the method and verified by exact attention in rounds. A round's
        tokens are all fed when its first is yielded; `rewind` takes back those that the caller does not use."""
        yield self.next.tolist()
        left, begun = torch.full_like(self.pos, n - 1), self.decoded
        fed = [0] * len(self.pos)
        while not all(f == n - 1 or done for f, done in zip(fed, self.done, strict=True)):
            first = self.next
            tokens, count, kept = self.check(left)
            self.logits, self.uneven = None, self.uneven or len(set(count)) > 1
            self.fed += [first, *torch.tensor(tokens, device=first.device).unbind(1)][: max(count)]
            at_most = [n - 1 - f for f in fed]
            fed = [f + c for f, c in zip(fed, count, strict=True)]
            self._count(at_most, kept)
            left = left - torch.tensor(count, device=left.device)
            self.pos = self.pos + torch.tensor(count, device=left.device)
            self.decoded = begun + max(fed)
            self.model.maintain(self.decoded)
            for i in range(max(count)):
                yield [row[i] if i < c else None for row, c in zip(tokens, count, strict=True)]

    @torch.inference_mode()
    def check(self, left: Tensor) -> tuple[list[list[int]], list[int], list[int]]:
        """One round (`Speculator.round`), with its results read on the host."""
        self.own_cache()
        tokens, count, kept = self.speculator.round(self.step, self.next, self.pos, left, self.given)
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.next = torch.where(count > 0, last, self.next)
        return tokens.tolist(), count.tolist(), kept.tolist()

    def _count(self, left: list[int], kept: list[int]) -> None:
        """Count a round's drafted and accepted tokens, of rows that are not done, and adapt the number of drafts."""
        n, before = self.speculator.n, (self.tally.kept, self.tally.drafted)
        for most, agreed, done in zip(left, kept, self.done, strict=True):
            if most and not done:
                self.tally.kept += min(agreed, most)
                self.tally.drafted += min(agreed + 1, n, most)
                self.tally.checks += 1
        self.speculator.adapt(self.tally.kept - before[0], self.tally.drafted - before[1])


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
