"""Tables of speed on CPUs, one column per machine: decode, one layer's attention, packed weights, restored caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from model import ModelArgs
from scripts.report.markdown import NONE, Row, by_machine, percent, runs, sources

WIDTHS = ["int4", "int8", "bf16", "fp32"]
Cells = dict[tuple[tuple[str, ...], str], str]


def width(run: Row) -> str:
    """The format of the weights, as --weights names it."""
    return (run.get("weights") or run["dtype"].replace("bfloat", "bf").replace("float", "fp")).partition(":")[0]


def decoded(question: str) -> Iterator[tuple[Row, Row]]:
    """(run, row) of every timed decode, sorted by model, tokens and format of the weights; `full` first."""
    rows = [(run, r) for run in runs(question) for r in run["rows"] if "tokens_per_s" in r]
    order: Callable[[tuple[Row, Row]], tuple] = lambda x: (  # noqa: E731
        x[0]["model"], x[1]["length"], WIDTHS.index(width(x[0])), x[1].get("method") != "full", "method" not in x[1],
    )  # fmt: skip
    return iter(sorted(rows, key=order))


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def name(row: Row) -> str:
    return f"`{row['method']}`" if "method" in row else row["run"]


def speed() -> str:
    """speed.json: tokens/s, and the ratio to `full` of the same rounds."""
    cells: Cells = {}
    for run, r in decoded("speed"):
        first = f"{run['model']}, {width(run)}", f"{r['length']:,}", name(r)
        times = f" ({r['times_full']:.2f}x)" if "times_full" in r and r.get("method") != "full" else ""
        cells[first, run["machine"]] = f"{rate(r['tokens_per_s'])}{times}"
    if not cells:
        return NONE
    return by_machine(["model, weights", "tokens", "cache"], cells) + "\n\n" + sources("speed")


def restore() -> str:
    """restore.json: the size of a prompt's cache as a file, and the seconds to restore it; with the seconds of a
    prefill if it was measured."""
    cells: Cells = {}
    rows = [(run, r) for run in runs("restore") for r in run["rows"]]
    sizes: dict[tuple, int] = {}  # the smallest: after a real prefill, the file also has logits
    for run, r in rows:
        key = run["model"], r["length"], r["method"]
        sizes[key] = min(r["file_bytes"], sizes.get(key, r["file_bytes"]))
    for run, r in sorted(rows, key=lambda x: (x[0]["model"], x[1]["length"], x[1]["method"] != "full")):
        size, full = (sizes.get((run["model"], r["length"], m), float("nan")) for m in (r["method"], "full"))
        first = run["model"], f"{r['length']:,}", name(r), f"{size / 2**20:.1f}", percent(size / full)
        if (first, run["machine"]) not in cells or "prefill_s" in r:
            instead = f" instead of {rate(r['prefill_s'])}" if "prefill_s" in r else ""
            cells[first, run["machine"]] = f"{rate(statistics.median(r['restore_s']))}{instead}"
    if not cells:
        return NONE
    header = ["model", "tokens", "cache", "file, MiB", "of full's"]
    return "Seconds to restore:\n\n" + by_machine(header, cells) + "\n\n" + sources("restore")


def attention() -> str:
    """attention.json: the speed of one layer's whole step over the best dense attention, at each length."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for run in runs("attention"):
        for r in run["rows"]:
            if "times_dense" in r:
                found.setdefault((r["method"], run["machine"]), {})[r["length"]] = f"{r['times_dense']:.2f}"
                best = found.setdefault(("the best dense, ms", run["machine"]), {})
                best[r["length"]] = f"{r['dense']['ms']:.2f}"
    if not found:
        return NONE
    lengths = sorted({n for at in found.values() for n in at})
    methods = sorted({m for m, _ in found}, key=lambda m: (" " in m, m))
    machines = sorted({m for _, m in found})
    cells: Cells = {
        ((f"`{m}`" if " " not in m else m,), machine): " / ".join(at.get(n, "-") for n in lengths)
        for m in methods for machine in machines if (at := found.get((m, machine)))
    }  # fmt: skip
    sizes = " / ".join(f"{n:,}" for n in lengths)
    return by_machine([f"cache, times dense at {sizes} tokens"], cells) + "\n\n" + sources("attention")


def weights() -> str:
    """weights.json: decode and prompts of `full` with llama.cpp, by the format of the weights; and linear.json."""
    cells: Cells = {}
    for run, r in decoded("weights"):
        if r.get("method") != "full" or "times_llama_cpp" not in r:
            continue
        peer = next(p for p in run["rows"] if p["run"].startswith("llama.cpp") and p["length"] == r["length"])
        rates = [("decode", r["tokens_per_s"], r["times_llama_cpp"], f", {percent(r['limit_share'])}")]
        if r.get("prefill_s") and peer.get("prefill_s"):
            took, theirs = (statistics.median(x["prefill_s"]) for x in (r, peer))
            rates.append(("prompt", r["length"] / took, theirs / took, ""))
        for what, each, times, limit in rates:
            first = run["model"], f"{r['length']:,}", width(run), what
            cells[first, run["machine"]] = f"{rate(each)} ({times:.2f}x{limit})"
    return "\n\n".join(
        [by_machine(["model", "tokens", "weights", ""], cells), products(), sources("weights", "linear")]
    )


def products() -> str:
    """All products of a one-row step by the format of the weights: ms, share of the bandwidth, ratio to torch's."""
    cells: Cells = {}
    for run in runs("linear"):
        for model in dict.fromkeys(r["model"] for r in run["rows"]):
            count = ModelArgs.from_name(model).n_layer
            for bits in WIDTHS:
                step: dict[str, float] = {}
                size, parts = 0.0, set()
                for r in run["rows"]:
                    if (r["model"], r["M"]) == (model, 1) and r["product"].endswith(bits):
                        n = 1 if r["part"] == "head" else count
                        side = r["product"].split()[0]
                        step[side] = step.get(side, 0) + n * r["ms"]
                        size += n * r["bytes"] * (side == "ours")
                        parts.add(r["part"])
                if len(parts) < 5:  # an interrupted run lacks some
                    continue
                limit = size / step["ours"] * 1e3 / run["bandwidth"]
                times = f", {step['torch'] / step['ours']:.2f}x" if "torch" in step else ""
                cells[(model, bits), run["machine"]] = f"{step['ours']:.3g} ({percent(limit)}{times})"
    return by_machine(["all products of a step, ms", "weights"], cells)
