"""What the methods retrieve and predict: the comparison of all, what explains its losses, and the shipped model."""

from __future__ import annotations

from typing import Any

from scripts.report.tables.markdown import NONE, files, folded, percent, share, source, table
from scripts.shared.results import method_rows

OPEN = 2048  # the length whose comparison is shown unfolded
TASKS = ("needle", "needle4", "key_value", "repeats")
TEXTS = ("perplexity_code", "perplexity_prose")


def knobs(row: dict[str, Any]) -> str:
    return "".join(f" {k}={v}" for k, v in row["knobs"].items())


def comparison() -> str:
    """results/methods*.json: one table a length, every method and preset."""
    rows = method_rows()
    if not rows:
        return NONE
    tasks, texts = ([t for t in names if any(t in r for r in rows)] for names in (TASKS, TEXTS))
    lengths, out = sorted({r["seq_len"] for r in rows}), []
    for T in lengths:
        cells = [
            [f"`{r['method']}`{knobs(r)}", f"{r['kv_share']:.2f}", f"{r['read_share']:.3f}"]
            + [share(r[f"{t}_each"]) if t in r else "-" for t in tasks]
            + [f"{r[t]:.1f}" if t in r else "-" for t in texts]
            for r in rows
            if r["seq_len"] == T
        ]
        header = [f"{T} tokens", "KV bytes", "bytes read", *tasks, *(t.replace("perplexity_", "ppl ") for t in texts)]
        body = table(header, cells)
        out.append(body if T == OPEN else folded(f"{T} tokens", body))
    sources = "\n\n".join(source(*f) for f in files("methods*.json"))
    n = sorted({len(r[f"{t}_each"]) for r in rows for t in tasks if t in r and t != "repeats"})
    samples = f"{n[0]} to {n[-1]}" if len(n) > 1 else f"{n[0]}" if n else "No"
    told = f"{samples} samples a cell of needles and keys, in brackets Wilson's 95 % interval."
    return "\n\n".join(out) + f"\n\n{told}\n\n{sources}"


def kvpress() -> str:
    """results/kvpress*.json: what our evicting methods and the presses of kvpress keep of the same prompts."""
    out = []
    for file, data in files("kvpress*.json"):
        rows = [
            [f"`{r['ours']}`", f"`{r['press']}`", f"{100 * r['common']:.1f} %", f"{100 * r['common_min']:.1f} %",
             f"{100 * r['equal']:.1f} %", share(r["needle_each"]["ours"]), share(r["needle_each"]["theirs"]), r["note"]]
            for r in data["rows"]
        ]  # fmt: skip
        header = ["ours", "theirs", "tokens in common", "the least", "equal heads", "needles, ours", "theirs", ""]
        s = data["settings"]
        of = f"{s['samples']} prompts of {s['seq_len']} tokens, {100 * s['keep']:.0f} % kept."
        out += [table(header, rows), f"{of} {source(file, data)}"]
    return "\n\n".join(out) or NONE


def losses() -> str:
    """results/losses*.json beside the cells of the comparison that they explain: the same method, other knobs."""
    known = {(r["method"], r["seq_len"]): r for r in method_rows()}
    rows, sources = [], []
    for name, data in files("losses*.json"):
        sources.append(source(name, data))
        for r in data["rows"]:
            as_above = known[r["method"], r["seq_len"]]
            changed = [f"{k}={v}" for k, v in r["knobs"].items()] + ["the question is known"] * r["query_in_prompt"]
            for task in TASKS:
                if task in r and task in as_above:
                    before, after = (share(x[f"{task}_each"]) for x in (as_above, r))
                    rows.append([f"`{r['method']}`", str(r["seq_len"]), task, before, ", ".join(changed), after])
    if not rows:
        return NONE
    return table(["method", "tokens", "task", "as above", "with", ""], rows) + "\n\n" + "\n\n".join(sources)


def retrieval(only: str | None = None, folder: str = "") -> str:
    """The rows of every results/retrieval*.json, of one method only if asked."""
    tasks = ["needle", "needle4", "ruler", "repeats"]

    def cell(row: dict, key: str) -> str:
        return "-" if key not in row else f"{row[key]:.1f}" if key in TEXTS else share(row[f"{key}_each"])

    rows, sources = [], []
    for name, data in files("retrieval*.json"):
        mine = [r for r in data["rows"] if only in (None, r["method"])]
        rows += [
            [r["method"] + knobs(r), str(r["seq_len"]), f"{r['kv_share']:.3f}"] + [cell(r, t) for t in [*tasks, *TEXTS]]
            for r in mine
        ]
        if mine:
            sources.append(f"{mine[0]['samples']} samples a needle cell: {source(name, data, folder)}")
    if not rows:
        return NONE
    header = ["method", "tokens", "KV bytes / full", *tasks, "ppl code", "ppl prose"]
    return table(header, rows) + "\n\n" + "\n\n".join(sources)


def weights() -> str:
    """results/weights.json: what rounding the weights costs under some methods."""
    out = []
    for file, data in files("weights*.json"):
        rows = [
            [f"`{r['method']}`", r["weights"], share(r["needle_each"]), f"{r['perplexity_code']:.3f}",
             f"{r['perplexity_prose']:.3f}", percent(r["greedy_agreement"]), f"{r['logits_off']:.4f}"]
            for r in sorted(data["rows"], key=lambda r: r["method"])
        ]  # fmt: skip
        header = [
            "method",
            "weights",
            "needles",
            "perplexity, code",
            "prose",
            "greedy tokens kept",
            "logits off",
        ]
        s = data["settings"]
        out.append(table(header, rows))
        out.append(
            f"{s['length']} tokens; greedy: {data['rows'][0]['prompts']} prompts, {s['new']} tokens each. "
            + source(file, data)
        )
    return "\n\n".join(out) or NONE
