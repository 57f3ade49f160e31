"""Draw results/equal_bytes*.json: what each method finds against the bytes it holds, and against those a step reads.

    python -m scripts.report.plot_equal_bytes                    # -> results/equal_bytes_kv.png, equal_bytes_read.png
    python -m scripts.report.plot_equal_bytes --task key_value --out /tmp

A line a method, through its settings. The frontier, what no other setting beats with as few bytes, is grey; the
setting in which it ends is named: no other finds more, nor as much with fewer bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from errors import InputError, Parser, run_cli
from runtime import ROOT
from scripts.report.tables.equal_bytes import BOUNDS, TASKS, Cell, cells, read_cells, share_of
from scripts.shared.results import check_out, save_figure

MARKERS = "osD^vP*Xhd<>"
WHAT = dict(kv="bytes held", read="bytes that a step reads")
TICKS = [1 / 2, 1 / 4, 1 / 8, 1 / 16]


def frontier(points: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Of (bytes, found, method), those that find more than all with fewer or as many bytes."""
    out: list[tuple[float, float, str]] = []
    for x, y, name in sorted(points, key=lambda p: (p[0], -p[1])):
        if not out or y > out[-1][1]:
            out.append((x, y, name))
    return out


def panel(ax: Any, found: list[Cell], task: str, looks: dict[str, dict[str, Any]]) -> None:
    points = []
    for method, look in looks.items():
        mine = sorted((share_of(c), 100 * c["row"][task]) for c in found if c["method"] == method)
        if not mine:
            continue
        bound = dict(linestyle="--", color="0.6") if method in BOUNDS else {}
        ax.plot(*zip(*mine, strict=True), **(look | bound), markersize=5, linewidth=1.2, alpha=0.9)
        if method not in BOUNDS:
            points += [(x, y, method) for x, y in mine]
    best = frontier(points)
    xs, ys, _ = zip(*best, strict=True)
    ax.step([*xs, 1], [*ys, ys[-1]], where="post", color="0.75", linewidth=6, alpha=0.6, zorder=0)
    x, y, name = best[-1]
    ax.annotate(name, (x, y), xytext=(0, -14 if y > 90 else 8), textcoords="offset points", ha="center", fontsize=8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(TICKS, [f"1/{1 / t:.0f}" for t in TICKS])
    ax.minorticks_off()
    ax.set_xlim(1 / 34, 0.62)
    ax.set_ylim(-4, 106)
    ax.grid(alpha=0.3)


def draw(axis: str, every: list[Cell], tasks: list[str], out: Path) -> Path | None:
    found = [c for c in every if c["axis"] == "kv"] if axis == "kv" else read_cells(every)
    lengths = sorted({c["seq_len"] for c in found})
    if not lengths:
        return None
    methods = sorted({c["method"] for c in found}, key=lambda m: (m in BOUNDS, m))
    colors = plt.get_cmap("tab20")
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    looks = {m: dict(marker=MARKERS[i % len(MARKERS)], color=colors(order[i % 20])) for i, m in enumerate(methods)}
    size = (4.6 * len(lengths), 3.6 * len(tasks) + 1.1)
    fig, axes = plt.subplots(len(tasks), len(lengths), figsize=size, sharey=True, sharex=True, squeeze=False)
    for row, task in zip(axes, tasks, strict=True):
        row[0].set_ylabel(f"{task}, % found")
        for ax, T in zip(row, lengths, strict=True):
            here = [c for c in found if c["seq_len"] == T and task in c["row"]]
            if not here:
                ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color="0.5")
                continue
            panel(ax, here, task, looks)
    for ax, T in zip(axes[0], lengths, strict=True):
        ax.set_title(f"{T} tokens")
    for ax in axes[-1]:
        ax.set_xlabel(f"{WHAT[axis]}, share of full")
    lines = {m: dict(linestyle="--", color="0.6") if m in BOUNDS else {} for m in methods}
    handles = [plt.Line2D([], [], label=m, **(looks[m] | lines[m])) for m in methods]
    handles.append(plt.Line2D([], [], color="0.75", linewidth=6, alpha=0.6, label="frontier"))
    columns = 4 * len(lengths)
    fig.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, (0.2 + 0.2 * -(-len(handles) // columns)) / size[1], 1, 1))
    path = out / f"equal_bytes_{axis}.png"
    save_figure(fig, path)
    plt.close(fig)
    return path


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--task", nargs="+", choices=TASKS, help="default: all that were measured")
    p.add_argument("--out", default=str(ROOT / "results"), help="a folder")
    p.add_argument("--json", action="store_true", help="print the names of the pictures as JSON")
    opt = p.parse_args()
    every = cells()
    tasks = [t for t in opt.task or TASKS if any(t in c["row"] for c in every)]
    if not tasks:
        raise InputError("no results/equal_bytes*.json has this: scripts.eval.compare with --kv and --read measures it")
    for axis in WHAT:
        check_out(Path(opt.out) / f"equal_bytes_{axis}.png")
    made = [str(f) for f in (draw(axis, every, tasks, Path(opt.out)) for axis in WHAT) if f]
    print(json.dumps(made) if opt.json else "\n".join(made))


if __name__ == "__main__":
    run_cli(main)
