"""The input of an analysis: one layer, its calibration, and the tensors of each sequence that went through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.calibration import Calibration
from model import Block
from scripts.eval.analyses.measures import attention_mass

QUERIES = 64  # per sequence, spread over its second half, on which selection is measured

Series = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]


@dataclass
class Capture:
    """One sequence of S tokens in one layer, in fp32."""

    q: Tensor  # [S, Hq, D]
    k: Tensor  # [S, n, D]
    v: Tensor  # [S, n, D]
    q_rot: Tensor
    k_rot: Tensor

    @cached_property
    def at(self) -> Tensor:
        """[Q] positions of the queries on which selection is measured."""
        S = len(self.k)
        return torch.linspace(S // 2, S - 1, min(QUERIES, S - S // 2), device=self.k.device).long()

    @cached_property
    def mass(self) -> Tensor:
        """[Q, n, g, S] true attention of those queries."""
        return attention_mass(self.q_rot[self.at], self.k_rot, self.at)

    def past(self, scores: Tensor) -> Tensor:
        """Sets scores [Q, ..., S] of tokens that a query cannot see to -inf."""
        future = torch.arange(len(self.k), device=self.k.device) > self.at[:, None]
        return scores.masked_fill(future.view(len(self.at), *[1] * (scores.dim() - 2), -1), float("-inf"))

    def latent_scores(self, basis: Tensor, rank: int) -> Tensor:
        """Scores [Q, S] before rotation, summed over group and heads, in `rank` coordinates (SALS, Sec. 4.3)."""
        n = self.k.shape[1]
        q = self.q[self.at].unflatten(1, (n, -1)).sum(2).flatten(1) @ basis[:, :rank]
        return self.past(q @ (self.k.flatten(1) @ basis[:, :rank]).T)


@dataclass
class Layer:
    index: int
    block: Block
    calib: Calibration | None
    text: dict[str, list[Capture]]

    @property
    def held_out(self) -> list[Capture]:
        return self.text["code"] + self.text["prose"]

    def get(self, name: str) -> Tensor:
        """A tensor of this layer's calibration."""
        assert self.calib is not None
        return self.calib.get(self.index, name).to(self.text["code"][0].k.device)


@dataclass(frozen=True)
class Analysis:
    what: str  # printed above its table
    measure: Callable[[Layer], Series]
    table: Callable[[list[Series]], Table]
    reads: tuple[str, ...] = ()  # methods whose statistics it needs from the calibration


def mean(rows: list[Series]) -> Series:
    """The mean of dictionaries with the same keys, key by key."""
    return {k: float(np.mean([r[k] for r in rows])) for k in rows[0]}
