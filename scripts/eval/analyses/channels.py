"""Outlier channels of the calibration compared to those of the current text (Double Sparsity, Appendix A, Fig. 9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.eval.analyses.axes import fraction_axis
from scripts.eval.analyses.capture import Analysis, Layer, Series, Table, mean

RATIOS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)  # channels of d, Double Sparsity Fig. 9


def channels(layer: Layer) -> Series:
    """Online per sequence: calibrated on this text alone. Per query: this query and the keys it sees."""
    offline = layer.get("channels.qk").argsort(-1)  # [n, d] the rank of every channel
    rows = []
    for c in layer.held_out:
        n, d = c.k.shape[1:]
        groups = c.q_rot.unflatten(1, (n, -1)).abs().mean(2)  # [S, n, d], mean over the group
        seen = c.k_rot.abs().cumsum(0)[c.at]
        online = dict(sequence=(groups * c.k_rot.abs()).sum(0)[None], query=groups[c.at] * seen)
        row = {}
        for ratio in RATIOS:
            r = max(1, round(ratio * d))
            for name, weight in online.items():
                ranks = weight.argsort(dim=-1, descending=True, stable=True).argsort(-1)
                row[f"{name} {ratio:g}"] = ((ranks < r) & (offline < r)).sum(-1).div(r).float().mean().item()
        rows.append(row)
    return mean(rows)


def channels_table(rows: list[Series]) -> Table:
    body = []
    for ratio in RATIOS:
        each = [r[f"sequence {ratio:g}"] for r in rows]
        queries = float(np.mean([r[f"query {ratio:g}"] for r in rows]))
        body.append([f"{ratio:g}", float(np.mean(each)), min(each), queries, ratio])
    return ["channels / d", "per sequence", "least layer", "per query", "chance"], body


def channels_plot(plt: Any, rows: list[Series]) -> Any:
    fig, ax = plt.subplots(figsize=(7, 5.2))
    for name, color, label in (("sequence", "C0", "channels of a sequence"), ("query", "C1", "channels of a query")):
        each = np.array([[r[f"{name} {ratio:g}"] for ratio in RATIOS] for r in rows])
        ax.plot(RATIOS, each.mean(0), "o-", color=color, label=label)
        ax.fill_between(RATIOS, each.min(0), each.max(0), color=color, alpha=0.15, lw=0)
    ax.plot(RATIOS, RATIOS, ":", color="0.5", label="chance")
    ax.plot([0.25], [0.95], "k*", ms=10, label="the paper's 0.95, Llama-2-7B")
    ax.set(xlabel="channels / head_dim", ylabel="overlap with the calibrated channels", ylim=(0, 1.02),
           title="Outlier channels by |q k| (bands: least to most of the layers)")  # fmt: skip
    fraction_axis(ax, (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1))
    return fig


ANALYSIS = Analysis("overlap of calibrated outlier channels with those of a sequence and of a query",
                    channels, channels_table, channels_plot, ("double_sparsity",))  # fmt: skip
