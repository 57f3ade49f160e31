"""Draws the plots of the pages from the files of their tables.

python -m scripts.report.plots                        # -> results/ruler.png, speculation.png
python -m scripts.report.plots --only ruler --out /tmp
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from cache.evicting import Evicting
from cache.spec import method_class
from engine.speculation import tokens_a_round
from loading.named import named_args
from model import Transformer
from runtime.errors import InputError, run_cli
from runtime.options import Parser
from scripts.bench.bench_generate import weight_bytes
from scripts.eval.compare import AXES
from scripts.eval.ladders import BOUNDS
from scripts.report.tables import HELD, READ, RESULTS, files
from scripts.shared.markdown import measuring
from scripts.shared.results import check_out, save_figure

MARKERS = "osD^vP*Xhd<>"
DRAWN = ("llama-3.1-8b", ("double_sparsity", "self_index,keep=full"))  # the model and the methods of speculation's plot


def looks_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """A marker and a colour per method; bounds are grey and dashed."""
    colors, order = plt.get_cmap("tab20"), [*range(0, 20, 2), *range(1, 20, 2)]
    looks = {m: dict(marker=MARKERS[i % len(MARKERS)], color=colors(order[i % 20])) for i, m in enumerate(methods)}
    return looks | {m: looks[m] | dict(linestyle="--", color="0.6") for m in BOUNDS if m in looks}


def ruler() -> Any:
    """What each method finds on the published model: a row per length; against the bytes held, a column for the methods
    that drop tokens and one for the others, and against the bytes that a step reads, one for the methods that select.
    """
    found: dict[str, dict[int, dict[str, list[tuple[float, float]]]]] = {"drop": {}, "keep": {}, "read": {}}
    full: dict[int, float] = {}
    for run in (run for q in (*HELD, *READ) for runs in files(q).values() for run in runs):
        if run["rows"][0]["query_in_prompt"]:
            continue
        rows, length = {r["method"]: r for r in run["rows"]}, run["rows"][0]["seq_len"]
        tasks = measuring(run["rows"], length)
        full[length] = 100 * mean(rows["full"][t] for t in tasks)
        for c in run["cells"]:
            if "," in c["method"]:  # a variant, which the table has
                continue
            name, axis = c["method"], c["axis"]
            of = "read" if axis == "read" else "drop" if drops(name) else "keep"
            x = float(Fraction(c["target"])) if name in BOUNDS else rows[c["spec"]][AXES[axis][1]]
            y = 100 * mean(rows[c["spec"]][t] for t in tasks)
            found[of].setdefault(length, {}).setdefault(name, []).append((x, y))
    lengths = sorted(n for n, methods in found["read"].items() if {*BOUNDS} <= {*methods})  # where all methods ran
    xlabels = dict(drop="bytes held, share of full: methods that drop tokens",
                   keep="bytes held, share of full: methods that keep all",
                   read="bytes that a step reads, share of full")  # fmt: skip
    fig, axes = plt.subplots(len(lengths), 3, figsize=(13, 0.6 + 4 * len(lengths)), sharey=True, squeeze=False)
    for (of, by_length), column in zip(found.items(), axes.T, strict=True):
        names = sorted({m for n in lengths for m in by_length.get(n, {})}, key=lambda m: (m in BOUNDS, m))
        looks = looks_of(names)
        for ax, length in zip(column, lengths, strict=True):
            for method, xy in by_length.get(length, {}).items():
                ax.plot(*zip(*sorted(xy), strict=True), **looks[method], markersize=5)
            name_lines(ax, {m: max(xy) for m, xy in by_length.get(length, {}).items()}, looks)
            ax.axhline(full[length], color="black", linewidth=1, linestyle="--")
            ticks = [1 / 4, 1 / 8, 1 / 16] if of == "read" else [1 / 2, 1 / 4, 1 / 8]
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"1/{1 / t:.0f}" for t in ticks])
            ax.minorticks_off()
            ax.set_xlim(0.85 * ticks[-1], 2.2 * ticks[0])
            ax.set_ylim(-4, 106)
            ax.grid(alpha=0.3)
            if ax is column[-1]:
                ax.set_xlabel(xlabels[of])
            if of == "drop":
                ax.set_ylabel(f"% found, {length:,} tokens (dashed: full)")
    fig.tight_layout()
    return fig


def drops(name: str) -> bool:
    """Whether a method drops tokens: in razor's case, from the heads that are not retrieval heads."""
    return issubclass(method_class(name), Evicting) or name in ("razor", "streaming")


def name_lines(ax: Any, ends: dict[str, tuple[float, float]], looks: dict[str, dict[str, Any]]) -> None:
    """Writes each line's name in its colour beside its last point, and moves names apart that would overlap."""
    least, top = 4.4, 103.0  # in units of y
    order = sorted(ends, key=lambda name: ends[name][1])
    places = [ends[name][1] for name in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + least)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top - least * (len(places) - 1 - i))
    for name, at in zip(order, places, strict=True):
        (x, y), line = ends[name], dict(arrowstyle="-", color="0.8", linewidth=0.6)
        ax.annotate(name, (x, y), xytext=(x * 1.08, at), fontsize=7, va="center", color=looks[name]["color"],
                    bbox=dict(facecolor="white", edgecolor="none", pad=0.3),
                    arrowprops=line if abs(at - y) > 1 else None)  # fmt: skip


# ---- when speculation pays, by bytes ----


def gain(read: tuple[float, float, float], n: int, acceptance: float) -> float:
    """Speed over full's if only bytes take time, with n drafts and one check per round. read: the bytes that a step
    reads, of weights, of full's cache, of the method's cache."""
    weights, full, draft = read
    return (weights + full) * tokens_a_round(n, acceptance) / (n * (weights + draft) + weights + full)


@functools.cache
def read_bytes(name: str, method: str, batch: int, length: int) -> tuple[float, float, float]:
    """The bytes of weights and caches in bf16, computed on the meta device."""
    with torch.device("meta"):
        model = Transformer(named_args(name)).to(torch.bfloat16)
    model.setup_cache(method, batch, length)
    return (
        weight_bytes(model, batch),
        model.kv_bytes_full(batch, length),
        sum(m.traffic(length - 1) for m in model.cache),
    )


def speculation() -> Any:
    """The gain over context, with a line per number of drafts and a panel per method and batch."""
    name, methods = DRAWN
    lengths = [2**i for i in range(10, 18)]
    panels = [(m, batch) for m in methods for batch in (1, 8)]
    fig, axes = plt.subplots(1, len(panels), figsize=(14, 3.6), sharey=True)
    for ax, (method, batch) in zip(axes, panels, strict=True):
        for i, n in enumerate((1, 2, 4, 8)):
            for acceptance, style in ((0.9, "-"), (0.7, ":")):
                ys = [gain(read_bytes(name, method, batch, T), n, acceptance) for T in lengths]
                ax.plot(lengths, ys, style, color=f"C{i}", label=f"drafts: {n}, {100 * acceptance:.0f} % right")
        ax.axhline(1, color="black", linewidth=1, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{T // 1024}K" for T in lengths], fontsize=8)
        ax.set_title(f"{method}, batch {batch}", fontsize=10)
        ax.set_xlabel("tokens in the cache")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s, times full, by bytes")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, 0.11, 1, 1))
    return fig


PLOTS: dict[str, Callable[[], Any]] = dict(ruler=ruler, speculation=speculation)


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--only", nargs="+", choices=list(PLOTS), default=list(PLOTS), help="plots to draw; default: all")
    p.add_argument("--out", default=str(RESULTS), metavar="DIR", help="folder of the plots; default: results/")
    p.add_argument("--json", action="store_true", help="print the names of the files as JSON")
    opt = p.parse_args()
    out, made = Path(opt.out), []
    if not out.is_dir():
        raise InputError(f"--out {out} is not a folder: create it first")
    check_out(out / "ruler.png")
    for name in opt.only:
        made.append(str(out / f"{name}.png"))
        save_figure(PLOTS[name](), made[-1])
        plt.close("all")
    print(json.dumps(made) if opt.json else "\n".join(made))


if __name__ == "__main__":
    run_cli(main)
