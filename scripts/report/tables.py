"""The tables of the pages: for each, the files that it reads, what a line is, and its columns.

    python -m scripts.report.tables               # the names of the tables, their pages and files
    python -m scripts.report.tables speed         # a table as its page has it
    python -m scripts.report.tables speed --json  # every row of its files, with all repetitions

A table is of one file: one machine, one commit. If several machines have a file of a question, the newest is shown.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cache.spec import method_class
from runtime.errors import InputError, run_cli
from runtime.machine import ROOT
from runtime.options import Parser
from scripts.report.measure import stale
from scripts.report.papers import ACCURACY, reported
from scripts.shared.markdown import Row, both_found, measuring, percent, pooled, rate, share, table, tasks_of

RESULTS = ROOT / "results"
ASKED = ("full oracle random streaming self_index double_sparsity sals-25 sals-12.5 ojakv ojakv-0.8 razor h2o tova "
         "snapkv pyramidkv quest loki sparq kivi-4 kivi-2 hadamard palu-50 hshare")  # fmt: skip
NONE = "Not measured yet."
ON_A_GPU = "**Not run on a GPU yet.** `python -m scripts.report.measure --gpu --within 540` measures this section."
HELD = ("ruler_held", "ruler_newer", "ruler_kvzip", "ruler_held_4k", "ruler_8k", "ruler_known")
READ = ("ruler_read", "ruler_read_4k")
PAPERS = ("full", "sals", "ojakv", "double_sparsity", "double_sparsity_offload", "razor", "self_index")


def files(pattern: str, gpu: bool = False) -> dict[str, list[Row]]:
    """Path below results/ -> runs: of each question that matches, the newest machine's file."""
    found: dict[str, tuple[str, str, list[Row]]] = {}
    for file in sorted(RESULTS.glob(f"*/{pattern}.json")):
        runs = json.loads(file.read_text())["runs"]
        if ("gpu" in runs[0]) == gpu and runs[0]["date"] >= found.get(file.stem, ("",))[0]:
            found[file.stem] = runs[0]["date"], str(file.relative_to(RESULTS)), runs
    return {path: runs for _, path, runs in found.values()}


def rows_of(run: Row) -> Iterator[Row]:
    """A run's measured rows, each with the fields that they share."""
    common = {k: v for k, v in run.items() if not isinstance(v, list | dict)}
    yield from (common | r for r in run.get("rows", ()) if "error" not in r)


@dataclass(frozen=True)
class Spec:
    """One or more tables: one per file. Rows with equal `line` are one line, which has the cells of all of them."""

    questions: tuple[str, ...]
    line: dict[str, Callable[[Row], str]]  # header -> text
    cells: Callable[[Row], dict[str, str]]  # header -> text; "-" where a line has none
    rows: Callable[[Row], Iterator[Row]] = rows_of
    caption: Callable[[Row], str] = lambda run: ""
    gpu: bool = False

    def write(self, page: str) -> list[str]:
        out = []
        for path, runs in ((p, r) for q in self.questions for p, r in files(q, self.gpu).items()):
            lines: dict[tuple[str, ...], dict[str, str]] = {}
            for row in (row for run in runs for row in self.rows(run)):
                if cells := self.cells(row):
                    lines.setdefault(tuple(f(row) for f in self.line.values()), {}).update(cells)
            heads = list(dict.fromkeys(head for cells in lines.values() for head in cells))
            body = [[*first, *(cells.get(head, "-") for head in heads)] for first, cells in lines.items()]
            texts = [self.caption(runs[0]), table([*self.line, *heads], body), source(path, runs, page)]
            out += filter(None, texts)
        return out


def source(path: str, runs: Sequence[Row], page: str) -> str:
    """The line below a table: its file, and whether that is stale."""
    link = os.path.relpath(f"results/{path}", os.path.dirname(page) or ".")
    run, why = runs[0], list(dict.fromkeys(filter(None, map(stale, runs))))
    mark = f" **Stale**: {'; '.join(why)}." if why else ""
    return f"File: [{path}]({link}), {run['device']}, commit {run['commit']}, {run['date']}.{mark}"


# ---- speed ----


def shapes(row: Row) -> str:
    kind = (row.get("weights") or row["dtype"].replace("bfloat", "bf").replace("float", "fp")).partition(":")[0]
    return f"{row['model']}, {kind}"


def cache(row: Row) -> str:
    return f"`{row['method']}`" if "method" in row else row["run"]


def times(value: float) -> str:
    return f"{value:.2f}x"


def paper(kind: str, row: Row) -> dict[str, str]:
    found = reported().get((kind, row["model"], row["batch"], row["length"], row.get("method", "")))
    return {"paper": found} if found else {}


def decode(row: Row) -> dict[str, str]:
    """tokens/s with the spread of the rounds, and the ratios of the same rounds."""
    if "tokens_per_s" not in row:
        return {}
    against = {"times full": "times_full", "times llama.cpp": "times_llama_cpp", "times gpt-fast": "times_gpt_fast",
               "times transformers": "times_peer"}  # fmt: skip
    out = {"tokens/s": rate(row["tokens_per_s"]), "spread": percent(row["spread"])}
    out |= {head: times(row[key]) for head, key in against.items() if key in row}
    out |= {"of the byte limit": percent(row["limit_share"])} if "limit_share" in row else {}
    return out | paper("generate", row)


def prompts(row: Row) -> dict[str, str]:
    """The seconds of a prompt, what compression adds to it, and the peak of memory."""
    if "prefill_s" not in row:
        return {}
    out = {"prompt, s": rate(statistics.median(row["prefill_s"])), "spread": percent(row["prefill_spread"])}
    out |= {"on full": f"{100 * row['prefill_overhead']:+.1f} %"} if "prefill_overhead" in row else {}
    out |= {"peak, GiB": f"{row['peak_memory_bytes'] / 2**30:.2f}"} if "peak_memory_bytes" in row else {}
    return out | paper("prompt", row)


def attention(row: Row) -> dict[str, str]:
    if "times_dense" not in row:
        return {}
    ms = f"{row['operator']['ms']:.3g} ({percent(row['operator']['spread'])})"
    ratio = f"{times(row['times_dense'])} ({percent(row['times_dense_spread'])})"
    at = f"{row['length']:,} x {row['batch']}"
    out = {f"{at}: ms": ms, f"{at}: times dense": ratio, f"{at}: of the limit": percent(row["limit_share"])}
    return out | {f"{at}: {k}": v for k, v in paper("attention", row).items()}


MODEL = {"model, weights": shapes, "batch": lambda r: str(r["batch"]), "tokens": lambda r: f"{r['length']:,}"}
SPEED = dict(line=MODEL | {"cache": cache}, cells=decode)
ATTENTION = dict(
    line={"shapes": lambda r: r["model"], "cache": cache}, cells=attention,
    caption=lambda run: "Tokens x batch; in brackets the spread of the rounds, (most - least) / median.",
)  # fmt: skip


# ---- accuracy ----


def answered(row: Row) -> dict[str, str]:
    """Bytes, and what is found of each task."""
    tasks = tasks_of([row])
    out = {"KV bytes": f"{row['kv_share']:.2f}", "bytes read": f"{row['read_share']:.3f}"}
    out |= {"found": pooled(row, row["counted"])} if len(row.get("counted", ())) > 1 else {}
    out |= {t: share(row[f"{t}_each"]) for t in tasks}
    return out | {f"ppl {t}": f"{row[f'perplexity_{t}']:.1f}" for t in ("code", "prose") if f"perplexity_{t}" in row}


def asked(row: Row) -> dict[str, str]:
    """Of a file with all presets, what the question asks for."""
    return answered(row) if row["method"] in {spec.partition(",")[0] for spec in ASKED.split()} else {}


def counted(run: Row) -> Iterator[Row]:
    for r in rows_of(run):
        yield r | dict(counted=[t for t in measuring(run["rows"], r["seq_len"]) if not t.startswith("repeats")])


def samples(run: Row) -> str:
    """The caption of an evaluation: its model, and how many samples of what the pooled share has."""
    n = run["rows"][0]["seq_len"]
    tasks, known = measuring(run["rows"], n), run["rows"][0].get("query_in_prompt")
    counts = {len(r.get(f"{t}_each", ())) for r in run["rows"] for t in tasks} - {0}
    each = f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} samples each" if counts else ""
    return f"{run['checkpoint']}: {', '.join(tasks)}, {each}, the question {'known' if known else 'not known'}."


TOKENS = {"tokens": lambda r: f"{r['seq_len']:,}"}
SETTING = {"method": lambda r: " ".join([f"`{r['method']}`", *(f"{k}={v}" for k, v in r["knobs"].items())])}
FOUND = dict(line=TOKENS | SETTING, cells=answered, rows=counted, caption=samples)


def by_bytes(run: Row) -> Iterator[Row]:
    """A row per method and target, `full` at each of them first."""
    rows, known = {r["method"]: r for r in run["rows"]}, run["rows"][0]["query_in_prompt"]
    cells = [c | dict(row=rows[c["spec"]]) for c in run["cells"]] + run["missing"]
    at = {(c["axis"], c["target"], c["seq_len"]): c for c in cells}
    full = [dict(axis=a, target=t, seq_len=n, method="full", row=rows["full"]) for a, t, n in at]
    full.sort(key=lambda c: (c["axis"], c["seq_len"], -Fraction(c["target"])))
    for c in full + sorted(cells, key=lambda c: c["method"]):
        yield c | dict(found=pooled(c["row"], measuring(run["rows"], c["seq_len"])) if "row" in c else "-", known=known)


def target(row: Row) -> dict[str, str]:
    return {f"{row['seq_len'] // 1024}K, {'held' if row['axis'] == 'kv' else 'read'} {row['target']}": row["found"]}


BYTES = dict(line={"method": lambda r: f"`{r['method']}`"}, cells=target, rows=by_bytes, caption=samples)


def mean_of_layers(run: Row) -> Iterator[Row]:
    layers = run["analyses"]["bases"]["layers"]
    yield {name: statistics.mean(r[name] for r in layers) for name in layers[0]}


def beside(row: Row) -> dict[str, str]:
    ours, theirs = both_found(row)
    same = f"{100 * row['common']:.1f} %" if "common" in row else "-"
    kept = f"{row['keep']} kept"
    return {f"{kept}: ours": share(ours), f"{kept}: kvpress": share(theirs), f"{kept}: in common": same}


def pairs(run: Row) -> Iterator[Row]:
    """Rows of a comparison to kvpress; one that drops nothing is at every share."""
    known = "known" if run["settings"]["query_in_prompt"] else "not known"
    for r in rows_of(run):
        for keep in run["settings"]["keep"].split(",") if r["keep"] == "1" else [r["keep"]]:
            yield r | dict(known=known, keep=keep)


# ---- speculation ----


def drafts(row: Row) -> dict[str, str]:
    """The method alone, and as a draft with a given chance: times full, and the share of the byte limit."""
    if row.get("method", "full") == "full" or "times_full" not in row:
        return {}
    head = "alone" if "chance" not in row else f"{percent(row['chance'])} right"
    return {head: f"{row['times_full']:.2f} ({percent(row['limit_share'])}, spread {percent(row['spread'])})"}


def kept(row: Row) -> dict[str, str]:
    """Of one text: the share of right drafts, tokens a check, and where the text is not full's."""
    apart = "" if row["apart"] is None else f", apart at {row['apart']}"
    return {row["text"]: f"{percent(row['kept'] / row['drafted'])}, {(row['kept'] / row['checks']) + 1:.2f}{apart}"}


# ---- the sections of the pages ----


def idea(name: str) -> str:
    """The first line of a method's file."""
    return (sys.modules[method_class(name).__module__].__doc__ or "").strip().split("\n")[0]


def methods() -> str:
    """The README's table: the five papers and `full`, at their defaults and at settings for the published model."""
    (path, (found, *_)), (timed, (layer, *_)) = (next(iter(files(q).items()), ("", [{}])) for q in
                                                 ("ruler_defaults", "attention"))  # fmt: skip
    if not found or not layer:
        return NONE
    length = found["rows"][0]["seq_len"]
    tasks = measuring(found["rows"], length)
    speed = {r["method"]: r for r in layer["rows"] if r["length"] == 32768}
    count, of = len(found["rows"][0][f"{tasks[0]}_each"]), {p: list[Row]() for p in PAPERS}
    for row in found["rows"]:
        name = row["method"].partition(",")[0]
        of.get(name if name in of else name.rpartition("-")[0], []).append(row)
    rows = []
    for name, row in ((name, row) for name, mine in of.items() for row in mine):
        at = speed.get(row["method"].removesuffix("-25"), {}).get("times_dense")  # sals-25 is sals
        rows.append([
            f"[`{row['method']}`](kv_methods/{name}.py)", idea(name) if row is of[name][0] else "",
            f"{row['kv_share']:.2f}", f"{row['read_share']:.3f}", pooled(row, tasks), times(at) if at else "-",
        ])  # fmt: skip
    note = (f"KV bytes held and bytes that a step reads: shares of a dense cache in bf16, {length:,} tokens of "
            f"{found['checkpoint']}. Found: {' and '.join(tasks)} of RULER, {count} samples each, with Wilson's "
            "interval; the question is unknown when the context is compressed ([every method]"
            "(results/published/README.md)). Speed: one layer's attention of a decode step against the fastest dense "
            f"attention, Llama-3.1-8B shapes, 32K tokens in bf16, batch 1 ({layer['device']}).")  # fmt: skip
    sources = "\n".join(
        source(p, files(q)[p], "README.md") for p, q in ((path, "ruler_defaults"), (timed, "attention"))
    )
    body = table(["method", "idea", "KV bytes", "bytes read", "found", "speed, 32K"], rows)
    return f"{body}\n\n{note}\n{sources}"


def claims() -> str:
    """The papers' scores next to those of ruler_defaults.json, and the command of each paper's table."""
    run = next((runs[0] for runs in files("ruler_defaults").values()), None)
    rows = {r["method"]: r for r in run["rows"]} if run else {}
    tasks, cells = measuring(run["rows"], run["rows"][0]["seq_len"]) if run else [], []
    for spec, where, task, score, full, command in ACCURACY:
        here = f"{pooled(rows[spec], tasks)} of {pooled(rows['full'], tasks)}" if spec in rows else "-"
        again = f"`{command}`" if command else "as above"
        cells.append([f"`{spec}`", where, task, f"{score:g} of {full:g}", here, again])
    heads = [
        "",
        "paper",
        "its model and task",
        "score, of full's score",
        "found here, of full's",
        "command for its table",
    ]
    return table(heads, cells)


MEAN = {"mean over layers": lambda r: "all"}
PAIR = {"question": lambda r: r["known"], "ours": lambda r: f"`{r['method']}`, {r['setting']}",
        "kvpress": lambda r: f"`{r['theirs']}`", "what differs": lambda r: r["note"]}  # fmt: skip
TABLES: dict[str, tuple[str, Sequence[Spec] | Callable[[], str]]] = dict(
    methods=("README.md", methods),
    speed=("results/README.md", [Spec(("speed",), **SPEED)]),
    attention=("results/README.md", [Spec(("attention",), **ATTENTION)]),
    accuracy=("results/README.md", [Spec(("accuracy*",), **FOUND | dict(cells=asked))]),
    gpu=("results/README.md", [Spec(("attention",), **ATTENTION, gpu=True), Spec(("speed",), **SPEED, gpu=True),
                               Spec(("prompt",), MODEL | {"cache": cache}, prompts, gpu=True)]),
    ruler=("results/published/README.md", [
        Spec(("ruler_full*",), **FOUND), Spec((*HELD, *READ), **BYTES), Spec(("ruler_defaults", "ruler_long"), **FOUND),
        Spec(("ruler_groups",), **BYTES), Spec(("bases",), MEAN, lambda r: {k: f"{x:.3f}" for k, x in r.items()},
                                               mean_of_layers)]),
    kvpress=("results/published/README.md", [Spec(("kvpress",), PAIR, beside, pairs)]),
    claims=("results/published/README.md", claims),
    published=("results/published/README.md", [Spec(("smollm2",), **SPEED)]),
    speculation=("docs/speculation.md", [
        Spec(("speculate",), MODEL | {"drafts by": cache}, drafts),
        Spec(("acceptance",), {"tokens": lambda r: f"{r['length']:,}", "drafts by": cache}, kept)]),
    quality=("models/tiny/README.md", [
        Spec(("accuracy",), TOKENS, lambda r: answered(r) if r["method"] == "full" else {})]),
)  # fmt: skip


def section(name: str) -> str:
    """A section of a page, as Markdown."""
    page, made = TABLES[name]
    if callable(made):
        return made()
    return "\n\n".join(x for spec in made for x in spec.write(page)) or (ON_A_GPU if name == "gpu" else NONE)


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("table", nargs="?", help=f"one of {', '.join(TABLES)}")
    p.add_argument("--json", action="store_true", help="print the rows of its files as JSON")
    opt = p.parse_args()
    if opt.table is None:
        names = {t: [page, *(q for s in made for q in s.questions)] if not callable(made) else [page]
                 for t, (page, made) in TABLES.items()}  # fmt: skip
        print(json.dumps(names) if opt.json else "\n".join(f"{t}: {', '.join(x)}" for t, x in names.items()))
        return
    if opt.table not in TABLES:
        raise InputError(f"there is no table {opt.table}: give one of {', '.join(TABLES)}")
    made = TABLES[opt.table][1]
    questions = [(q, s.gpu) for s in made for q in s.questions] if not callable(made) else [("ruler_defaults", False)]
    rows = [dict(file=path) | row for q, gpu in questions for path, runs in files(q, gpu).items()
            for run in runs for row in rows_of(run)]  # fmt: skip
    print(json.dumps(rows) if opt.json else section(opt.table))


if __name__ == "__main__":
    run_cli(main)
