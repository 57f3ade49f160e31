"""Markdown tables, and the words of evaluations: which tasks count, shares with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    return [t for t in tasks_of(rows) if full.get(t, 1) >= 0.5]


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of n samples, 95 % by default."""
    middle, half = hits / n + z**2 / (2 * n), z * (hits / n * (1 - hits / n) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return max(0.0, low), min(1.0, high)


def share(each: Sequence[float]) -> str:
    """`93 (86-97) %`, with the interval, for samples that are hits or misses; otherwise only the mean."""
    mean = sum(each) / len(each)
    if not set(each) <= {0, 1} or len(each) < 10:  # shares of a text, not hits
        return percent(mean)
    low, high = wilson(sum(each), len(each))
    return f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f}) %"


def pooled(row: Row, tasks: Sequence[str]) -> str:
    """The share found over the samples of all tasks: `92 (81-97) %`."""
    return share([x for t in tasks for x in row[f"{t}_each"]])


def both_found(row: Row) -> tuple[list[float], list[float]]:
    """Of a comparison to kvpress, the samples of all tasks together: ours and theirs."""
    ours, theirs = ([x for k, each in row.items() if k.endswith(side) for x in each] for side in ("_ours", "_theirs"))
    return ours, theirs
