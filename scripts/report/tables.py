"""The generated sections of the pages: tables from result files, and the sentences that they bear out.

If several machines have a file of a question, the newest is shown.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

from cache.spec import method_class
from scripts.eval.compare import AXES
from scripts.report import claims, data
from scripts.report.data import NotMeasured
from scripts.report.measure import PAPERS, stale
from scripts.report.papers import ACCURACY, reported
from scripts.shared.markdown import Row, paired, percent, rate, scores, share, table

NONE = "Not measured yet."
ON_A_GPU = "**No speed was measured on a GPU yet.** `python -m scripts.report.measure --gpu --within 540` does."


def sources(page: str, *questions: str, gpu: bool = False) -> str:
    """The lines below a table: its files, where and on which commits they were measured, and whether they are stale."""
    out = []
    for path, runs in filter(any, (data.newest(q, gpu) for q in questions)):
        link = os.path.relpath(f"results/{path}", os.path.dirname(page) or ".")
        devices, commits, dates = (dict.fromkeys(run[k] for run in runs) for k in ("device", "commit", "date"))
        why = list(dict.fromkeys(filter(None, map(stale, runs))))
        mark = f" **Stale**: {'; '.join(why)}." if why else ""
        minutes = sum(run.get("seconds", 0) for run in runs) / 60
        took = f", {minutes:.0f} minutes" if minutes else ""
        same = "".join(f", verified at {c}" for c in dict.fromkeys(r["same_as"] for r in runs if "same_as" in r))
        on = "; ".join(devices).replace(" 1 threads", " 1 thread")
        out.append(f"File: [{path}]({link}), {on}, commit {', '.join(commits)}{same}, "
                   f"{', '.join(dates)}{took}.{mark}")  # fmt: skip
    return "\n".join(out)


def wide(first: Sequence[str], lines: dict[tuple[str, ...], dict[str, str]]) -> str:
    """A table of lines whose cells have a header each; "-" where a line has none."""
    heads = list(dict.fromkeys(head for cells in lines.values() for head in cells))
    return table([*first, *heads], [[*line, *(cells.get(h, "-") for h in heads)] for line, cells in lines.items()])


# ---- accuracy ----


def compared(each: Sequence[float], full: Sequence[float]) -> str:
    """`78 =` if the paired difference to full may be 0, otherwise `40 (-52 to -25)`: the found, and its interval."""
    _, low, high = paired(each, full)
    middle = f"{100 * statistics.mean(each):.0f}"
    return f"{middle} =" if low <= 0 <= high else f"{middle} ({100 * low:+.0f} to {100 * high:+.0f})"


def samples(rows: dict[tuple[str, int], Row], tokens: int) -> str:
    """`niah_single_1 and niah_multikey_1-style, 60 samples of 1,919 to 2,047 tokens`."""
    row, tasks = rows["full", tokens], data.counted(rows, tokens)
    ends = [row[f"{t}_tokens"] for t in tasks]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    return f"{' and '.join(tasks)}, {len(scores(row, tasks))} samples of {low:,} to {high:,} tokens"


def accuracy(page: str) -> str:
    """A line per length and method; a column per share of the bytes."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    said = {}
    for question, before in (("bytes", ""), ("known", "known, ")):
        rows, cells = data.answers(question)
        for c in sorted(cells, key=lambda c: (c["seq_len"], c["axis"], -Fraction(c["target"]), c["method"])):
            n, head = c["seq_len"], f"{before}{AXES[c['axis']][0]} {c['target']}"
            full, tasks = rows["full", n], data.counted(rows, n)
            said[before, n] = f"{before.capitalize()}{n // 1024}K: {samples(rows, n)}"
            lines.setdefault((f"{n // 1024}K", "`full`"), {})[head] = share(scores(full, tasks)).removesuffix(" %")
            text = compared(scores(rows[c["spec"], n], tasks), scores(full, tasks))
            lines.setdefault((f"{n // 1024}K", f"`{c['method']}`"), {})[head] = text
    if not lines:
        return NONE
    return f"{'. '.join(said.values())}.\n\n{wide(['tokens', 'method'], lines)}\n\n{sources(page, 'bytes', 'known')}"


def distance(method: str, what: str, tokens: int = 4096) -> str:
    if method == "full":
        return "-"
    try:
        middle, low, high = data.predicted(method, what, tokens)
    except NotMeasured:
        return "-"
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def idea(name: str) -> str:
    """The first line of a method's file."""
    return (sys.modules[method_class(name).__module__].__doc__ or "").strip().split("\n")[0]


def methods(page: str) -> str:
    """The README's table: `full` and the settings of the papers at one length: bytes, what is found, KL, speed."""
    rows, _ = data.answers("defaults")
    body, ideas = [], set[str]()
    for spec in ("full", *PAPERS.split()):
        name, row = spec.partition(",")[0].partition("-")[0], rows.get((spec, 4096))
        held = [f"{row['kv_share']:.2f}", f"{row['read_share']:.3f}"] if row else ["-", "-"]
        body.append([f"[`{spec}`](kv_methods/{name}.py)", "" if name in ideas else idea(name), *held,
                     by_default(spec, rows), distance(spec, "kl"),
                     *(tokens_per_s(spec, mode) for mode in ("eager", "compiled"))])  # fmt: skip
        ideas.add(name)
    heads = ["method", "idea", "held", "read", "found, %", "KL", "eager", "compiled"]
    said = f"Found: {samples(rows, 4096)}." if rows else ""
    return "\n\n".join(filter(None, [table(heads, body), said, sources(page, "defaults", "distances", "speed")]))


def by_default(spec: str, rows: dict[tuple[str, int], Row], tokens: int = 4096) -> str:
    """What a setting finds."""
    if (spec, tokens) not in rows:
        return "-"
    full, mine = (scores(rows[m, tokens], data.counted(rows, tokens)) for m in ("full", spec))
    return share(full).removesuffix(" %") if spec == "full" else compared(mine, full)


def tokens_per_s(method: str, mode: str) -> str:
    try:
        speed, times = data.tokens_per_s(method, mode)
    except NotMeasured:
        return "-"
    return rate(speed) if method == "full" else f"{rate(speed)} ({times:.2f}x)"


def papers(page: str) -> str:
    """The papers' scores beside ours at 4K and 8K, and the command of each paper's table."""
    short, long = (data.answers(q)[0] for q in ("defaults", "long"))
    body = [[f"`{spec}`", where, task, f"{score:g} of {full:g}", by_default(spec, short), by_default(spec, long, 8192),
             distance(spec, "worse"), f"`{command}`" if command else "as above"]
            for spec, where, task, score, full, command in ACCURACY]  # fmt: skip
    heads = ["", "paper", "its model and task", "score, of full's", "found at 4K, %", "at 8K, %",
             "perplexity / full's - 1", "command for its table"]  # fmt: skip
    said = [f"Here: {samples(rows, n)}." for rows, n in ((short, 4096), (long, 8192)) if rows]
    return "\n\n".join(filter(None, [*said, table(heads, body), sources(page, "defaults", "long", "distances")]))


# ---- speed ----


def speed(page: str, gpu: bool = False) -> str:
    """A line per cache. `full` has tokens/s, or the milliseconds of one layer; the others their ratio to it, or to the
    fastest dense attention, in the same rounds; in brackets the spread of the rounds."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    timed = [r | dict(mode=r.get("mode", "compiled")) for r in data.rows_of("speed", gpu) if "tokens_per_s" in r]
    full = {sizes(r): r["tokens_per_s"] for r in timed if r.get("method") == "full"}
    for r in timed:
        ratio = r.get("method") != "full" and sizes(r) in full
        times = r.get("times_full", r["tokens_per_s"] / full[sizes(r)]) if ratio else 1.0
        text = f"{times:.2f}x" if ratio else f"{rate(r['tokens_per_s'])}/s"
        entry(lines, r, ", ".join(sizes(r)), f"{text} ({percent(r['spread'])})", "generate", gpu)
    for r in data.rows_of("attention", gpu):
        if "times_dense" in r:
            text = f"{r['times_dense']:.2f}x ({percent(r['times_dense_spread'])})"
            text = f"{r['operator']['ms']:.3g} ms, {text}" if r["method"] == "full" else text
            entry(lines, r, f"one layer, {r['model']}, {r['batch']} x {r['length']:,}", text, "attention", gpu)
    for r in data.rows_of("prompt", gpu):
        if "prefill_s" in r:
            more = f", {100 * r['prefill_overhead']:+.1f} % on full" if "prefill_overhead" in r else ""
            text = f"{rate(statistics.median(r['prefill_s']))} s{more} ({percent(r['prefill_spread'])})"
            entry(lines, r, f"prompt, {r['model']}, {r['batch']} x {r['length']:,}", text, "prompt", gpu)
    if not lines:
        return ON_A_GPU if gpu else NONE
    first = sorted(lines.items(), key=lambda line: line[0][0] != "`full`")
    return f"{wide(['cache'], dict(first))}\n\n{sources(page, 'speed', 'attention', 'prompt', gpu=gpu)}"


def sizes(row: Row) -> tuple[str, str, str]:
    model = row["model"].partition("-Instruct")[0]
    weights = f" {row['weights']}".partition(":")[0] if "weights" in row else ""
    return model + weights, f"{row['batch']} x {row['length']:,}", row["mode"]


def entry(lines: dict[tuple[str, ...], dict[str, str]], row: Row, head: str, text: str, kind: str, gpu: bool) -> None:
    """Enters a cell, and the paper's ratio beside it."""
    cells = lines.setdefault((f"`{row['method']}`" if "method" in row else row["run"],), {})
    cells[head] = text
    said = reported().get((kind, row["model"], row["batch"], row["length"], row.get("method", "")))
    if said and gpu:
        cells[f"{head}: paper"] = said


def figures(page: str, **names: str) -> str:
    """Those that are drawn."""
    folder = os.path.relpath("results", os.path.dirname(page) or ".")
    there = {name: text for name, text in names.items() if (data.RESULTS / f"{name}.png").is_file()}
    drawn = (f"![{text}]({folder}/{name}.png)" for name, text in there.items())
    return "\n\n".join(drawn).replace("(./", "(") or NONE


def sentences(page: str, topic: str, *questions: str) -> str:
    said = "\n".join(f"- {text}" for text in claims.holding(topic)[0])
    return f"{said}\n\n{sources(page, *questions)}".strip() if said else NONE


AT_EQUAL_BYTES = "What each method finds, against the bytes that it holds and those that a step reads"
PAGE, SPECULATION = "results/README.md", "docs/speculation.md"
SECTIONS: dict[str, tuple[str, Callable[[], str]]] = dict(  # name -> page, text
    methods=("README.md", lambda: methods("README.md")),
    figure=("README.md", lambda: figures("README.md", accuracy=AT_EQUAL_BYTES)),
    accuracy=(PAGE, lambda: accuracy(PAGE)),
    figures=(PAGE, lambda: figures(PAGE, accuracy=AT_EQUAL_BYTES, distances="KL against the bytes that a step reads")),
    found=(PAGE, lambda: sentences(PAGE, "found", "defaults", "long", "distances")),
    newer=(PAGE, lambda: sentences(PAGE, "newer", "distances", "speed")),
    papers=(PAGE, lambda: papers(PAGE)),
    kvpress=(PAGE, lambda: sentences(PAGE, "kvpress", "kvpress")),
    speed=(PAGE, lambda: speed(PAGE)),
    faster=(PAGE, lambda: sentences(PAGE, "speed", "restore")),
    gpu=(PAGE, lambda: speed(PAGE, True)),
    speculation=(SPECULATION, lambda: sentences(SPECULATION, "speculation", "speculate")),
)
