"""Published files that were tried, as results/real_files.json has them, and what a published model answers."""

from __future__ import annotations

from typing import Any

from scripts.eval.answers import FACTS
from scripts.report.tables.markdown import NONE, files, folded, source, table

KINDS = {"vocabularies": "GGUF vocabularies", "mistral": "Mistral's tokenizers", "templates": "chat templates",
         "ggufs": "quantized GGUF models"}  # fmt: skip


def why(row: dict[str, Any]) -> str:
    """What there is to say of a file beside "exact"."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    if row["exact"] is None:
        return f"read; {row['why']}"
    if row["kind"] == "templates" and row["rendered"] < row["of"]:
        return f"exact; refuses {row['of'] - row['rendered']} of {row['of']} conversations, there and here"
    return "exact" if row["exact"] else "wrong"


def real_files() -> str:
    out = []
    for file, data in files("real_files.json"):
        rows = data["rows"]
        counts = []
        for kind, name in KINDS.items():
            of = [r for r in rows if r["kind"] == kind]
            rest = [f"`{r['file']}` {why(r)}" for r in of if why(r) != "exact"]
            exact = sum(r["exact"] is True for r in of)
            counts.append([name, str(len(of)), str(exact), "; ".join(rest) if len(rest) < 9 else f"{len(rest)} files"])
        held = [
            [f"`{r['file']}`", ", ".join(r["types"]), f"{r['bytes'] / 2**20:.1f}", f"{r['held_of_file']:.2f}",
             f"{r['load_seconds']:.1f}"]
            for r in rows if r["kind"] == "ggufs" and "types" in r
        ]  # fmt: skip
        out += [
            table(["", "files", "exact", "the others, and remarks"], counts),
            folded("every quantized model", table(["file", "types", "MiB", "held / file", "load, s"], held)),
            source(file, data),
        ]
    return "\n\n".join(out) or NONE


def answers() -> str:
    out = []
    for file, data in files("answers.json"):
        full, n = data["rows"][0], len(data["rows"][0]["answers"])
        rows = [
            [f"`{r['method']}`", f"{sum(r['found'])} of {n}",
             str(sum(a == b for a, b in zip(r["answers"], full["answers"], strict=True))), f"{r['kv_share']:.3f}",
             f"{r['read_share']:.3f}"]
            for r in data["rows"]
        ]  # fmt: skip
        said = [
            [f"`{r['method']}`", *(a.split("\n")[0][:40].replace("|", "\\|") for a in r["answers"])]
            for r in data["rows"]
        ]
        out += [
            table(["method", "found", "same words as full", "KV bytes / full", "read / full"], rows),
            folded("every answer", table(["method", *(q for q, *_ in FACTS)], said)),
            source(file, data),
        ]
    return "\n\n".join(out) or NONE
