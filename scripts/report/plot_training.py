"""Draw the training curve of a checkpoint made by scripts/train/train_tiny.py from its training.json.

python scripts/report/plot_training.py --out results/training.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from errors import InputError, Parser, run_cli  # noqa: E402
from runtime import ROOT, TINY  # noqa: E402
from scripts.shared.results import check_out, save_figure  # noqa: E402
from weights.shards import read_object as read_json  # noqa: E402


def main() -> None:
    p = Parser(__doc__)
    p.add_argument("--checkpoint", default=str(TINY))
    p.add_argument("--out", default=str(ROOT / "results" / "training.png"))
    p.add_argument("--json", action="store_true", help="print the points instead of drawing them")
    opt = p.parse_args()
    log = read_json(Path(opt.checkpoint) / "training.json").get("log")
    if not log:
        raise InputError(f"{opt.checkpoint}/training.json holds no training log")
    if opt.json:
        print(json.dumps(log))
        return
    check_out(opt.out)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True)
    millions = [p["tokens"] / 1e6 for p in log]
    for key, label in (("acc3", "repeats of random tokens"), ("acc2", "retrieved answers, per token")):
        top.plot(millions, [p.get(key) for p in log], label=label)
    top.plot(millions, [p["rate"] for p in log], color="0.7", lw=1, label="learning rate / maximum")
    bottom.plot(millions, [p.get("ce1") for p in log], color="C2", label="text, nats per token")
    last = None
    for p_, x in zip(log, millions, strict=True):
        if p_["seq_len"] != last:
            last = p_["seq_len"]
            for ax in (top, bottom):
                ax.axvline(x, color="0.85", lw=1, zorder=0)
            top.text(x, 1.02, f" T{last}", fontsize=8, color="0.4")
    top.set(ylim=(0, 1.1), ylabel="accuracy")
    bottom.set(xlabel="million tokens", ylabel="cross entropy")
    for ax in (top, bottom):
        ax.legend(loc="lower right" if ax is top else "upper right", frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    save_figure(fig, opt.out)


if __name__ == "__main__":
    run_cli(main)
