"""Draw the results of bench_attention.py and bench_generate.py: time and speed-up against length, and a roofline.

    python -m scripts.report.plot_results results/h100/attention*.json --out results/h100
    python -m scripts.report.plot_results results/attention_cpu.json results/generate_cpu.json --out results

Writes, for each model and device in the files: attention_MODEL.png (a row a batch: time of the operator, and how many
times the best dense attention of the same rounds), roofline_MODEL.png (bytes/s reached against bytes that must be
read, below the bandwidth measured in that run), and generate_MODEL.png (tokens/s, and how many times `full` of the
same mode).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from errors import InputError, Parser, run_cli
from scripts.shared.results import check_out, save_figure

MARKERS = "osD^vP*Xhd<>"
Row = dict[str, Any]


def load(files: list[str]) -> list[Row]:
    """The rows of all files that were measured, each with its file's device and bandwidth."""
    rows = []
    for file in files:
        try:
            data = json.loads(Path(file).read_text())
            common = {k: data.get(k) for k in ("device", "bandwidth", "model", "dtype", "prompt_tokens")}
            rows += [common | r for r in data["rows"] if "operator" in r or "tokens_per_s" in r]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(f"cannot read {file} as a result of a benchmark: {type(e).__name__}: {e}") from None
    if not rows:
        raise InputError("none of the files has a row that was measured")
    for r in rows:
        r["model"] = Path(str(r["model"])).stem if str(r["model"]).endswith(".json") else r["model"]
    # what two files have measured is drawn once
    keys = ("device", "model", "batch", "length", "run", "method")
    return list({tuple(r.get(k) for k in keys): r for r in rows}.values())


def looks(names: list[str]) -> dict[str, dict[str, Any]]:
    """Marker and color of each name, the same in every panel of a figure."""
    colors = plt.get_cmap("tab10")
    return {n: dict(marker=MARKERS[i % len(MARKERS)], color=colors(i % 10)) for i, n in enumerate(names)}


def tokens(n: float) -> str:
    return f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"


def log_scale(ax: Any) -> None:
    """With numbers at 1, 2 and 5 of each decade: a few lengths seldom span one."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def decorate(ax: Any, lengths: list[int], ylabel: str, title: str, one: bool = False) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [tokens(n) for n in lengths])
    ax.minorticks_off()
    ax.set_xlabel("tokens in the cache")
    ax.set_ylabel(ylabel)
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.3, which="both")
    if one:
        ax.axhline(1, color="black", linewidth=1, linestyle="--")
        ax.set_ylim(bottom=0)


def finish(fig: Any, axes: Any, title: str) -> None:
    """One legend for all panels, below them."""
    named = {n: h for ax in axes[:, 0] for h, n in zip(*ax.get_legend_handles_labels(), strict=True)}
    lines = -(-len(named) // 4)
    fig.legend(named.values(), named.keys(), loc="lower center", ncols=4, fontsize=9, frameon=False)
    fig.suptitle(title)
    fig.tight_layout(rect=(0, (0.15 + 0.22 * lines) / fig.get_figheight(), 1, 1))


def spread_bars(ax: Any, rows: list[Row], value: Callable[[Row], float], raw: Callable[[Row], list[float]],
                label: str | None = None, **look: Any) -> None:  # fmt: skip
    """A line of medians over length, with the quartiles of the repetitions."""
    rows = sorted(rows, key=lambda r: r["length"])
    y = [value(r) for r in rows]
    low, high = zip(*(np.quantile(raw(r), (0.25, 0.75)) for r in rows), strict=True)
    bars = np.maximum(0, [np.subtract(y, low), np.subtract(high, y)])
    ax.errorbar([r["length"] for r in rows], y, yerr=bars,
                label=label, markersize=5, linewidth=1.4, elinewidth=0.7, capsize=2, **look)  # fmt: skip


def latency(rows: list[Row], title: str) -> Any:
    """A row of panels a batch: milliseconds, and times the best dense attention."""
    batches, methods = sorted({r["batch"] for r in rows}), list(dict.fromkeys(r["method"] for r in rows))
    lengths, look = sorted({r["length"] for r in rows}), looks(methods)
    fig, axes = plt.subplots(len(batches), 2, figsize=(12, 3.8 * len(batches) + 1), squeeze=False)
    for (left, right), batch in zip(axes, batches, strict=True):
        here = [r for r in rows if r["batch"] == batch]
        dense = [(n, [r["dense"]["ms"] for r in here if r["length"] == n and "dense" in r]) for n in lengths]
        dense = [(n, np.median(ms)) for n, ms in dense if ms]
        if dense:
            left.plot(*zip(*dense, strict=True), "k--", linewidth=1, label="best dense")
        for m in methods:
            mine = [r for r in here if r["method"] == m]
            if not mine:
                continue
            spread_bars(left, mine, lambda r: r["operator"]["ms"], lambda r: r["operator"]["each"], m, **look[m])
            paired = [r for r in mine if "dense" in r]
            if paired:
                spread_bars(right, paired, lambda r: r["times_dense"], ratios, **look[m])
        log_scale(left)
        decorate(left, lengths, "ms", f"batch {batch}: one layer's attention of a decode step")
        decorate(right, lengths, "times the best dense", f"batch {batch}: speed-up", one=True)
    finish(fig, axes, title)
    return fig


def ratios(r: Row) -> list[float]:
    """Dense to method in each round: both were measured in turns."""
    return [d / o for d, o in zip(r["dense"]["each"], r["operator"]["each"], strict=True)]


def roofline(rows: list[Row], title: str) -> Any:
    """Bytes/s reached against the bytes that a step must read, for every batch and length."""
    methods = list(dict.fromkeys(r["method"] for r in rows))
    look = looks(methods)
    fig, ax = plt.subplots(figsize=(9, 6))
    largest = max(r["batch"] for r in rows)
    for m in methods:
        mine = sorted((r for r in rows if r["method"] == m), key=lambda r: r["traffic"])
        # a larger batch, a larger marker
        size = [20 + 100 * r["batch"] / largest for r in mine]
        ax.scatter([r["traffic"] for r in mine], [r["bytes_per_s"] / 1e9 for r in mine], s=size, alpha=0.75,
                   edgecolors="none", label=m, **look[m])  # fmt: skip
    top = max(r["bandwidth"] for r in rows) / 1e9
    for share, style in ((1.0, "-"), (0.5, ":")):
        ax.axhline(top * share, color="black", linewidth=1, linestyle=style)
        ax.annotate(f"{100 * share:.0f} % of {top:.0f} GB/s" if share < 1 else f"measured bandwidth, {top:.0f} GB/s",
                    (0.01, top * share), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("bytes of cache that a decode step reads in one layer, all rows")
    ax.set_ylabel("GB/s reached")
    ax.grid(alpha=0.3, which="both")
    handles, names = ax.get_legend_handles_labels()
    ax.legend([plt.Line2D([], [], linestyle="", **look[n]) for n in names], names, fontsize=8, loc="lower right")
    ax.set_title(title + f"\nmarker size: batch, up to {largest}", fontsize=10)
    fig.tight_layout()
    return fig


def throughput(rows: list[Row], title: str) -> Any:
    """A row of panels a batch: tokens/s of every run, and times `full` of the same mode."""
    batches, runs = sorted({r["batch"] for r in rows}), list(dict.fromkeys(r["run"] for r in rows))
    lengths, look = sorted({r["length"] for r in rows}), looks(runs)
    fig, axes = plt.subplots(len(batches), 2, figsize=(12, 3.8 * len(batches) + 1), squeeze=False)
    for (left, right), batch in zip(axes, batches, strict=True):
        for run in runs:
            mine = [r for r in rows if r["batch"] == batch and r["run"] == run]
            if not mine:
                continue
            rate = lambda r: [batch / s for s in r["seconds_per_step"]]  # noqa: B023, E731, used at once
            spread_bars(left, mine, lambda r: r["tokens_per_s"], rate, run, **look[run])
            mine = sorted((r for r in mine if "times_full" in r), key=lambda r: r["length"])
            if mine:
                right.plot([r["length"] for r in mine], [r["times_full"] for r in mine], markersize=5, **look[run])
        log_scale(left)
        decorate(left, lengths, "tokens/s", f"batch {batch}: decode, end to end")
        decorate(right, lengths, "times full", f"batch {batch}: against full, same mode", one=True)
    finish(fig, axes, title)
    return fig


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("files", nargs="+", help="result files; those of both scripts may be mixed")
    p.add_argument("--out", default=".", metavar="DIR", help="where the pictures go")
    p.add_argument("--json", action="store_true", help="print the names of the pictures as JSON")
    opt = p.parse_args()
    out = Path(opt.out)
    if not out.is_dir():
        raise InputError(f"--out {out} is no folder: create it first")
    check_out(out / "attention.png")
    rows, written = load(opt.files), []
    for r in rows:  # files from before lengths were varied hold it once
        r.setdefault("length", r["prompt_tokens"])
    kinds: list[tuple[str, str, Callable[[list[Row], str], Any]]] = [
        ("attention", "operator", latency),
        ("roofline", "operator", roofline),
        ("generate", "tokens_per_s", throughput),
    ]
    devices = list(dict.fromkeys(r["device"] for r in rows))
    for name, key, draw in kinds:
        for model, device in dict.fromkeys((r["model"], r["device"]) for r in rows if key in r):
            mine = [r for r in rows if key in r and (r["model"], r["device"]) == (model, device)]
            fig = draw(mine, f"{model}, {mine[0]['dtype']}, {device}")
            suffix = f"_{devices.index(device)}" if len(devices) > 1 else ""
            written.append(str(out / f"{name}_{model}{suffix}.png"))
            save_figure(fig, written[-1])
            plt.close(fig)
    print(json.dumps(written) if opt.json else "\n".join(written))


if __name__ == "__main__":
    run_cli(main)
