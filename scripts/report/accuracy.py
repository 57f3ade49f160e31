"""Tables of what methods find and predict, at their own settings and at equal bytes."""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any

from cache.spec import method_class, method_files
from scripts.eval.ladders import BOUNDS
from scripts.report.markdown import NONE, Row, measuring, runs, share, sources, table, tasks_of, wilson
from scripts.report.published import pooled

TOKENS = 2048  # in the tables; scripts.report.tables prints the other lengths
TASKS = ("needle", "key_value")
PAPERS = ("full", "sals", "ojakv", "double_sparsity", "double_sparsity_offload", "razor", "self_index")
Cell = dict[str, Any]


def measured() -> dict[tuple[str, int, str], Row]:
    """(checkpoint, tokens, method) -> its row in accuracy*.json."""
    return {(run["checkpoint"], r["seq_len"], r["method"]): r for run in runs("accuracy*") for r in run["rows"]}


def label(row: Row) -> str:
    """A method or preset with the evaluation's knobs."""
    return " ".join([f"`{row['method']}`", *(f"{k}={v}" for k, v in row["knobs"].items())])


def accuracy() -> str:
    """A table per checkpoint with every method at TOKENS tokens, and one at equal bytes read."""
    out = []
    known = measured()
    for checkpoint in dict.fromkeys(c for c, *_ in known):
        rows = [known[at] for m in sorted(method_files()) if (at := (checkpoint, TOKENS, m)) in known]
        tasks = tasks_of(rows)
        texts = [t for t in ("perplexity_code", "perplexity_prose") if any(t in r for r in rows)]
        cells = [
            [label(r), f"{r['kv_share']:.2f}", f"{r['read_share']:.3f}"]
            + [share(r[f"{t}_each"]) if t in r else "-" for t in tasks]
            + [f"{r[t]:.1f}" if t in r else "-" for t in texts]
            for r in rows
        ]
        header = [f"{checkpoint}, {TOKENS} tokens", "KV bytes", "bytes read", *tasks]
        out.append(table([*header, *(t.replace("perplexity_", "ppl ") for t in texts)], cells))
    return "\n\n".join([*out, equal_bytes(), sources("accuracy*", "equal_bytes*")]) if out else NONE


def quality() -> str:
    """The table of the shipped model's card: `full` at every length."""
    rows = [r for (checkpoint, _, m), r in sorted(measured().items()) if (checkpoint, m) == ("tiny", "full")]
    tasks = tasks_of(rows)
    cells = [[str(r["seq_len"]), *(share(r[f"{t}_each"]) if t in r else "-" for t in tasks),
              *(f"{r.get(f'perplexity_{t}', 0):.1f}" for t in ("code", "prose"))] for r in rows]  # fmt: skip
    return table(["tokens", *tasks, "ppl code", "ppl prose"], cells)


def methods() -> str:
    """The README's table: the five papers and `full`, at their defaults and at settings for the published model."""
    found = next(runs("ruler_defaults"), None)
    if found is None:
        return NONE
    length, tasks = found["rows"][0]["seq_len"], measuring(found["rows"], found["rows"][0]["seq_len"])
    timed = [(run["date"], run["machine"], {r["method"]: r for r in run["rows"] if r["length"] == 32768})
             for run in runs("attention")]  # fmt: skip
    _, machine, speed = max(timed, key=lambda x: (len(x[2].keys() & set(PAPERS)), x[0]), default=("", "-", {}))
    samples, of = len(found["rows"][0][f"{tasks[0]}_each"]), {p: list[Row]() for p in PAPERS}
    for row in found["rows"]:
        name = row["method"].partition(",")[0]
        of.get(name if name in of else name.rpartition("-")[0], []).append(row)
    rows = []
    for name, row in ((name, row) for name, mine in of.items() for row in mine):
        at = speed.get(row["method"].removesuffix("-25"), {}).get("times_dense")  # sals-25 is sals
        rows.append([
            f"[`{row['method']}`](kv_methods/{name}.py)", idea(name) if row is of[name][0] else "",
            f"{row['kv_share']:.2f}", f"{row['read_share']:.3f}", pooled(row, tasks), f"{at:.2f}x" if at else "-",
        ])  # fmt: skip
    note = (f"KV bytes held and bytes that a step reads: shares of a dense cache in bf16, {length:,} tokens of "
            f"{found['checkpoint']}. Found: {' and '.join(tasks)} of RULER, {samples} samples each, "
            "with Wilson's interval; the question is unknown when the context is compressed "
            "([every method](results/published/README.md)). Speed: one layer's attention of a decode step against the "
            f"fastest dense attention, Llama-3.1-8B shapes, 32K tokens in bf16, batch 1, two threads ({machine})."
            )  # fmt: skip
    return table(["method", "idea", "KV bytes", "bytes read", "found", "speed, 32K"], rows) + "\n\n" + note


def idea(name: str) -> str:
    """The first line of a method's file."""
    return (sys.modules[method_class(name).__module__].__doc__ or "").strip().split("\n")[0]


# ---- at equal bytes ----


def cells() -> list[Cell]:
    """Every cell of equal_bytes*.json with its setting's row; a task's samples are from the file with the most."""
    every = list(runs("equal_bytes*"))
    rows: dict[tuple[int, str], Row] = {}
    for row in (r for run in every for r in run["rows"]):
        known = rows.setdefault((row["seq_len"], row["method"]), {})
        fewer = {t for t in TASKS if len(row.get(f"{t}_each", ())) < len(known.get(f"{t}_each", ()))}
        known |= {k: v for k, v in row.items() if k.removesuffix("_each") not in fewer}
    found = (c for run in every for c in run["cells"])
    once = {(c["axis"], c["target"], c["method"], c["seq_len"]): c for c in found}.values()
    return [c | dict(row=rows[at]) for c in once if (at := (c["seq_len"], c["spec"])) in rows]


def share_of(cell: Cell) -> float:
    """The bytes on a cell's axis as a share of full's; for bounds, the share of tokens that they attend to."""
    if cell["method"] in BOUNDS:
        return float(Fraction(cell["target"]))
    return cell["row"]["kv_share" if cell["axis"] == "kv" else "read_share"]


def read_cells(every: list[Cell]) -> list[Cell]:
    """The cells of bytes read, and for methods that read all they hold, the cells of bytes held."""
    chosen = [c for c in every if c["axis"] == "read"]
    own = {c["method"] for c in chosen}
    return chosen + [c | dict(axis="read") for c in every if c["axis"] == "kv" and c["method"] not in own]


def found(row: Row, tasks: list[str]) -> str:
    """`100 (96-100) / 79 (70-86)`: percent of each task, with Wilson's interval."""
    parts = []
    for each in (row.get(f"{t}_each") for t in tasks):
        low, high = wilson(sum(each), len(each)) if each else (0.0, 0.0)
        mean = f"{100 * sum(each) / len(each):.0f} ({100 * low:.0f}-{100 * high:.0f})" if each else "-"
        parts.append(mean)
    return " / ".join(parts)


def equal_bytes() -> str:
    """The table at equal bytes read, by method and target."""
    every = [c for c in read_cells(cells()) if c["seq_len"] == TOKENS]
    tasks = [t for t in TASKS if any(t in c["row"] for c in every)]
    targets = sorted({c["target"] for c in every}, key=Fraction, reverse=True)
    at = {(c["method"], c["target"]): found(c["row"], tasks) for c in every}
    rows = [[f"`{m}`", *(at.get((m, t), "-") for t in targets)] for m in sorted({c["method"] for c in every})]
    header = f"found of {' / '.join(tasks)}, %, {TOKENS} tokens, at bytes read of"
    return table([header, *targets], rows) if rows else NONE
