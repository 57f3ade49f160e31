"""Of many cases, some in every run: the rest is for `make test-all`."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

SEED = int(os.environ.get("SEED") or 0)  # of what `make test-all SEED=N` draws


def drawn(cases: Iterable[Any], n: int) -> list[Any]:
    """n of the cases, by SEED; all of them where SEED is not set."""
    cases = list(cases)
    return random.Random(SEED).sample(cases, min(n, len(cases))) if os.environ.get("SEED") else cases


def sampled(cases: Iterable[Any], often: int | Collection[Any]) -> list[Any]:
    """Parameters for pytest, of which only `often` are not slow: these, or so many, spread from the first to the last.

    A tuple is a case of several arguments.
    """
    cases = list(cases)
    if isinstance(often, int):
        often = {i * (len(cases) - 1) // max(1, often - 1) for i in range(often)}
        kept = [i in often for i in range(len(cases))]
    else:
        kept = [case in often for case in cases]
        assert sum(kept) == len(often), f"{often}: of these some are no cases, or more than one"
    marks = [() if keep else pytest.mark.slow for keep in kept]
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=m) for c, m in zip(cases, marks, strict=True)]
