"""Tables of a GPU run, results/h100/*.json, together with the papers' figures.

A paper's figure is shown next to ours if shapes, batch, length and method are the same.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from runtime.errors import InputError
from scripts.bench.layer import STAGES
from scripts.report.markdown import RESULTS, folded, percent, table
from scripts.report.papers import DOUBLE_SPARSITY_6C, SELF_INDEX_4, SELF_INDEX_5, reported

Row = dict[str, Any]
FAR = 0.5  # rows below this share of the byte limit are broken down into stages
GOALS = [("llama-3.1-8b", 8, 32768), ("llama-2-7b", 8, 4096)]


def load(folder: Path) -> list[Row]:
    """All rows of all result files, each with its file's common fields; a row in two files counts once."""
    rows: dict[tuple, Row] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            data = json.loads(file.read_text())
            found = data["rows"] if isinstance(data, dict) else []
            common = {k: data[k] for k in ("device", "model", "synthetic") if k in data} if found else {}
            for r in found:
                row = common | r | dict(file=file.name)
                row["model"] = Path(row["model"]).stem if row["model"].endswith(".json") else row["model"]
                kind = "attention" if "run" not in row else "prompt" if not row["synthetic"] else "generate"
                where = kind, file.name * (kind != "attention"), row["model"], row["batch"], row["length"]
                if (known := rows.get(key := (*where, row.get("run", row.get("method"))))) is None or len(row) > len(
                    known
                ):
                    rows[key] = row | dict(kind=kind)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(f"cannot read {file} as a result of a benchmark: {type(e).__name__}: {e}") from None
    return list(rows.values())


def where(row: Row) -> list[str]:
    return [row["model"], str(row["batch"]), str(row["length"])]


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f} GiB"


def paper(row: Row, papers: dict) -> str:
    return papers.get((row["kind"], row["model"], row["batch"], row["length"], row.get("method")), "-")


PLACE = ["shapes", "batch", "tokens"]


def attention(rows: list[Row], papers: dict) -> list[str]:
    """The operator and the best dense attention of the same rounds; and the stages of rows far from the limit."""
    rows = [r for r in rows if "operator" in r]
    rows.sort(key=lambda r: (r["model"], r["batch"], r["length"]))
    header = [*PLACE, "method", "ms", "best dense", "against it", "paper", "of the byte limit"]

    def cells(r: Row) -> list[str]:
        dense = f"{r['dense']['ms']:.3f}" if "dense" in r else "-"
        return [*where(r), f"`{r['method']}`", f"{r['operator']['ms']:.3f}", dense, times(r.get("times_dense")),
                paper(r, papers), share(r["limit_share"])]  # fmt: skip

    goals = [r for r in rows if (r["model"], r["batch"], r["length"]) in GOALS]
    shown = [r for r in rows if paper(r, papers) != "-" or r in goals]
    others = [r for r in rows if r not in shown]
    out = ["**One layer's attention**, whole step, against the fastest dense attention of the same rounds."]
    out += [table(header, [cells(r) for r in shown])] if shown else []
    out += [folded("Other sizes", table(header, [cells(r) for r in others]))] if others else []
    modules = []
    for r in rows:
        if (r["batch"], r["length"], r["method"]) == (10, 16384, "self_index-7.5") and "dense" in r:
            for stage, (full, ours) in SELF_INDEX_4.items():
                if stage in r:
                    cell = [f"{r[stage]['ms']:.3f}", times(r["dense"]["ms"] / r[stage]["ms"])]
                    modules.append([stage, *cell, f"{full / ours:.2f}x"])
    if modules:
        out.append("Self-Indexing KVCache, Table 4: 16K tokens, batch 10, 7.5 % of the tokens. Ours against the whole "
                   "dense attention, the paper's scores against a full product of queries and keys.")  # fmt: skip
        out.append(table(["stage", "ms", "against dense", "paper"], modules))
    far = [r for r in goals if r["limit_share"] < FAR and any(s in r for s in STAGES)]
    if far:
        out.append(f"**Below {share(FAR)} of the byte limit**: where the time goes, by stages timed apart; `select` "
                   "contains `score`.")  # fmt: skip
        stages = [[*where(r), f"`{r['method']}`", f"{r['operator']['ms']:.3f}", f"{r['limit_ms']:.3f}",
                   *(f"{r[s]['ms']:.3f}" if s in r else "-" for s in STAGES)] for r in far]  # fmt: skip
        out.append(table([*PLACE, "method", "ms", "limit", *STAGES], stages))
    return out if rows else []


def end_to_end(rows: list[Row], papers: dict) -> list[str]:
    """The decode speed of every run, without empty columns."""
    mine = [r for r in rows if r["kind"] == "generate" and "tokens_per_s" in r and r["file"] != "offload.json"]
    against = dict(times_full="full", times_gpt_fast="gpt-fast", times_double_sparse="the published Double Sparsity",
                   times_peer="transformers")  # fmt: skip
    header = [*PLACE, "run", "tokens/s", *(f"against {what}" for what in against.values()), "paper, against gpt-fast",
              "KV bytes", "of the byte limit"]  # fmt: skip
    cells = [
        [*where(r), f"`{r['method']}`" if "method" in r else r["run"], f"{r['tokens_per_s']:,.0f}",
         *(times(r.get(key)) for key in against), paper(r, papers),
         share(r["kv_bytes"] / r["kv_bytes_full"]) if r["kv_bytes"] else "-", share(r.get("limit_share"))]
        for r in sorted(mine, key=lambda r: (r["model"], r["batch"], r["length"]))
    ]  # fmt: skip
    used = [i for i in range(len(header)) if any(row[i] != "-" for row in cells)]
    note = (f"**Decode, end to end.** The caches hold random keys and values. Of 7.5 % the paper says: {SELF_INDEX_5}."
            )  # fmt: skip
    return [note, table([header[i] for i in used], [[row[i] for i in used] for row in cells])] if cells else []


def prompts(rows: list[Row], papers: dict) -> list[str]:
    """A long prompt with each method; and what compression adds to prefill and to the time of the second token."""
    out, mine = [], [r for r in rows if r["kind"] == "prompt" and "prefill_s" in r]
    long = [r for r in mine if "tokens_per_s" in r]
    if long:
        cells = [
            [*where(r), f"`{r['method']}`", gib(r.get("peak_memory_bytes")), gib(r["kv_bytes"]),
             share(r["kv_bytes"] / r["kv_bytes_full"]), f"{statistics.median(r['prefill_s']):.2f} s",
             f"{1e3 * statistics.median(r['seconds_per_step']):.2f} ms", times(r.get("times_full"))]
            for r in long
        ]  # fmt: skip
        header = ["method", "peak memory", "KV bytes", "of full", "prefill", "a decode step", "against full"]
        out += ["**A long prompt on one card.** Offloading methods hold most of their KV bytes on the host."]
        out += [table([*PLACE, *header], cells)]
    paired = [r for r in mine if "prefill_overhead" in r and "tokens_per_s" not in r]
    if paired:
        cells = []
        for r in sorted(paired, key=lambda r: r["length"]):
            second, full = (statistics.median(r[k]) for k in ("second_token_s", "full_second_token_s"))
            took = [f"{statistics.median(r['prefill_s']):.3f} s", f"{100 * r['prefill_overhead']:+.1f} %",
                    f"{second:.3f} s", f"{100 * (second / full - 1):+.1f} %"]  # fmt: skip
            cells.append([*where(r), f"`{r['method']}`", *took, paper(r, papers)])
        out.append("**What compression adds to a prompt**, in turns with `full`. The second token takes the prompt and "
                   "one decode step, not compiled.")  # fmt: skip
        header = ["method", "prefill", "on full", "second token", "on full", "paper, on its full"]
        out.append(table([*PLACE, *header], cells))
    return out


def offload(rows: list[Row]) -> list[str]:
    mine = [r for r in rows if r["file"] == "offload.json" and "tokens_per_s" in r]
    base = {(r["batch"], r["length"]): r["tokens_per_s"] for r in mine if r["method"] == "flexgen"}
    cells = []
    for r in mine:
        copied = base.get((r["batch"], r["length"]))
        ratio = times(copied and r["tokens_per_s"] / copied)
        cells.append([*where(r), f"`{r['method']}`", f"{r['tokens_per_s']:,.2f}", ratio])
    note = f"**K and V in host memory**, against copying all of them for every token. Paper: {DOUBLE_SPARSITY_6C}."
    return [note, table([*PLACE, "method", "tokens/s", "against flexgen"], cells)] if cells else []


def problems(folder: Path, rows: list[Row]) -> list[str]:
    """The rows and steps that were not measured, with reasons."""
    lines = [f"- {r['model']}, batch {r['batch']}, {r['length']} tokens, {r.get('run', r.get('method'))}: {r['error']}"
             for r in rows if "error" in r]  # fmt: skip
    steps = folder / "steps.json"
    for s in json.loads(steps.read_text()) if steps.exists() else ():
        if "skipped" in s:
            lines.append(f"- {s['step']} was skipped: {s['skipped']}")
        elif s["timed_out"]:
            lines.append(f"- {s['step']} ran out of its time after {s['seconds']} s")
        elif s["status"]:
            lines.append(f"- {s['step']} failed: {' '.join(s['last'][-1:])}")
    return [folded(f"Not measured: {len(lines)}", "\n".join(lines))] if lines else []


def ceilings(folder: Path, files: list[Path]) -> str:
    data = json.loads(next((f for f in files if f.name == "environment.json"), files[0]).read_text())
    links = ", ".join(f"[{f.stem}]({folder.name}/{f.name})" for f in files)
    rates = (f"reading {data['read_bytes_per_s'] / 1e9:,.0f} GB/s, copying {data['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
             f"matrix products {data['matmul_flops'] / 1e12:,.1f} TFLOP/s")  # fmt: skip
    return (f"{data['device']}, {data['matmul_dtype']}, torch {data['versions']['torch']}, commit {data['commit']}, "
            f"{data['date']}. Measured in the same run: {rates}. The byte limit of a step is the bytes that it must "
            f"read over the best of these bandwidths. Files: {links}.")  # fmt: skip


def section(folder: Path = RESULTS / "h100") -> str:
    """The whole section; without results, it says how to get them."""
    files = [f for f in sorted(folder.glob("*.json")) if f.name not in ("steps.json", "once.json")]
    if not files:
        return ("**Not run on a GPU yet.** On a machine with one, run `scripts/bench/gpu_suite.sh 1`, `2` and `3`, and "
                "then `python -m scripts.report.update_readme`: it fills this section, with the papers' numbers, too."
                )  # fmt: skip
    rows, papers = load(folder), reported()
    parts = [ceilings(folder, files), *attention(rows, papers), *end_to_end(rows, papers), *prompts(rows, papers),
             *offload(rows), *problems(folder, rows)]  # fmt: skip
    return "\n\n".join(parts)
