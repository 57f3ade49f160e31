"""Markdown tables, and the words of evaluations: which tasks count, shares with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def tasks_of(rows: Sequence[Row]) -> list[str]:
    """The tasks of which an evaluation's rows have samples, in order."""
    return list(dict.fromkeys(k.removesuffix("_each") for r in rows for k in r if k.endswith("_each")))


def measuring(rows: Sequence[Row], length: int) -> list[str]:
    """The tasks that count in means at a length: those of which full, if it ran, finds at least half."""
    full = next((r for r in rows if (r["method"], r["seq_len"]) == ("full", length)), {})
    return [t for t in tasks_of([r for r in rows if r["seq_len"] == length]) if full.get(t, 1) >= 0.5]


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of n samples, 95 % by default."""
    middle, half = hits / n + z**2 / (2 * n), z * (hits / n * (1 - hits / n) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return max(0.0, low), min(1.0, high)


def paired(each: Sequence[float], full: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """The mean difference of scores from 0 to 1 of the same samples, and its 95 % interval: Wald's, with half a sample
    more in each cell, so that it is as wide as it should be where few samples differ (Agresti and Min 2005, Sec. 5)."""
    differences = [a - b for a, b in zip(each, full, strict=True)]
    n, total = len(differences) + 2, sum(differences)
    half = z * (sum(d * d for d in differences) + 1 - total**2 / n) ** 0.5 / n
    return total / len(differences), max(-1.0, total / n - half), min(1.0, total / n + half)


def resampled(each: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """A mean, and its 95 % interval by a bootstrap: of windows of a text, or of their differences to full's."""
    values, rng = np.array(each), np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (draws, len(values)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def signed(difference: tuple[float, float, float], scale: float = 100) -> str:
    """`-35 (-52 to -18)`, or `=` if the interval includes 0."""
    middle, low, high = (scale * x for x in difference)
    return "=" if low <= 0 <= high else f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"


def against_full(row: Row, rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """A row's difference to full on the samples of all tasks, as `signed`; "-" for full, or if it did not run."""
    full = next((r for r in rows if r["method"] == "full"), row)
    return "-" if full is row or not tasks else signed(paired(scores(row, tasks), scores(full, tasks)))


def share(each: Sequence[float]) -> str:
    """`93 (86-97) %`, with the interval, for samples that are hits or misses; otherwise only the mean."""
    mean = sum(each) / len(each)
    if not set(each) <= {0, 1} or len(each) < 10:  # shares of a text, not hits
        return percent(mean)
    low, high = wilson(sum(each), len(each))
    return f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f}) %"


def scores(row: Row, tasks: Sequence[str]) -> list[float]:
    """The samples of all tasks together."""
    return [x for t in tasks for x in row[f"{t}_each"]]


def both_found(row: Row) -> tuple[list[float], list[float]]:
    """Of a comparison to kvpress, the samples of all tasks together: ours and theirs."""
    ours, theirs = ([x for k, each in row.items() if k.endswith(side) for x in each] for side in ("_ours", "_theirs"))
    return ours, theirs
