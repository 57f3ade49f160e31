"""The methods: a row each with what they cost and keep, for the README; and with knobs, presets and source."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

from cache.spec import method_class, method_files, parse_spec, presets, resolve
from errors import InputError
from scripts.report.tables.accuracy import TASKS, knobs
from scripts.report.tables.markdown import files, percent, table
from scripts.shared.results import method_rows

TOKENS = 2048  # of the context that bytes and accuracy are of
LENGTH = 32768  # tokens in the cache that speed is of


def idea(name: str) -> str:
    """The first line of a method's file."""
    return (sys.modules[method_class(name).__module__].__doc__ or "").strip().split("\n")[0]


def family(spec: str) -> str | None:
    """The method that a row of a result file is of; None if there is no such method any more."""
    try:
        return resolve(parse_spec(spec)[-1].name)[0].__module__.rpartition(".")[2]
    except InputError:
        return None


def methods() -> str:
    """One row a method: its own defaults, where they were measured, else the setting that was, beside the number."""
    kept = {r["method"]: r for r in method_rows() if r["seq_len"] == TOKENS}
    timed: list[dict[str, Any]] = [
        r for _, data in files("attention_cpu_bf16.json") for r in data["rows"]
        if (r["batch"], r["length"]) == (1, LENGTH) and "times_dense" in r
    ]  # fmt: skip
    rows = []
    for name in sorted(method_files()):
        row = kept.get(name)
        tasks = [row[t] for t in TASKS if t in row] if row else []
        # what is asked for by its own name first
        mine = sorted((r for r in timed if family(r["method"]) == name), key=lambda r: r["method"] != name)
        rows.append([
            f"[`{name}`](kv_methods/{name}.py){knobs(row) if row else ''}",
            idea(name),
            f"{row['kv_share']:.2f}" if row else "-",
            percent(statistics.mean(tasks)) if tasks else "-",
            times(name, mine[0]) if mine else "-",
        ])  # fmt: skip
    size, n = f"{TOKENS} tokens", min((len(r["needle_each"]) for r in kept.values() if "needle" in r), default=0)
    asked = ", ".join(t for t in TASKS if any(t in r for r in kept.values()))
    note = (f"KV bytes: allocated, as a share of a dense cache, {size} of the shipped model in fp32. Accuracy: mean of "
            f"{asked} at {size}, the question unknown when the context is compressed; "
            f"at least {n} needles. Speed: one layer's attention of a decode step against the fastest dense attention, "
            f"Llama-3.1-8B shapes, {LENGTH // 1024}K tokens in bf16, batch 1, on a CPU."
            )  # fmt: skip
    header = ["method", "idea", f"KV bytes, {TOKENS // 1024}K", f"accuracy, {TOKENS // 1024}K",
              f"speed, {LENGTH // 1024}K"]  # fmt: skip
    return table(header, rows) + "\n\n" + note


def times(name: str, row: dict[str, Any]) -> str:
    """Its ratio to dense attention, and of which setting if it is not the method as it is."""
    return f"{row['times_dense']:.2f}x" + (f" `{row['method']}`" if row["method"] != name else "")


def settings() -> str:
    """Every method with its knobs and their defaults, its presets and its source."""
    rows = []
    for name in sorted(method_files()):
        cls = method_class(name)
        own = ", ".join(f"`{f.name}={f.default}`" for f in dataclasses.fields(cls.Args))
        also = ", ".join(f"`{p}`" for p, (m, _) in presets().items() if m == name)
        rows.append([f"`{name}`", idea(name), own or "-", also or "-", cls.paper])
    return table(["method", "idea", "knobs", "presets", "source"], rows)
