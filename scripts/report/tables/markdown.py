"""Tables of Markdown, and where their numbers come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from runtime import ROOT

RESULTS = ROOT / "results"
NONE = "Not measured yet."


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def files(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path below results/ and content of the result files that match."""
    for file in sorted(RESULTS.glob(pattern)):
        yield str(file.relative_to(RESULTS)), json.loads(file.read_text())


def source(name: str, data: dict[str, Any], folder: str = "") -> str:
    """The command as it was run, where and at which commit; folder: of results/, as seen from the page."""
    return (f"`{data['command']}` at commit {data['commit']} on {data['device']}, torch {data['versions']['torch']}: "
            f"[{name}]({folder}{name})")  # fmt: skip


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of n samples, 95 % by default."""
    middle, half = hits / n + z**2 / (2 * n), z * (hits / n * (1 - hits / n) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return max(0.0, low), min(1.0, high)


def share(each: Sequence[float]) -> str:
    """Of samples that are hit or missed, with the interval: `93 (86-97) %`; of others the mean alone."""
    mean = sum(each) / len(each)
    if not set(each) <= {0, 1} or len(each) < 10:  # shares of a text, not hits
        return percent(mean)
    low, high = wilson(sum(each), len(each))
    return f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f}) %"
