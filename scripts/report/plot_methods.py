"""Draw results/methods*.json: what each method retrieves against the bytes that a step reads and the cache holds.

python -m scripts.report.plot_methods                       # -> results/methods.png
python -m scripts.report.plot_methods --task key_value --out key_value.png
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cache.spec import parse_spec, resolve
from errors import InputError, Parser, run_cli
from runtime import ROOT
from scripts.shared.results import check_out, method_rows, save_figure

MARKERS = "osD^vP*Xhd<>"


def family(spec: str) -> str:
    """The method's class, of a spec by layers that of the last ones."""
    return resolve(parse_spec(spec)[-1].name)[0].__name__


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--task", default="needle", help="needle, needle4, key_value or repeats")
    p.add_argument("--out", default=str(ROOT / "results" / "methods.png"))
    p.add_argument("--json", action="store_true", help="print the name of the picture as JSON")
    opt = p.parse_args()
    check_out(opt.out)
    rows = [r for r in method_rows() if opt.task in r]
    if not rows:
        run = "python -m scripts.eval.compare --method all"
        raise InputError(f"no results/methods*.json has {opt.task}: {run} measures it")
    lengths = sorted({r["seq_len"] for r in rows})
    families = sorted({family(r["method"]) for r in rows})
    look = {name: (MARKERS[i % len(MARKERS)], plt.get_cmap("tab10")(i % 10)) for i, name in enumerate(families)}
    fig, axes = plt.subplots(2, len(lengths), figsize=(5 * len(lengths), 8), sharey=True, squeeze=False)
    for column, T in enumerate(lengths):
        for ax, key, what in zip(
            axes[:, column], ("read_share", "kv_share"), ("bytes read by a step", "KV bytes"), strict=True
        ):
            for r in (r for r in rows if r["seq_len"] == T):
                marker, color = look[family(r["method"])]
                ax.scatter(r[key], 100 * r[opt.task], marker=marker, color=color, s=50, alpha=0.8, edgecolors="none")
            ax.set_xscale("log", base=2)
            ax.set_xlabel(f"{what}, share of full")
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x >= 0.1 else f"{x:.3f}")
            ax.grid(alpha=0.3)
            ax.set_ylim(-4, 104)
        axes[0, column].set_title(f"{T} tokens")
    for ax in axes[:, 0]:
        ax.set_ylabel(f"{opt.task}, % found" if opt.task != "repeats" else "repeats, % predicted")
    handles = [plt.Line2D([], [], marker=m, color=c, linestyle="", label=n) for n, (m, c) in look.items()]
    fig.legend(handles=handles, loc="lower center", ncols=3 * len(lengths), frameon=False, fontsize=9)
    lines = -(-len(handles) // (3 * len(lengths)))
    fig.tight_layout(rect=(0, 0.02 + 0.025 * lines, 1, 1))
    save_figure(fig, opt.out)
    print(json.dumps([opt.out]) if opt.json else opt.out)


if __name__ == "__main__":
    run_cli(main)
