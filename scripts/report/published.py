"""A published model and published files: what SmolLM2 answers and how fast, and every real file that was tried."""

from __future__ import annotations

from pathlib import Path

from scripts.report.markdown import NONE, Row, folded, runs, sources, table
from scripts.report.speed import rate

KINDS = {"vocabularies": "GGUF vocabularies", "mistral": "Mistral's tokenizers", "templates": "chat templates",
         "ggufs": "quantized GGUF models"}  # fmt: skip


def speed() -> str:
    """smollm2.json: loading and decoding of each quantization, a row a machine and file."""
    rows, names = [], []
    for run in runs("smollm2"):
        at = {r.get("method", "llama.cpp"): r for r in run["rows"] if "tokens_per_s" in r}
        names = list(dict.fromkeys([*names, *at]))
        load = [run["machine"], f"`{run['model']}`", f"{run['load_seconds']:.1f}",
                f"{run['load_peak_bytes'] / 2**20:,.0f}"]  # fmt: skip
        rows.append((load, at))
    cells = [[*load, *(rate(at[n]["tokens_per_s"]) if n in at else "-" for n in names)] for load, at in rows]
    return table(["machine", "file", "load, s", "peak, MiB", *names], cells) if cells else ""


def answers() -> str:
    """answers.json: how many of the questions each method answers, and as full does."""
    out = []
    for run in runs("answers"):
        full, n = run["rows"][0], len(run["rows"][0]["answers"])
        out.append(table(
            [f"answers on a text of {run['settings']['text_tokens']:,} tokens", f"found, of {n}",
             "same words as full", "KV bytes", "bytes read"],
            [[f"`{r['method']}`", str(sum(r["found"])),
              str(sum(a == b for a, b in zip(r["answers"], full["answers"], strict=True))),
              f"{r['kv_share']:.2f}", f"{r['read_share']:.3f}"] for r in run["rows"]],
        ))  # fmt: skip
    return "\n\n".join(out)


def why(row: Row) -> str:
    """What there is to say of a file beside "exact"."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    if row["exact"] is None:
        return f"read; {row['why']}"
    if row["kind"] == "templates" and row["rendered"] < row["of"]:
        return f"exact; refuses {row['of'] - row['rendered']} of {row['of']} conversations, there and here"
    return "exact" if row["exact"] else "wrong"


def real_files() -> str:
    """real_files.json: how many files of each kind are exact, and what there is to say of the others."""
    rows = []
    for run in runs("real_files"):
        for kind, name in KINDS.items():
            of = [r for r in run["rows"] if r["kind"] == kind]
            rest = "; ".join(f"`{Path(r['file']).name}` {why(r)}" for r in of if why(r) != "exact")
            rows.append([name, str(len(of)), str(sum(r["exact"] is True for r in of)), rest or "-"])
    return folded("every real file that was tried", table(["", "files", "exact", "the others"], rows)) if rows else ""


def published() -> str:
    parts = [speed(), answers(), real_files(), sources("smollm2", "answers", "real_files")]
    return "\n\n".join(filter(None, parts)) or NONE
