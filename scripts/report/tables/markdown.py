"""Tables of Markdown, and where their numbers come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    """Name and content of the result files that match."""
    for file in sorted(RESULTS.glob(pattern)):
        yield file.name, json.loads(file.read_text())


def source(name: str, data: dict[str, Any], folder: str = "") -> str:
    """The command as it was run, where and at which commit; folder: of results/, as seen from the page."""
    return (f"`{data['command']}` at commit {data['commit']} on {data['device']}, torch {data['versions']['torch']}: "
            f"[{name}]({folder}{name})")  # fmt: skip


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
