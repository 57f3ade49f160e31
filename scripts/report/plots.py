"""Draws a plot for each table of results/README.md.

python -m scripts.report.plots                        # -> results/speed.png, attention.png, weights.png, ...
python -m scripts.report.plots --only speed --out /tmp
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cache.evicting import Evicting
from cache.spec import method_class
from runtime.errors import InputError, Parser, run_cli
from scripts.eval.compare import AXES
from scripts.eval.ladders import BOUNDS
from scripts.report.accuracy import TASKS, Cell, cells, read_cells, share_of
from scripts.report.compiled import CARD
from scripts.report.markdown import RESULTS, measuring, runs
from scripts.report.published import by_bytes
from scripts.report.speculation import plot as speculation
from scripts.report.speed import decoded, width
from scripts.shared.results import check_out, save_figure

MARKERS = "osD^vP*Xhd<>"
TICKS = [1 / 4, 1 / 8, 1 / 16]
Points = dict[tuple[str, str], float]  # (label, machine) -> value


def dots(panels: dict[str, Points], xlabel: str = "", one: bool = True) -> Any:
    """One panel each, with a row per label and a marker per machine, sorted by the largest value."""
    panels = {title: points for title, points in panels.items() if points}
    machines = sorted({m for points in panels.values() for _, m in points})
    looks: list[dict[str, Any]] = [
        dict(marker=MARKERS[i], color=f"C{i}", linestyle="", label=m) for i, m in enumerate(machines)
    ]
    height = 1.6 + 0.21 * max((len({label for label, _ in points}) for points in panels.values()), default=1)
    fig, axes = plt.subplots(1, len(panels), figsize=(1.4 + 3.9 * len(panels), height), squeeze=False)
    for ax, (title, points) in zip(axes[0], panels.items(), strict=True):
        most: dict[str, float] = {}
        for (label, _), value in points.items():
            most[label] = max(value, most.get(label, 0.0))
        labels = sorted(most, key=lambda n: (most[n], n))
        for look in looks:
            xy = [(points[at], y) for y, n in enumerate(labels) if (at := (n, look["label"])) in points]
            if xy:
                ax.plot(*zip(*xy, strict=True), **look, markersize=5, alpha=0.8)
        ax.set_yticks(range(len(labels)), labels, fontsize=8)
        ax.set_ylim(-0.6, len(labels) - 0.4)
        ax.set_xlim(left=0)
        if one:
            ax.axvline(1, color="black", linewidth=1, linestyle="--")
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(xlabel)
        ax.grid(alpha=0.3)
    handles = [plt.Line2D([], [], **look) for look in looks]
    fig.legend(handles=handles, loc="lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)
    fig.tight_layout(rect=(0, 0.3 / height, 1, 1))
    return fig


def speed() -> Any:
    panels: dict[str, Points] = {}
    for run, r in decoded("speed"):
        if r.get("method") != "full" and "times_full" in r:
            at = f"{run['model']}, {width(run)}, {r['length']:,} tokens"
            panels.setdefault(at, {})[r["method"], run["machine"]] = r["times_full"]
    return dots(panels, "tokens/s, times full")


def attention() -> Any:
    panels: dict[str, Points] = {}
    for run in runs("attention"):
        for r in run["rows"]:
            if "times_dense" in r:
                panels.setdefault(f"{r['length']:,} tokens", {})[r["method"], run["machine"]] = r["times_dense"]
    return dots(panels, "times the best dense attention")


def weights() -> Any:
    panels: dict[str, Points] = {"decode, times llama.cpp": {}, "decode, share of the byte limit": {}}
    for run, r in decoded("weights"):
        if r.get("method") == "full" and "times_llama_cpp" in r:
            at = f"{run['model']}, {width(run)}, {r['length']:,}", run["machine"]
            panels["decode, times llama.cpp"][at] = r["times_llama_cpp"]
            panels["decode, share of the byte limit"][at] = r["limit_share"]
    return dots(panels)


def compiled() -> Any:
    points: Points = {}
    for run in runs("kernels"):
        for r in run["rows"]:
            if r["cc"] == CARD:
                at = r["file"], "the kernel with the fewest"
                points[at] = min(points.get(at, 99), r["programs"])
    return dots({f"compute capability {CARD / 10:g}": points}, "programs a multiprocessor", one=False)


def looks_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """A marker and a colour per method; bounds are grey and dashed."""
    colors, order = plt.get_cmap("tab20"), [*range(0, 20, 2), *range(1, 20, 2)]
    looks = {m: dict(marker=MARKERS[i % len(MARKERS)], color=colors(order[i % 20])) for i, m in enumerate(methods)}
    return looks | {m: looks[m] | dict(linestyle="--", color="0.6") for m in BOUNDS if m in looks}


def accuracy() -> Any:
    """What each method finds against the bytes that a step reads; the Pareto front is grey."""
    every = read_cells(cells())
    tasks = [t for t in TASKS if any(t in c["row"] for c in every)]
    done = {t: {c["seq_len"] for c in every if t in c["row"]} for t in tasks}
    lengths = sorted(set.intersection(*done.values()))
    methods = sorted({c["method"] for c in every}, key=lambda m: (m in BOUNDS, m))
    looks = looks_of(methods)
    size = (5.2 * len(tasks), 3.4 * len(lengths) + 1.2)
    fig, axes = plt.subplots(len(lengths), len(tasks), figsize=size, sharey=True, sharex=True, squeeze=False)
    for row, T in zip(axes, lengths, strict=True):
        row[0].set_ylabel("% found")
        for ax, task in zip(row, tasks, strict=True):
            panel(ax, [c for c in every if c["seq_len"] == T and task in c["row"]], task, looks)
            ax.set_title(f"{task}, {T} tokens", fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("bytes that a step reads, share of full")
    handles = [plt.Line2D([], [], label=m, **look) for m, look in looks.items()]
    handles.append(plt.Line2D([], [], color="0.75", linewidth=6, alpha=0.6, label="frontier"))
    fig.legend(handles=handles, loc="lower center", ncols=6, frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, (0.2 + 0.2 * -(-len(handles) // 6)) / size[1], 1, 1))
    return fig


def ruler() -> Any:
    """What each method finds on the published model: a row per length; against the bytes held, a column for the methods
    that drop tokens and one for the others, and against the bytes that a step reads, one for the methods that select.
    """
    found: dict[str, dict[int, dict[str, list[tuple[float, float]]]]] = {"drop": {}, "keep": {}, "read": {}}
    full: dict[int, float] = {}
    for axis, run in by_bytes():
        if run["rows"][0]["query_in_prompt"]:
            continue
        rows, length = {r["method"]: r for r in run["rows"]}, run["rows"][0]["seq_len"]
        tasks = measuring(run["rows"], length)
        full[length] = 100 * mean(rows["full"][t] for t in tasks)
        for c in run["cells"]:
            if "," in c["method"]:  # a variant, which the table has
                continue
            name = c["method"]
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


def panel(ax: Any, here: list[Cell], task: str, looks: dict[str, dict[str, Any]]) -> None:
    points = []
    for method, look in looks.items():
        mine = sorted((share_of(c), 100 * c["row"][task]) for c in here if c["method"] == method)
        if mine:
            ax.plot(*zip(*mine, strict=True), **look, markersize=5, linewidth=1.2, alpha=0.9)
        points += [(x, y, method) for x, y in mine if method not in BOUNDS]
    xs, ys, _ = zip(*frontier(points), strict=True)
    ax.step([*xs, 1], [*ys, ys[-1]], where="post", color="0.75", linewidth=6, alpha=0.6, zorder=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(TICKS, [f"1/{1 / t:.0f}" for t in TICKS])
    ax.minorticks_off()
    ax.set_xlim(1 / 34, 0.62)
    ax.set_ylim(-4, 106)
    ax.grid(alpha=0.3)


def frontier(points: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The Pareto front of (bytes, found, method): points that find more than all points with no more bytes."""
    out: list[tuple[float, float, str]] = []
    for x, y, name in sorted(points, key=lambda p: (p[0], -p[1])):
        if not out or y > out[-1][1]:
            out.append((x, y, name))
    return out


PLOTS: dict[str, Callable[[], Any]] = dict(
    speed=speed,
    attention=attention,
    weights=weights,
    accuracy=accuracy,
    ruler=ruler,
    compiled=compiled,
    speculation=speculation,
)


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--only", nargs="+", choices=list(PLOTS), default=list(PLOTS), help="plots to draw; default: all")
    p.add_argument("--out", default=str(RESULTS), metavar="DIR", help="folder of the plots; default: results/")
    p.add_argument("--json", action="store_true", help="print the names of the files as JSON")
    opt = p.parse_args()
    out, made = Path(opt.out), []
    if not out.is_dir():
        raise InputError(f"--out {out} is not a folder: create it first")
    check_out(out / "speed.png")
    for name in opt.only:
        made.append(str(out / f"{name}.png"))
        save_figure(PLOTS[name](), made[-1])
        plt.close("all")
    print(json.dumps(made) if opt.json else "\n".join(made))


if __name__ == "__main__":
    run_cli(main)
