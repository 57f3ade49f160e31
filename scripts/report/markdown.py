"""Reads the runs in results/, and writes Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.machine import ROOT

RESULTS = ROOT / "results"
NONE = "Not measured yet."
Row = dict[str, Any]


def runs(question: str) -> Iterator[Row]:
    """The runs of all results/<machine>/<question>.json, each with its machine and its file's path below results/."""
    for file in sorted(RESULTS.glob(f"*/{question}.json")):
        where = dict(machine=file.parent.name, file=str(file.relative_to(RESULTS)))
        yield from (where | run for run in json.loads(file.read_text())["runs"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def by_machine(header: Sequence[str], cells: Mapping[tuple[tuple[str, ...], str], str]) -> str:
    """A table with one column per machine; cells: (a row's first cells, machine) -> text."""
    machines = sorted({machine for _, machine in cells})
    rows = dict.fromkeys(first for first, _ in cells)
    return table([*header, *machines], [[*r, *(cells.get((r, m), "-") for m in machines)] for r in rows])


def folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def sources(*questions: str, root: str = "") -> str:
    """A line that lists the files behind a table. root: the path of results/ as seen from the page."""
    found = {r["file"]: f"[{r['file']}]({root}{r['file']}) ({r['device']}, {r['commit']}, {r['date']})"
             for question in questions for r in runs(question)}  # fmt: skip
    return "Files: " + "; ".join(found.values()) + "." if found else NONE


def tasks_of(rows: Sequence[Row]) -> list[str]:
    """The tasks of which an evaluation's rows have samples, in order."""
    return list(dict.fromkeys(k.removesuffix("_each") for r in rows for k in r if k.endswith("_each")))


def measuring(rows: Sequence[Row], length: int) -> list[str]:
    """The tasks that count in means at a length: those of which full, if it ran, finds at least half."""
    full = next((r for r in rows if (r["method"], r["seq_len"]) == ("full", length)), {})
    return [t for t in tasks_of(rows) if full.get(t, 1) >= 0.5]


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


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
