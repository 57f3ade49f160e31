"""Outlier channels of the calibration compared to those of the current text (Double Sparsity, Appendix A, Fig. 9)."""

from __future__ import annotations

import numpy as np

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


ANALYSIS = Analysis("overlap of calibrated outlier channels with those of a sequence and of a query",
                    channels, channels_table, ("double_sparsity",))  # fmt: skip
