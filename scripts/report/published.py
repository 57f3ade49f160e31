"""Tables of a published model (retrieval, answers, speed), and of every published file that was tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from scripts.eval.compare import AXES
from scripts.report.markdown import NONE, Row, folded, measuring, runs, share, sources, table, tasks_of, wilson
from scripts.report.papers import ACCURACY
from scripts.report.speed import rate

KINDS = {"vocabularies": "GGUF vocabularies", "mistral": "Mistral's tokenizers", "templates": "chat templates",
         "ggufs": "quantized GGUF models"}  # fmt: skip


def speed() -> str:
    """smollm2.json: loading and decoding of each quantization, one row per machine and file."""
    rows, names = [], list[str]()
    for run in runs("smollm2"):
        at = {r.get("method", "llama.cpp"): r for r in run["rows"] if "tokens_per_s" in r}
        names = list(dict.fromkeys([*names, *at]))
        load = [run["machine"], f"`{run['model']}`", f"{run['load_seconds']:.1f}",
                f"{run['load_peak_bytes'] / 2**20:,.0f}"]  # fmt: skip
        rows.append((load, at))
    cells = [[*load, *(rate(at[n]["tokens_per_s"]) if n in at else "-" for n in names)] for load, at in rows]
    return table(["machine", "file", "load, s", "peak, MiB", *names], cells) if cells else ""


def answers() -> str:
    """answers.json: how many questions each method answers, and how many with the same words as full."""
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
    """The result of a file: "exact", or more words."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    if row["exact"] is None:
        return f"read; {row['why']}"
    if row["kind"] == "templates" and row["rendered"] < row["of"]:
        return f"exact; refuses {row['of'] - row['rendered']} of {row['of']} conversations, there and here"
    return "exact" if row["exact"] else "wrong"


def real_files() -> str:
    """real_files.json: how many files of each kind are exact, and the results of the others."""
    rows = []
    for run in runs("real_files"):
        for kind, name in KINDS.items():
            of = [r for r in run["rows"] if r["kind"] == kind]
            rest = "; ".join(f"`{Path(r['file']).name}` {why(r)}" for r in of if why(r) != "exact")
            rows.append([name, str(len(of)), str(sum(r["exact"] is True for r in of)), rest or "-"])
    return folded("every real file that was tried", table(["", "files", "exact", "the others"], rows)) if rows else ""


def published() -> str:
    parts = [speed(), answers(), real_files(), sources("smollm2", "answers", "real_files", root="../")]
    return "\n\n".join(filter(None, parts)) or NONE


# ---- RULER ----

OF_BYTES = tuple(f"ruler_{of}" for of in ("held", "newer", "kvzip", "held_4k", "known", "read", "read_4k", "8k"))
OF_RULER = ("ruler_full", "ruler_full_long", *OF_BYTES, "ruler_defaults", "ruler_long", "ruler_groups")


def ruler_full() -> str:
    """ruler_full.json, ruler_full_long.json: what `full` finds in each task, by length."""
    rows = {r["seq_len"]: r for q in ("ruler_full", "ruler_full_long") for run in runs(q) for r in run["rows"]}
    if not rows:
        return ""
    cells = [[f"`{t}`", *(share(r[f"{t}_each"]) if t in r else "-" for r in rows.values())]
             for t in tasks_of(list(rows.values()))]  # fmt: skip
    return table(["`full` on RULER's tasks that need no data", *(f"{n:,} tokens" for n in rows)], cells)


def pooled(row: Row, tasks: Sequence[str]) -> str:
    """The share found over the samples of all tasks: `92 (81-97) %`."""
    return share([x for t in tasks for x in row[f"{t}_each"]])


def ruler_bytes() -> str:
    """The files OF_BYTES: a table for bytes held, one for them with the question known, and one for bytes read; a row
    per method, a column per length and target."""
    tables: dict[tuple[str, bool], dict[int, list[Row]]] = {}
    for axis, run in by_bytes():
        key, length = (axis, run["rows"][0]["query_in_prompt"]), run["rows"][0]["seq_len"]
        tables.setdefault(key, {}).setdefault(length, []).append(run)
    return "\n\n".join(bytes_table(*key, by_length) for key, by_length in sorted(tables.items()))


def by_bytes() -> Iterator[tuple[str, Row]]:
    """The runs of the files OF_BYTES, each with the cells of one axis: "kv", the bytes held, or "read"."""
    for run in (r for q in OF_BYTES for r in runs(q)):
        for axis in AXES:
            cells, missing = ([c for c in run[of] if c["axis"] == axis] for of in ("cells", "missing"))
            if cells:
                yield axis, run | dict(cells=cells, missing=missing)


def bytes_table(axis: str, known: bool, by_length: dict[int, list[Row]]) -> str:
    """One table of `ruler_bytes`: "-" where a method has no setting for a target, empty where it did not run. A cell
    says how many samples it has if they are fewer than those of `full`, which the first header has."""
    found: dict[tuple[str, int, str], str] = {}
    ran, columns, counts = set[tuple[str, int]](), list[tuple[int, str]](), list[str]()
    for length, these in sorted(by_length.items()):
        tasks = measuring(these[0]["rows"], length)
        targets = {c["target"] for run in these for c in (*run["cells"], *run["missing"])}
        most = max(these, key=lambda run: run["settings"]["samples"])
        for run in these:
            rows, fewer = {r["method"]: r for r in run["rows"]}, run["settings"]["samples"] * len(tasks)
            note = f" of {fewer}" if run["settings"]["samples"] < most["settings"]["samples"] else ""
            found |= {(c["method"], length, c["target"]): pooled(rows[c["spec"]], tasks) + note for c in run["cells"]}
            ran |= {(c["method"], length) for c in (*run["cells"], *run["missing"])}
            if run is most:
                found |= {("full", length, t): pooled(rows["full"], tasks) for t in targets}
                counts.append(f"at {length // 1024}K {fewer} samples of {' and '.join(tasks)}")
        columns += [(length, t) for t in sorted(targets, key=Fraction, reverse=True)]
    header = [f"found{', the question known' if known else ''}: {'; '.join(counts)}"]
    header += [f"{length // 1024}K, {AXES[axis][0]} {t}" for length, t in columns]
    names = ["full", *sorted({m for m, *_ in found} - {"full"})]
    cells = [[found.get((m, *at), "-" if (m, at[0]) in ran else "") for at in columns] for m in names]
    return table(header, [[f"`{m}`", *row] for m, row in zip(names, cells, strict=True)])


def ruler_defaults() -> str:
    """ruler_defaults.json, ruler_long.json: the papers' methods at their defaults and at settings for this model; a row
    per setting, columns per length."""
    header, cells = ["at its own settings"], dict[str, list[str]]()
    for run in (*runs("ruler_defaults"), *runs("ruler_long")):
        n, width = run["rows"][0]["seq_len"], len(header) - 1
        tasks = measuring(run["rows"], n)
        each = tasks if len(tasks) > 1 else []
        header += [f"{n // 1024}K: {name}" for name in ("KV bytes", "bytes read", "found", *each)]
        for r in run["rows"]:
            row = cells.setdefault(r["method"], [""] * width)
            row += [f"{r['kv_share']:.2f}", f"{r['read_share']:.3f}", pooled(r, tasks)]
            row += [share(r[f"{t}_each"]) for t in each]
        for row in cells.values():
            row += [""] * (len(header) - 1 - len(row))
    return table(header, [[f"`{m}`", *row] for m, row in cells.items()]) if cells else ""


def ruler_groups() -> str:
    """ruler_groups.json: ways to reduce a group's queries to one list of tokens, at equal bytes read."""
    for run in runs("ruler_groups"):
        tasks, rows = measuring(run["rows"], run["rows"][0]["seq_len"]), {r["method"]: r for r in run["rows"]}
        found = {(c["method"], c["target"]): pooled(rows[c["spec"]], tasks) for c in run["cells"]}
        targets = sorted({t for _, t in found}, key=Fraction, reverse=True)
        cells = [[f"`{m}`", *(found.get((m, t), "-") for t in targets)] for m in dict.fromkeys(m for m, _ in found)]
        return table(["how a group's queries make one list", *(f"read {t}" for t in targets)], cells)
    return ""


def claims() -> str:
    """The papers' scores next to those of ruler_defaults.json, and the command of each paper's table."""
    run = next(runs("ruler_defaults"), None)
    rows = {r["method"]: r for r in run["rows"]} if run else {}
    tasks, cells = measuring(run["rows"], run["rows"][0]["seq_len"]) if run else [], []
    for spec, where, task, score, full, command in ACCURACY:
        here = f"{pooled(rows[spec], tasks)} of {pooled(rows['full'], tasks)}" if spec in rows else "-"
        again = f"`{command}`" if command else "as above"
        cells.append([f"`{spec}`", where, task, f"{score:g} of {full:g}", here, again])
    return table(
        ["", "paper", "its model and task", "score, of full's score", "found here, of full's", "command for its table"],
        cells,
    )


def bases() -> str:
    """bases.json: how much low-rank keys change the attention, mean over layers, by the data of the basis."""
    for run in runs("bases"):
        layers = run["analyses"]["bases"]["layers"]
        mean = {name: sum(r[name] for r in layers) / len(layers) for name in layers[0]}
        split = next(i for i, name in enumerate(mean) if name.startswith("covered"))
        parts = [list(mean.items())[:split], list(mean.items())[split:]]
        titles = ["change of attention with keys of rank 0.6 D, by basis",
                  "mass on 1/8 of the tokens, chosen by 1/8 of the latent coordinates"]  # fmt: skip
        heads = [
            [title, *(name.split(": ")[-1] for name, _ in part)] for title, part in zip(titles, parts, strict=True)
        ]
        cells = [["mean over layers", *(f"{x:.3f}" for _, x in part)] for part in parts]
        return "\n\n".join(table(head, [row]) for head, row in zip(heads, cells, strict=True))
    return ""


def ruler() -> str:
    parts = [ruler_full(), ruler_bytes(), ruler_defaults(), ruler_groups(), bases(),
             sources(*OF_RULER, "bases", root="../")]  # fmt: skip
    return "\n\n".join(filter(None, parts)) or NONE


# ---- compared to kvpress ----


def both_found(row: Row) -> tuple[list[float], list[float]]:
    """The samples of all tasks together, of ours and of kvpress."""
    ours, theirs = ([x for k, each in row.items() if k.endswith(side) for x in each] for side in ("_ours", "_theirs"))
    return ours, theirs


def apart(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether Wilson's intervals of two lists of hits do not overlap."""
    (a, b), (c, d) = (wilson(sum(each), len(each)) for each in (ours, theirs))
    return b < c or d < a


def kvpress() -> str:
    """kvpress.json: what either side finds, and the share of kept tokens in common, one row per pair."""
    out, notes = [], {}
    for run in runs("kvpress"):
        rows = run["rows"]
        shares = [k for k in dict.fromkeys(r["keep"] for r in rows) if k != "1"]
        tasks = [k.removesuffix("_ours") for k in rows[0] if k.endswith("_ours")]
        known = "known" if run["settings"]["query_in_prompt"] else "not known"
        cells: dict[str, dict[str, list[str]]] = {}
        for r in rows:
            name = f"`{r['method']}`, {r['setting']}; `{r['theirs']}`"
            notes[name] = r["note"]
            ours, theirs = both_found(r)
            mark = "**" if apart(ours, theirs) else ""
            same = f"{100 * r['common']:.1f} %" if "common" in r else "-"
            cells.setdefault(name, {})[r["keep"]] = [share(ours), f"{mark}{share(theirs)}{mark}", same]
        header = [f"{', '.join(tasks)}, {rows[0]['seq_len']:,} tokens, the question {known}"]
        for s in shares:
            header += [f"{s} kept: ours", "kvpress", "in common"]
        lines = [[name, *(x for s in shares for x in at.get(s, at.get("1", ["-"] * 3)))] for name, at in cells.items()]
        out.append(table(header, lines))
        logits = max(s["logits_apart"] for s in run["samples"])
        out.append(f"{len(run['samples'])} samples; logits of `full` after the prompts at most {logits:.1e} apart.")
    if not out:
        return NONE
    out.append(folded("what differs in each pair", "\n".join(f"- {name}: {note}" for name, note in notes.items())))
    return "\n\n".join([*out, sources("kvpress", root="../")])
