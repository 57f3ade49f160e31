"""What a CPU did: one layer's attention, decode end to end; and what the GPU kernels are compiled to."""

from __future__ import annotations

import json
import statistics
from typing import Any

from scripts.report.tables.gpu import section
from scripts.report.tables.markdown import NONE, RESULTS, files, folded, percent, source, table


def attention() -> str:
    """results/attention*.json: one layer's operator, how many times the best dense attention it is, and every dense."""
    out = []
    for file, data in files("attention*.json"):
        done = [r for r in data["rows"] if "operator" in r]
        for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in done):
            mine = [r for r in done if (r["model"], r["batch"]) == (model, batch)]
            lengths = sorted({r["length"] for r in mine})
            cells = {(r["method"], r["length"]): cell(r) for r in mine}
            rows = [[f"`{m}`", *(cells.get((m, n), "-") for n in lengths)] for m in dict.fromkeys(m for m, _ in cells)]
            dense = {(r["name"], r["length"]): f"{r['ms']:.2f} ms" for r in data["dense"]
                     if (r["model"], r["batch"]) == (model, batch) and "ms" in r}  # fmt: skip
            names = dict.fromkeys(name for name, _ in dense)
            rows += [[f"dense: {name}", *(dense.get((name, n), "-") for n in lengths)] for name in names]
            out.append(table([f"{model}, batch {batch}", *(f"{n} tokens" for n in lengths)], rows))
        out.append(f"{data['dtype']}. {source(file, data)}")
    return "\n\n".join(out) or NONE


def cell(r: dict[str, Any]) -> str:
    """Time and ratio; the ratio's spread over the rounds, where the file has it."""
    text = f"{r['operator']['ms']:.2f} ms"
    if "times_dense" in r:
        text += f", {r['times_dense']:.2f}x"
    if "times_dense_spread" in r:
        text += f" (spread {percent(r['times_dense_spread'])})"
    return text


def linear(folder: str = "") -> str:
    """linear_cpu.json: milliseconds of each product by rows of x, and the share of the bandwidth it reaches."""
    out = []
    for file, data in files(f"{folder}linear_cpu.json"):
        rows = sorted({r["M"] for r in data["rows"]})
        for model in dict.fromkeys(r["model"] for r in data["rows"]):
            mine = [r for r in data["rows"] if r["model"] == model]
            cells = {((r["part"], r["K"], r["N"]), r["product"], r["M"]): r for r in mine}
            lines = [
                [f"{part}, {k} x {n}", product, *(product_cell(cells.get(((part, k, n), product, m))) for m in rows)]
                for (part, k, n), product in dict.fromkeys(key[:2] for key in cells)
            ]
            out.append(table([f"{model}, K x N", "product", *(f"M = {m}" for m in rows)], lines))
        bandwidth = f"{data['bandwidth'] / 1e9:.1f} GB/s measured in the same run"
        out.append(f"ms (median), share of {bandwidth}, groups of {data['group']}. {source(file, data)}")
    return "\n\n".join(out) or NONE


def product_cell(r: dict[str, Any] | None) -> str:
    """Time, and for a step's rows the share of the bandwidth; the spread where it is large."""
    if r is None:
        return "-"
    wide = f" (spread {percent(r['spread'])})" if r["spread"] > 0.3 else ""
    return f"{r['ms']:.3g}" + (f", {percent(r['share'])}" if r["M"] <= 16 else "") + wide


AGAINST = dict(times_full="full", times_peer="transformers", times_llama_cpp="llama.cpp")


def speed(folder: str = "") -> str:
    """generate_cpu*.json of results/ or a folder in it: a table a model, with columns for what it is compared with."""
    tables: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    told = []
    for file, data in files(f"{folder}generate_cpu*.json"):
        weights = data.get("weights") or data["dtype"].replace("float", "fp")
        done = [(weights, r) for r in data["rows"] if "tokens_per_s" in r]
        tables.setdefault(str(data["model"]), []).extend(done)
        cache = f", cache {data['kv_dtype']}" if "kv_dtype" in data else ""
        told.append(f"{data['new_tokens']} new tokens, {data['dtype']}{cache}. {source(file, data)}")
    out = [speed_table(model, rows) for model, rows in tables.items()]
    return "\n\n".join([*out, folded("Commands and files", "\n\n".join(told))]) if out else NONE


def speed_table(model: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Rows with the width of their weights, by batch, length and width; a column where any has something to say."""
    width = ["fp32", "bf16", "int8", "int4"].index
    rows = sorted(rows, key=lambda x: (x[1]["batch"], x[1]["length"], width(x[0])))
    columns = {f"against {name}": lambda r, k=key: f"{r[k]:.2f}x" if k in r else "-" for key, name in AGAINST.items()
               if any(r.get(key, 1) != 1 for _, r in rows)}  # fmt: skip
    if any("limit_share" in r for _, r in rows):
        columns["of the byte limit"] = lambda r: percent(r["limit_share"]) if "limit_share" in r else "-"
    if any(r.get("prefill_s") for _, r in rows):
        columns["prompt, tokens/s"] = prompt_speed
    header = [f"{model}, batch x tokens", "weights", "run", "tokens/s (median)", "spread", *columns]
    return table(header, [
        [f"{r['batch']} x {r['length']}", weights, r["run"], f"{r['tokens_per_s']:,.3g}", percent(r["spread"])]
        + [text(r) for text in columns.values()] for weights, r in rows
    ])  # fmt: skip


def prompt_speed(r: dict[str, Any]) -> str:
    """Of the median of its rounds."""
    return f"{r['batch'] * r['length'] / statistics.median(r['prefill_s']):,.3g}" if r.get("prefill_s") else "-"


def gpu() -> str:
    """results/h100: what gpu_suite.sh measured, beside the papers."""
    return section(RESULTS / "h100")


def kernels() -> str:
    """results/kernels.json: the main kernel of each file as compiled for an H100, and what an operation moves."""
    path = RESULTS / "kernels.json"
    if not path.exists():
        return "Not compiled yet."
    data, model = json.loads(path.read_text()), "llama-3.1-8b"
    first = {r["file"]: r for r in reversed(data["rows"]) if r["model"] == model and r["cc"] == 90}
    header = ["kernel", "registers", "spills", "shared", "programs a multiprocessor", "limited by"]
    rows = [
        [f"{r['file']}: {r['kernel']}", *(str(r[c]) for c in ("registers", "spills", "shared", "programs", "limit"))]
        for r in sorted(first.values(), key=lambda r: r["file"])
    ]
    moved = [r for r in data["account"] if (r["model"], r["batch"], r["length"]) == (model, 8, 32768)]
    for r in moved:
        r["op"] = ": ".join(r[c] for c in ("method", "op") if c in r)
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
        source(path.name, data),
    ])  # fmt: skip


def launches() -> str:
    """results/launches.json, addresses.json: what has gone through Triton's launcher, and what was held to tensors."""
    out = []
    if (path := RESULTS / "launches.json").exists():
        data = json.loads(path.read_text())
        cards = [card for e in data["launches"] for card in e["cards"].items()]
        bad, compiled = (sum(what in c for _, c in cards) for what in ("problem", "registers"))
        names = ", ".join(f"{int(cc) / 10:g}" for cc in sorted({cc for cc, _ in cards}, key=int))
        rows = [
            [f"{r['file']}: {r['kernel']}", str(r["forms"]), str(r["launches"]), str(len(r["methods"]))]
            for r in data["kernels"]
        ]
        out += [
            f"{len(data['launches'])} forms of launches, through Triton's launcher for compute capabilities {names}: "
            f"{compiled} of {len(cards)} were compiled, {bad} have a problem.",
            "<details><summary>Every kernel</summary>",
            table(["kernel", "forms", "launches", "methods"], rows),
            "</details>",
            source(path.name, data),
        ]
    if (path := RESULTS / "addresses.json").exists():
        data = json.loads(path.read_text())
        counted = ("launches", "loads", "stores", "addresses")
        rows = [
            [f"`{r['method']}`", r["blocks"], r.get("problem", str(len(r.get("kernels", ())))),
             *(f"{r.get(c, 0):,}" for c in counted)]
            for r in data["rows"] if r.get("launches") or "problem" in r
        ]  # fmt: skip
        out += [
            f"{sum(r.get('addresses', 0) for r in data['rows']):,} addresses of interpreted kernels lie in a tensor of "
            f"their launch; {sum('problem' in r for r in data['rows'])} methods read or wrote beside one.",
            "<details><summary>Every method, by how its tokens are selected</summary>",
            table(["method", "selection", "kernels", *counted], rows),
            "</details>",
            source(path.name, data),
        ]
    return "\n\n".join(out) or "Not recorded yet."
