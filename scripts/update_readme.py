"""Write the generated sections of the README and of the model card: methods from the code, tables from results/*.json.

python scripts/update_readme.py            # tables and the method list
python scripts/update_readme.py --demo     # run `make demo` too and show its output
python scripts/update_readme.py --check    # exit 2 if a page is not what this would write
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from errors import InputError, Parser, run_cli  # noqa: E402
from kv_methods import method_class, method_files, presets  # noqa: E402
from scripts.results import method_rows  # noqa: E402
from scripts.speed_tables import section, table  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
OPEN = 2048  # the length whose comparison is shown unfolded


def methods() -> str:
    rows = []
    for name in sorted(method_files()):
        cls = method_class(name)
        doc = (sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0]
        knobs = ", ".join(f"`{f.name}={f.default}`" for f in dataclasses.fields(cls.Args))
        also = ", ".join(f"`{p}`" for p, (m, _) in presets().items() if m == name)
        rows.append([f"`{name}`", doc, knobs or "-", also or "-", cls.paper])
    return table(["method", "idea", "knobs", "presets", "source"], rows)


def source(data: dict, name: str) -> str:
    return f"`{data['command']}` on {data['device']}, torch {data['versions']['torch']}: [{name}](results/{name})"


def retrieval(only: str | None = None) -> str:
    """The rows of every results/retrieval*.json, of one method only if asked."""
    files = sorted((ROOT / "results").glob("retrieval*.json"))
    if not files:
        return "Not measured yet."
    tasks = ["needle", "needle4", "ruler", "repeats"]

    def cell(row: dict, key: str) -> str:
        return "-" if key not in row else f"{row[key]:.1f}" if key.startswith("perp") else f"{100 * row[key]:.0f} %"

    rows, sources = [], []
    for file in files:
        data = json.loads(file.read_text())
        mine = [r for r in data["rows"] if only in (None, r["method"])]
        rows += [
            [
                r["method"] + "".join(f" {k}={v}" for k, v in r["knobs"].items()),
                str(r["seq_len"]),
                f"{r['kv_share']:.3f}",
            ]
            + [cell(r, t) for t in [*tasks, "perplexity_code", "perplexity_prose"]]
            for r in mine
        ]
        if mine:
            sources.append(f"{mine[0]['samples']} samples a needle cell: {source(data, file.name)}")
    header = ["method", "tokens", "KV bytes / full", *tasks, "ppl code", "ppl prose"]
    return table(header, rows) + "\n\n" + "\n".join(sources)


def comparison() -> str:
    """results/methods*.json: one table a length, every method and preset."""
    files = sorted((ROOT / "results").glob("methods*.json"))
    if not files:
        return "Not measured yet."
    found = [(data, file.name) for file in files for data in [json.loads(file.read_text())]]
    rows = method_rows()
    tasks = [t for t in ("needle", "needle4", "key_value", "repeats") if any(t in r for r in rows)]
    texts = [t for t in ("perplexity_code", "perplexity_prose") if any(t in r for r in rows)]
    out = []
    for T in sorted({r["seq_len"] for r in rows}):
        cells = [
            [
                f"`{r['method']}`" + "".join(f" {k}={v}" for k, v in r["knobs"].items()),
                f"{r['kv_share']:.2f}",
                f"{r['read_share']:.3f}",
            ]
            + [f"{100 * r[t]:.0f} %" if t in r else "-" for t in tasks]
            + [f"{r[t]:.1f}" if t in r else "-" for t in texts]
            for r in rows
            if r["seq_len"] == T
        ]
        header = [f"{T} tokens", "KV bytes", "bytes read", *tasks, *(t.replace("perplexity_", "ppl ") for t in texts)]
        body = table(header, cells)
        out.append(body if T == OPEN else f"<details><summary>{T} tokens</summary>\n\n{body}\n\n</details>")
    n = [f"{T}: {next(r['samples'] for r in rows if r['seq_len'] == T)}" for T in sorted({r["seq_len"] for r in rows})]
    return "\n\n".join(out) + f"\n\nSamples a needle cell, {', '.join(n)}.\n" + "\n".join(source(*f) for f in found)


def losses() -> str:
    """results/losses*.json beside the cells of the comparison that they explain: the same method, other knobs."""
    table_rows = {(r["method"], r["seq_len"]): r for r in method_rows()}
    rows, sources = [], []
    for file in sorted((ROOT / "results").glob("losses*.json")):
        data = json.loads(file.read_text())
        sources.append(source(data, file.name))
        for r in data["rows"]:
            known = table_rows[r["method"], r["seq_len"]]
            knobs = [f"{k}={v}" for k, v in r["knobs"].items()] + ["the question is known"] * r["query_in_prompt"]
            for task in ("needle", "needle4", "key_value", "repeats"):
                if task in r and task in known:
                    before, after = (f"{100 * x[task]:.0f} %" for x in (known, r))
                    rows.append([f"`{r['method']}`", str(r["seq_len"]), task, before, ", ".join(knobs), after])
    if not rows:
        return "Not measured yet."
    return table(["method", "tokens", "task", "as above", "with", ""], rows) + "\n\n" + "\n".join(sources)


def speed() -> str:
    """results/generate_cpu*.json: a table each, with a column of whatever its runs are compared with."""
    out = []
    for path in sorted((ROOT / "results").glob("generate_cpu*.json")):
        data = json.loads(path.read_text())
        done = [r for r in data["rows"] if "tokens_per_s" in r]
        against = {k: name for k, name in dict(times_peer="transformers", times_full="full").items()
                   if any(r.get(k, 1) != 1 for r in done)}  # fmt: skip
        rows = [
            [f"{r['batch']} x {r['length']}", r["run"], f"{r['tokens_per_s']:,.3g}", f"{100 * r['spread']:.0f} %"]
            + [f"{r[k]:.2f}x" if k in r else "-" for k in against]
            for r in done
        ]
        header = [f"{data['model']}, batch x tokens", "run", "tokens/s (median)", "spread"]
        out.append(table([*header, *(f"against {name}" for name in against.values())], rows))
        out.append(f"{data['new_tokens']} new tokens, {data['dtype']}. {source(data, path.name)}")
    return "\n\n".join(out) or "Not measured yet."


def attention() -> str:
    """results/attention*.json: one layer's operator, how many times the best dense attention it is, and every dense."""
    out = []
    for file in sorted((ROOT / "results").glob("attention*.json")):
        data = json.loads(file.read_text())
        done = [r for r in data["rows"] if "operator" in r]
        for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in done):
            mine = [r for r in done if (r["model"], r["batch"]) == (model, batch)]
            lengths = sorted({r["length"] for r in mine})
            cells = {(r["method"], r["length"]): f"{r['operator']['ms']:.2f} ms, {r['times_dense']:.2f}x" for r in mine}
            rows = [[f"`{m}`", *(cells.get((m, n), "-") for n in lengths)] for m in dict.fromkeys(m for m, _ in cells)]
            dense = {(r["name"], r["length"]): f"{r['ms']:.2f} ms" for r in data["dense"]
                     if (r["model"], r["batch"]) == (model, batch) and "ms" in r}  # fmt: skip
            names = dict.fromkeys(name for name, _ in dense)
            rows += [[f"dense: {name}", *(dense.get((name, n), "-") for n in lengths)] for name in names]
            out.append(table([f"{model}, batch {batch}", *(f"{n} tokens" for n in lengths)], rows))
        out.append(f"{data['dtype']}. {source(data, file.name)}")
    return "\n\n".join(out) or "Not measured yet."


def gpu() -> str:
    """results/h100: what gpu_suite.sh measured, beside the papers."""
    return section(ROOT / "results" / "h100")


def kernels() -> str:
    """results/kernels.json: the main kernel of each file as compiled for an H100, and what an operation moves."""
    path = ROOT / "results" / "kernels.json"
    if not path.exists():
        return "Not compiled yet."
    data, model = json.loads(path.read_text()), "llama-3.1-8b"
    first = {r["file"]: r for r in reversed(data["rows"]) if r["model"] == model and r["cc"] == 90}
    header = ["kernel", "registers", "spills", "shared", "programs a multiprocessor", "limited by"]
    rows = [
        [f"{r['file']}: {r['kernel']}", *(str(r[c]) for c in ("registers", "spills", "shared", "programs", "limit"))]
        for r in sorted(first.values(), key=lambda r: r["file"])
    ]
    moved = [r for r in data["account"] if r["model"] == model]
    ops = [[r["op"], f"{r['bytes'] / 1e6:.1f}", str(r["launches"]), f"{1e6 * r['seconds']:.0f}"] for r in moved]
    size = f"batch {moved[0]['batch']}, {moved[0]['length']} tokens"
    assumed = f"{data['assumed']['bandwidth'] / 1e12:g} TB/s and {1e6 * data['assumed']['launch']:g} us a launch"
    bad = sum(bool(r["problem"]) for r in data["rows"])
    n = len({(r["file"], r["kernel"]) for r in data["rows"]})
    cards = ", ".join(f"{cc / 10:g}" for cc in sorted({r["cc"] for r in data["rows"]}))
    return "\n\n".join([
        f"{n} kernels, {len(data['rows'])} compilations for compute "
        f"capabilities {cards}: {bad} with a spill, too much shared memory or an error.",
        table(header, rows),
        f"<details><summary>Bytes and launches of every operation, {model}, {size}; us predicted from {assumed}"
        "</summary>",
        table([f"{size}", "MB", "launches", "us predicted"], ops),
        "</details>",
        source(data, path.name),
    ])  # fmt: skip


def demo() -> str:
    run = subprocess.run(["make", "-s", "demo"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise InputError(f"make demo failed: {run.stdout[-300:]}")
    return "```\n" + run.stdout.strip() + "\n```"


def fill(text: str, name: str, body: str) -> str:
    """Replace what stands between the two markers of a section."""
    pattern = re.compile(rf"(<!-- begin:{name} -->\n).*?(<!-- end:{name} -->)", re.S)
    if not pattern.search(text):
        raise InputError(f"no section {name}: put back its begin and end markers")
    return pattern.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text)


SECTIONS = (methods, comparison, losses, retrieval, attention, speed, gpu, kernels)


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--demo", action="store_true")
    p.add_argument("--check", action="store_true")
    opt = p.parse_args()
    sections = {
        ROOT / "README.md": {f.__name__: f() for f in SECTIONS},
        ROOT / "models" / "tiny" / "README.md": dict(quality=retrieval("full").replace("](results", "](../../results")),
    }
    if opt.demo:
        sections[ROOT / "README.md"]["demo"] = demo()
    for path, bodies in sections.items():
        text = old = path.read_text()
        for name, body in bodies.items():
            text = fill(text, name, body)
        if opt.check and text != old:
            raise InputError(f"{path.name} is not up to date: run python scripts/update_readme.py")
        path.write_text(text)


if __name__ == "__main__":
    run_cli(main)
