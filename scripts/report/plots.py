"""The figures of the pages, from the files of their tables; None if nothing is measured."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cache.evicting import Evicting
from cache.spec import method_class
from scripts.eval.compare import AXES
from scripts.eval.ladders import BOUNDS
from scripts.report import data
from scripts.shared.markdown import paired, scores, wilson

MARKERS = "osD^vP*Xhd<>"
COLUMNS = dict(drop="bytes held, share of full's: methods that drop tokens",
               keep="bytes held, share of full's: methods that keep all",
               read="bytes that a step reads, share of full's")  # fmt: skip


def look(i: int, method: str) -> tuple[str, Any, str]:
    """Marker, colour and style of the i-th method's line; bounds are grey and dashed."""
    color = plt.get_cmap("tab20")(([*range(0, 20, 2), *range(1, 20, 2)])[i % 20])
    return MARKERS[i % len(MARKERS)], *(("0.6", "--") if method in BOUNDS else (color, "-"))


def column(cell: data.Row) -> str:
    name = cell["method"].partition(",")[0]
    drops = issubclass(method_class(name), Evicting) or name in ("razor", "streaming", "lagkv")
    return "read" if cell["axis"] == "read" else "drop" if drops else "keep"


def accuracy() -> Any:
    """What methods find at equal bytes: a row per length, a column per kind of method. The band is full's interval, a
    bar a point's; a hollow point is not different from full on the same samples."""
    rows, cells = data.answers("bytes")
    lengths = sorted({c["seq_len"] for c in cells})
    if not lengths:
        return None
    fig, axes = plt.subplots(len(lengths), 3, figsize=(15, 0.6 + 5 * len(lengths)), sharey=True, squeeze=False)
    for i, n in enumerate(lengths):
        tasks = data.counted(rows, n)
        full = scores(rows["full", n], tasks)
        low, high = wilson(sum(full), len(full))
        for (kind, label), ax in zip(COLUMNS.items(), axes[i], strict=True):
            here = [c for c in cells if c["seq_len"] == n and column(c) == kind]
            # a method looks the same at every length
            names = sorted({c["method"] for c in cells if column(c) == kind}, key=lambda m: (m in BOUNDS, m))
            ends = {}
            for k, name in enumerate(names):
                if not (own := [c for c in here if c["method"] == name]):
                    continue
                marker, color, style = look(k, name)
                points = []  # side by side, so that bars can be told
                for c in own:
                    x = float(Fraction(c["target"])) if name in BOUNDS else rows[c["spec"], n][AXES[c["axis"]][1]]
                    points.append((x * 1.006 ** (k - len(names) / 2), scores(rows[c["spec"], n], tasks)))
                points.sort(key=lambda point: point[0])
                xs, ys = [x for x, _ in points], [100 * sum(each) / len(each) for _, each in points]
                bars = [[100 * end for end in wilson(sum(each), len(each))] for _, each in points]
                ax.vlines(xs, *zip(*bars, strict=True), color=color, linewidth=0.5)
                ax.plot(xs, ys, color=color, linestyle=style, linewidth=1)
                faces = ["white" if data.same(paired(each, full)) else color for _, each in points]
                ax.scatter(xs, ys, s=36, marker=marker, edgecolors=[color], facecolors=faces, zorder=3)
                ends[name] = xs[-1], ys[-1], color
            name_lines(ax, ends)
            ax.axhspan(100 * low, 100 * high, color="0.92", zorder=0)
            ax.axhline(100 * sum(full) / len(full), color="black", linewidth=1, linestyle="--")
            ticks = [1 / 4, 1 / 8, 1 / 16] if kind == "read" else [1 / 2, 1 / 4, 1 / 8]
            ax.set(xscale="log", xlim=(0.75 * ticks[-1], 2.2 * ticks[0]), ylim=(-4, 106), xlabel=label)
            ax.set_xticks(ticks, [f"1/{1 / t:.0f}" for t in ticks])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
        axes[i][0].set_ylabel("% found (dashed: full, grey: its interval)")
        axes[i][1].set_title(f"{n:,} tokens: {' and '.join(tasks)}, {len(full)} samples a point; hollow: not different "
                             "from full", fontsize=10)  # fmt: skip
    fig.tight_layout()
    return fig


def distances() -> Any:
    """KL to full through decode, against the bytes that a step reads: a panel per length, a point per setting."""
    lengths = [n for n in (2048, 4096) if data.windows(n)]
    if not lengths:
        return None
    names = sorted({m for n in lengths for m in data.windows(n)} - {"full"})
    fig, axes = plt.subplots(len(lengths), 1, figsize=(11, 7.5 * len(lengths)), squeeze=False)
    for ax, n in zip(axes[:, 0], lengths, strict=True):
        every = data.windows(n)
        for k, m in enumerate(names):
            if (row := every.get(m)) is None:
                continue
            (marker, color, _), x = look(k, m), row["read_share"]
            middle, low, high = (max(1e-4, value) for value in data.predicted(m, "kl", n))
            ax.vlines(x, low, high, color=color, linewidth=0.8)
            ax.plot(x, middle, color=color, marker=marker, markersize=5)
            ax.annotate(m, (x, middle), xytext=(4, 3), textcoords="offset points", fontsize=6.5, color=color)
        count = int(sum(next(iter(every.values()))["windows"]["tokens"]))
        ax.set(xscale="log", yscale="log", xlabel="bytes that a step reads, share of full's")
        ticks = [2.0**-i for i in range(5)]
        ax.set_xticks(ticks, ["1", *(f"1/{1 / t:.0f}" for t in ticks[1:])])
        ax.minorticks_off()
        ax.set_title(f"{n:,} tokens, prose and code: {count:,} predicted tokens a point", fontsize=10)
        ax.set_ylabel("KL divergence from full, nats (bars: 95 % over windows)")
        ax.grid(alpha=0.3)
    fig.tight_layout()
    return fig


def name_lines(ax: Any, ends: dict[str, tuple[float, float, Any]]) -> None:
    """Writes each line's name in its colour beside its last point, and moves names apart that would overlap."""
    least, top = 3.6, 104.0  # in units of y
    order = sorted(ends, key=lambda name: ends[name][1])
    places = [ends[name][1] for name in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + least)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top - least * (len(places) - 1 - i))
    for name, at in zip(order, places, strict=True):
        (x, y, color), line = ends[name], dict(arrowstyle="-", color="0.8", linewidth=0.6)
        ax.annotate(name, (x, y), xytext=(x * 1.12, at), fontsize=7, va="center", color=color,
                    bbox=dict(facecolor="white", edgecolor="none", pad=0.3), arrowprops=line)  # fmt: skip
