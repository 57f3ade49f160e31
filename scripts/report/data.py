"""The numbers of the result files, by name, for tables, figures and claims. What is not measured raises NotMeasured."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from runtime.machine import ROOT
from scripts.eval.compare import AXES
from scripts.shared.markdown import Row, measuring, paired, resampled, tasks_of

RESULTS = ROOT / "results"
Interval = tuple[float, float, float]  # a mean, and the ends of its 95 % interval


class NotMeasured(Exception):
    """No result file has the number."""


@functools.cache
def _read(path: Path, changed: float) -> list[Row]:
    return json.loads(path.read_text())["runs"]


def newest(question: str, gpu: bool = False) -> tuple[str, list[Row]]:
    """The path below results/ and the runs of a question: the newest machine's; "" and none if it was not measured."""
    found = []
    for path in RESULTS.glob(f"*/{question}.json"):
        runs = _read(path, path.stat().st_mtime)
        found += [(runs[0]["date"], str(path.relative_to(RESULTS)), runs)] * (("gpu" in runs[0]) == gpu)
    _, path, runs = max(found, key=lambda x: x[:2], default=("", "", []))
    return path, runs


def rows_of(question: str, gpu: bool = False) -> Iterator[Row]:
    """The measured rows of all runs, each with the fields that a run's rows share."""
    for run in newest(question, gpu)[1]:
        common = {k: v for k, v in run.items() if not isinstance(v, list | dict)}
        yield from (common | r for r in run.get("rows", ()) if "error" not in r)


# ---- what is found ----


def answers(question: str) -> tuple[dict[tuple[str, int], Row], list[Row]]:
    """Setting and tokens -> its row, with the samples of all parts, where they are as many as full's and a task counts;
    and the cells of ladders, whose `spec` is their setting's name here: the budgets of commands may be some tokens
    apart, as their longest samples are."""
    rows: dict[tuple[str, int], Row] = {}
    cells: dict[tuple[str, str, str, int], Row] = {}
    for run in newest(question)[1]:
        first, step = map(int, run["settings"]["part"].split("/"))
        names: dict[tuple[str, int], list[str]] = {}
        for c in run["cells"]:
            at, name = (c["axis"], c["target"], c["method"], c["seq_len"]), f"{c['method']}: {c['axis']} {c['target']}"
            cells[at] = c | dict(spec=name)
            names.setdefault((c["spec"], c["seq_len"]), []).append(name)
        for row, name in ((r, name) for r in run["rows"] for name in
                          names.get((r["method"], r["seq_len"]), [r["method"]])):  # fmt: skip
            here = rows.setdefault((name, row["seq_len"]), row | {f"{t}_each": [] for t in tasks_of([row])})
            for task in tasks_of([row]):
                index = [first - 1 + i * step for i in range(len(row[f"{task}_each"]))]
                here[f"{task}_at"] = here.get(f"{task}_at", []) + index
                here[f"{task}_each"] = here[f"{task}_each"] + row[f"{task}_each"]
                here[task] = mean(here[f"{task}_each"])
                ends = (*here[f"{task}_tokens"], *row[f"{task}_tokens"])
                here[f"{task}_tokens"] = [min(ends), max(ends)]
    size = {key: [len(row[f"{t}_each"]) for t in tasks_of([row])] for key, row in rows.items()}
    counts = {n for _, n in rows if counted(rows, n)}
    rows = {(m, n): row for (m, n), row in rows.items() if n in counts and size[m, n] == size.get(("full", n))}
    return rows, [c for c in cells.values() if (c["spec"], c["seq_len"]) in rows]


def counted(rows: dict[tuple[str, int], Row], tokens: int) -> list[str]:
    """The tasks that count at a length."""
    return measuring([row for (_, n), row in rows.items() if n == tokens], tokens)


def cell(method: str, at: str = "", tokens: int = 4096, known: bool = False) -> dict[tuple[str, int], float]:
    """A method's score of each sample, by task and index. at: "held 1/4" or "read 1/8"; "" is a setting as it is, and
    `full` is then that of the same file."""
    question = "known" if known else "bytes" if at else "long" if tokens > 4096 else "defaults"
    every, cells = answers(question)
    spec = next((c["spec"] for c in cells if f"{AXES[c['axis']][0]} {c['target']}" == at and
                 (c["method"], c["seq_len"]) == (method, tokens)), "") if at else method  # fmt: skip
    row = every.get(("full" if method == "full" else spec, tokens))
    if row is None:
        raise NotMeasured(f"{method} {at} at {tokens} tokens")
    return {(t, i): x for t in counted(every, tokens) for i, x in zip(row[f"{t}_at"], row[f"{t}_each"], strict=True)}


def found(method: str, at: str = "", tokens: int = 4096, known: bool = False) -> float:
    return mean(cell(method, at, tokens, known).values())


def difference(one: dict[tuple[str, int], float], other: dict[tuple[str, int], float]) -> Interval:
    """Of the samples that both have."""
    both = sorted(one.keys() & other.keys())
    if not both:
        raise NotMeasured("samples in common")
    return paired([one[key] for key in both], [other[key] for key in both])


def against(method: str, other: str = "full", at: str = "", tokens: int = 4096, known: bool = False) -> Interval:
    """The difference of what two methods find at the same bytes."""
    return difference(cell(method, at, tokens, known), cell(other, at, tokens, known))


def same(difference: Interval) -> bool:
    return difference[1] <= 0 <= difference[2]


def better(difference: Interval) -> bool:
    return difference[1] > 0


# ---- what is predicted ----


def windows(tokens: int) -> dict[str, Row]:
    """Setting -> its bytes and, of all texts together, the sums of each window (scripts/eval/perplexity.py)."""
    out: dict[str, Row] = {}
    for row in (r for r in rows_of("distances") if r["seq_len"] == tokens):
        here = out.setdefault(row["method"], row | dict(windows={k: [] for k in row["windows"]}, recalls=[], reads=[]))
        here["recalls"] = [*here["recalls"], row["recall"]]
        here["reads"] = [*here["reads"], row["read_share"]]
        here["read_share"] = mean(here["reads"])
        here["windows"] = {k: [*here["windows"][k], *v] for k, v in row["windows"].items()}
    return out


def windows_of(method: str, tokens: int) -> Row:
    try:
        return windows(tokens)[method]
    except KeyError:
        raise NotMeasured(f"distances of {method} at {tokens} tokens") from None


def predicted(method: str, what: str = "kl", tokens: int = 4096) -> Interval:
    """The mean over predicted tokens of `kl` (nats) or `same` (the share of tokens of which full's is the most likely,
    too), or `worse`: perplexity over full's, less 1."""
    mine, full = (windows_of(m, tokens)["windows"] for m in (method, "full"))
    if what != "worse":
        return resampled([x / n for x, n in zip(mine[what], mine["tokens"], strict=True)])
    nll = zip(mine["nll"], full["nll"], mine["tokens"], strict=True)
    middle, low, high = resampled([(a - b) / n for a, b, n in nll])
    return math.expm1(middle), math.expm1(low), math.expm1(high)


def recall(method: str, tokens: int = 4096) -> float:
    """The share of full's attention mass on the tokens that a method attends to, mean of layers, steps and texts."""
    return mean(windows_of(method, tokens)["recalls"])


# ---- the rest ----


def rows(question: str, **where: object) -> list[Row]:
    """The measured rows whose fields match patterns: model="SmolLM2*", batch=1."""
    out = [r for r in rows_of(question) if all(k in r and fnmatchcase(str(r[k]), str(v)) for k, v in where.items())]
    if not out:
        raise NotMeasured(f"{question}: {where}")
    return out


def values(question: str, key: str, **where: object) -> list[Any]:
    return [r[key] for r in rows(question, **where | {key: "*"})]


def tokens_per_s(method: str, mode: str) -> tuple[float, float]:
    """Of SmolLM2 after 4,000 tokens, and the ratio to full's in the same rounds."""
    row = rows("speed", model="SmolLM2*", length=4000, method=method, mode=mode, tokens_per_s="*")[0]
    return row["tokens_per_s"], row["times_full"]
