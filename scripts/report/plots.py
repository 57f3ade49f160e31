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


def looks_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """A marker and a colour per method; bounds are grey and dashed."""
    colors, order = plt.get_cmap("tab20"), [*range(0, 20, 2), *range(1, 20, 2)]
    looks = {m: dict(marker=MARKERS[i % len(MARKERS)], color=colors(order[i % 20])) for i, m in enumerate(methods)}
    return looks | {m: looks[m] | dict(linestyle="--", color="0.6") for m in BOUNDS if m in looks}


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
            names = sorted({c["method"] for c in here}, key=lambda m: (m in BOUNDS, m))
            looks, ends = looks_of(names), dict[str, tuple[float, float]]()
            for k, name in enumerate(names):
                line = []
                for c in (c for c in here if c["method"] == name):
                    each = scores(rows[c["spec"], n], tasks)
                    x = float(Fraction(c["target"])) if name in BOUNDS else rows[c["spec"], n][AXES[c["axis"]][1]]
                    line.append((x * 1.006 ** (k - len(names) / 2), each))  # side by side, so that bars can be told
                line.sort(key=lambda point: point[0])
                xs, ys = [x for x, _ in line], [100 * sum(each) / len(each) for _, each in line]
                ax.plot(xs, ys, color=looks[name]["color"], linestyle=looks[name].get("linestyle", "-"), linewidth=1)
                for x, y, each in zip(xs, ys, (each for _, each in line), strict=True):
                    ends_of = [100 * e for e in wilson(sum(each), len(each))]
                    face = "white" if data.same(paired(each, full)) else looks[name]["color"]
                    ax.plot([x, x], ends_of, color=looks[name]["color"], linewidth=0.6, alpha=0.5)
                    ax.plot(x, y, markersize=6, markerfacecolor=face, **looks[name] | dict(linestyle="none"))
                ends[name] = xs[-1], ys[-1]
            name_lines(ax, ends, looks)
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
    lengths = sorted({r["seq_len"] for r in data.rows_of("distances")})
    if not lengths:
        return None
    fig, axes = plt.subplots(1, len(lengths), figsize=(7.5 * len(lengths), 7), sharey=True, squeeze=False)
    for ax, n in zip(axes[0], lengths, strict=True):
        every = {m: row for m, row in data.windows(n).items() if m != "full"}
        looks = looks_of(sorted(every))
        for m, row in every.items():
            middle, low, high = (max(1e-4, x) for x in data.predicted(m, "kl", n))
            ax.plot([row["read_share"]] * 2, [low, high], color=looks[m]["color"], linewidth=0.8)
            ax.plot(row["read_share"], middle, **looks[m] | dict(linestyle="none"), markersize=5)
            ax.annotate(m, (row["read_share"], middle), xytext=(4, 3), textcoords="offset points", fontsize=6.5,
                        color=looks[m]["color"])  # fmt: skip
        count = int(sum(next(iter(every.values()))["windows"]["tokens"]))
        ax.set(xscale="log", yscale="log", xlabel="bytes that a step reads, share of full's")
        ticks = [2.0**-i for i in range(5)]
        ax.set_xticks(ticks, ["1", *(f"1/{1 / t:.0f}" for t in ticks[1:])])
        ax.minorticks_off()
        ax.set_title(f"{n:,} tokens, prose and code: {count:,} predicted tokens a point", fontsize=10)
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL divergence from full, nats (bars: 95 % over windows)")
    fig.tight_layout()
    return fig


def name_lines(ax: Any, ends: dict[str, tuple[float, float]], looks: dict[str, dict[str, Any]]) -> None:
    """Writes each line's name in its colour beside its last point, and moves names apart that would overlap."""
    least, top = 3.6, 104.0  # in units of y
    order = sorted(ends, key=lambda name: ends[name][1])
    places = [ends[name][1] for name in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + least)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top - least * (len(places) - 1 - i))
    for name, at in zip(order, places, strict=True):
        (x, y), line = ends[name], dict(arrowstyle="-", color="0.8", linewidth=0.6)
        ax.annotate(name, (x, y), xytext=(x * 1.12, at), fontsize=7, va="center", color=looks[name]["color"],
                    bbox=dict(facecolor="white", edgecolor="none", pad=0.3), arrowprops=line)  # fmt: skip
