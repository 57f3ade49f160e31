"""Draw tokens/s over context from results of bench_generate.py: ours by method, llama.cpp and transformers, by weights.

    python -m scripts.report.plot_speed results/generate_cpu_llama-3.2-1b_*[0-9].json --out results

Writes speed_MODEL.png for each model: a panel for each width of the weights, all with the same axes, batch 1, the
median over rounds with its quartiles. Of a run's modes the faster one is drawn at each length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from errors import InputError, Parser, run_cli
from scripts.report.plot_results import MARKERS, Row, decorate, log_scale, spread_bars
from scripts.shared.results import check_out, save_figure

WIDTHS = ["fp32", "bf16", "int8", "int4"]
GAP = 0.055  # least distance of two labels, as a share of the panel's height


def load(files: list[str]) -> list[Row]:
    """Measured rows of batch 1, each with its file's model, device and weights, and the name that it is drawn under."""
    rows: list[Row] = []
    for file in files:
        try:
            data = json.loads(Path(file).read_text())
            weights = (data.get("weights") or {"float32": "fp32", "bfloat16": "bf16"}[data["dtype"]]).partition(":")[0]
            common = dict(model=str(data["model"]).removesuffix(".json"), device=data["device"], weights=weights)
            for r in data["rows"]:
                if "tokens_per_s" in r and r["batch"] == 1:
                    name = r.get("method") or r["run"].split()[0]
                    rows.append(r | common | dict(name=name, length=r.get("length", data["prompt_tokens"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise InputError(f"cannot read {file} as a result of bench_generate: {type(e).__name__}: {e}") from None
    if not rows:
        raise InputError("none of the files has a measured row of batch 1")
    best: dict[tuple[Any, ...], Row] = {}
    for r in rows:
        key = tuple(r[k] for k in ("model", "device", "weights", "name", "length"))
        if key not in best or r["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = r
    return list(best.values())


def looks(names: list[str]) -> dict[str, dict[str, Any]]:
    """Ours in colors, `full` dark; peers in dashes."""
    peers = {"llama.cpp": dict(color="black", linestyle="--", marker="x"),
             "transformers": dict(color="gray", linestyle="--", marker="+")}  # fmt: skip
    ours = [n for n in names if n not in peers and n != "full"]
    colors = plt.get_cmap("tab10")
    full = dict(color="black", linestyle="-", marker="o")
    return peers | dict(full=full) | {n: dict(color=colors(i % 10), linestyle="-", marker=MARKERS[1 + i % 11])
                                      for i, n in enumerate(ours)}  # fmt: skip


def label(ax: Any, ends: dict[str, tuple[float, float]], look: dict[str, dict[str, Any]]) -> None:
    """Each line's name beside its last point, moved apart where lines end together."""
    to_axes = ax.transData + ax.transAxes.inverted()
    at = sorted((*to_axes.transform(xy)[::-1], name) for name, xy in ends.items())
    lowest = -1.0
    for y, x, name in at:
        lowest = max(y, lowest + GAP)
        ax.annotate(name, (x, y), (1.03, lowest), xycoords="axes fraction", textcoords="axes fraction", fontsize=8,
                    va="center", color=look[name]["color"], annotation_clip=False,
                    arrowprops=dict(arrowstyle="-", linewidth=0.5, color=look[name]["color"]))  # fmt: skip


def draw(rows: list[Row], title: str) -> Any:
    widths = [w for w in WIDTHS if any(r["weights"] == w for r in rows)]
    names, lengths = list(dict.fromkeys(r["name"] for r in rows)), sorted({r["length"] for r in rows})
    look = looks(names)
    fig, axes = plt.subplots(1, len(widths), figsize=(4.6 * len(widths), 4.4), squeeze=False, sharex=True, sharey=True)
    ends: list[dict[str, tuple[float, float]]] = []
    for ax, width in zip(axes[0], widths, strict=True):
        ends.append({})
        for name in names:
            mine = [r for r in rows if (r["weights"], r["name"]) == (width, name)]
            if mine:
                rate = lambda r: [1 / s for s in r["seconds_per_step"]]  # noqa: E731
                spread_bars(ax, mine, lambda r: r["tokens_per_s"], rate, **look[name])
                last = max(mine, key=lambda r: r["length"])
                ends[-1][name] = last["length"], last["tokens_per_s"]
        log_scale(ax)
        decorate(ax, lengths, "tokens/s" if ax is axes[0, 0] else "", f"weights {width}")
    fig.suptitle(title, fontsize=11)
    fig.tight_layout()
    room = max(1.15, 0.075 * max(map(len, names)))  # inches that the longest name takes
    fig.subplots_adjust(wspace=0.42, right=1 - room / (4.6 * len(widths)))
    for ax, end in zip(axes[0], ends, strict=True):
        label(ax, end, look)
    return fig


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("files", nargs="+", help="result files of bench_generate.py")
    p.add_argument("--out", default=".", metavar="DIR", help="where the pictures go")
    p.add_argument("--json", action="store_true", help="print the names of the pictures as JSON")
    opt = p.parse_args()
    out, rows, written = Path(opt.out), load(opt.files), []
    if not out.is_dir():
        raise InputError(f"--out {out} is no folder: create it first")
    check_out(out / "speed.png")
    for model, device in dict.fromkeys((r["model"], r["device"]) for r in rows):
        fig = draw([r for r in rows if (r["model"], r["device"]) == (model, device)], f"{model}, batch 1, {device}")
        written.append(str(out / f"speed_{model}.png"))
        save_figure(fig, written[-1])
        plt.close(fig)
    print(json.dumps(written) if opt.json else "\n".join(written))


if __name__ == "__main__":
    run_cli(main)
