"""Budgets: how many tokens a method keeps or attends to, as a number or as a share of the current length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cache.base import knob
from runtime.errors import InputError


def min_tokens() -> Any:
    """The common knob of methods whose budget may be a share: a sixteenth of a short question is two tokens."""
    return knob(128, "least tokens of a budget that is a share (ours; 0: the paper's letter)", low=0)


def check_budget(budget: int | float, name: str = "budget") -> None:
    """Raises InputError unless a budget is a number of tokens (int >= 1) or a share of the length (float in (0, 1])."""
    if (isinstance(budget, float) and not 0 < budget <= 1) or (isinstance(budget, int) and budget < 1):
        raise InputError(f"{name} {budget} is out of range: give a number of tokens >= 1, or a fraction in (0, 1]")


@dataclass(frozen=True)
class TopP:
    """A budget that adapts to the text: the fewest tokens whose estimated softmax weights reach p (Twilight).

    It is written p0.95. cache/selecting.py finds the tokens.
    """

    p: float
    form: ClassVar[str] = "p and a share, as p0.95"  # for the message about a wrong knob

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise InputError(f"budget {self} is out of range: give p and a share in (0, 1], as p0.95")

    def __str__(self) -> str:
        return f"p{self.p:g}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> TopP | None:
        """The budget that a text like p0.95 states; None if the text has another form."""
        try:
            return cls(float(text[1:])) if text[:1] == "p" else None
        except ValueError:
            return None


def check_part(name: str, value: int | float) -> None:
    """Raises InputError unless a knob is a number >= 1 or a share in (0, 1], of channels or coordinates."""
    if not (0 < value <= 1 if isinstance(value, float) else value >= 1):
        raise InputError(f"{name} {value} is out of range: give a number >= 1, or a share in (0, 1]")


def part_of(value: int | float, n: int) -> int:
    """The number that such a knob stands for, of n and at least 1; a knob that is a number may exceed n."""
    return max(1, round(value * n)) if isinstance(value, float) else value


def budget_cap(budget: int | float, length: int, least: int = 0) -> int:
    """The budget at a length, at most the length. At max_seq_len it is the static number of slots needed.

    least: the least tokens of a share."""
    return min(length, max(least, math.ceil(budget * length - 1e-6)) if isinstance(budget, float) else budget)


def budget_tokens(budget: int | float, length: Tensor, least: int = 0) -> Tensor:
    """`budget_cap` at the current lengths [B] -> [B] int64."""
    # in fp64, minus 1e-6: in fp32, 0.075 of 200 tokens is slightly more than 15 and would round up to 16
    wanted = (
        (length.double() * budget - 1e-6).ceil().long().clamp(min=least)
        if isinstance(budget, float)
        else torch.full_like(length, budget)
    )
    return torch.minimum(wanted, length)


@dataclass(frozen=True)
class Selection:
    """How many tokens a step attends to, always including the first `sinks` and the newest `recent`."""

    budget: int | float  # all tokens attended to or, with `beside`, those on top of sinks and recent ones
    sinks: int
    recent: int
    beside: bool = False
    min_tokens: int = 0  # of a budget that is a share

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.sinks < 0 or self.recent < 1:
            raise InputError(f"sinks must be >= 0 and recent >= 1, got {self.sinks} and {self.recent}")
        if isinstance(self.budget, int) and not self.beside and self.budget < self.forced:
            raise InputError(
                f"the budget of {self.budget} tokens is smaller than its {self.sinks} sinks + {self.recent} recent"
            )

    @property
    def forced(self) -> int:
        return self.sinks + self.recent

    def of(self, length: int) -> int:
        """How many of `length` tokens are attended to. At max_seq_len it is the static size of a selection."""
        forced = min(length, self.forced)
        if self.beside:
            return forced + budget_cap(self.budget, length - forced, self.min_tokens)
        return max(budget_cap(self.budget, length, self.min_tokens), forced)

    def at(self, length: Tensor) -> Tensor:
        """`of` at the current lengths [B] -> [B] int64, for kernels that force sinks and recent tokens themselves."""
        if not self.beside:
            return budget_tokens(self.budget, length, self.min_tokens)
        forced = length.clamp(max=self.forced)
        return forced + budget_tokens(self.budget, length - forced, self.min_tokens)

    def is_all(self, max_seq_len: int) -> bool:
        """Whether every token is attended to, however long the text."""
        return self.budget == 1.0 if isinstance(self.budget, float) else self.of(max_seq_len) == max_seq_len
