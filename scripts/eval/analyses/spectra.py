"""Eigenvalues and ranks of keys before and after rotation (SALS, Appendix A, Fig. 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scripts.eval.analyses.capture import Analysis, Layer, Series, Table
from scripts.eval.analyses.measures import covariance, rank_at


def spectra(layer: Layer) -> Series:
    """Spectra of K^T K, which Section 4.2 calls the covariance; Rank(90) also after subtracting the mean key."""
    out: Series = {}
    for name in ("before", "after"):
        k = torch.cat([c.k if name == "before" else c.k_rot for c in layer.held_out])  # [tokens, n, d]
        joint = torch.linalg.eigvalsh(covariance(k.flatten(1), centred=False)).flip(-1).clamp(min=0)
        m, d = len(joint), k.shape[-1]
        index = sorted({round(x) for x in np.geomspace(1, m, 48)})  # enough points for a plot at any width
        out[name] = dict(
            rank90=int(rank_at(joint, 90)),
            rank90_centred=int(rank_at(torch.linalg.eigvalsh(covariance(k.flatten(1))), 90)),
            rank90_heads=rank_at(torch.linalg.eigvalsh(covariance(k, centred=False)), 90).tolist(),
            index=index,
            eigenvalues=[(joint[j - 1] / joint.sum()).item() for j in index],
        )
        out |= dict(width=m, head_dim=d)
    return out


def spectra_table(rows: list[Series]) -> Table:
    body: list[list[Any]] = []
    for i, r in enumerate(rows):
        pair = r["before"], r["after"]
        body.append([i, *(p["rank90"] for p in pair), *(p["rank90_centred"] for p in pair),
                     *(float(np.mean(p["rank90_heads"])) for p in pair)])  # fmt: skip
    body.append(["mean", *np.mean([b[1:] for b in body], 0).tolist()])
    return ["layer", *(f"{kind} {x}" for kind in ("joint", "centred", "head") for x in ("before", "after"))], body


def spectra_plot(plt: Any, rows: list[Series]) -> Any:
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.8))
    at, kinds = range(len(rows)), (("before", "C0"), ("after", "C1"))
    for i, style in zip(sorted({0, len(rows) // 2, len(rows) - 1}), ("-", "--", ":"), strict=False):
        for name, color in kinds:
            r = rows[i][name]
            axes[0].plot(r["index"], r["eigenvalues"], style, color=color, label=f"layer {i}, {name} rotation")
    for name, color in kinds:
        axes[1].plot(at, [r[name]["rank90"] for r in rows], "o-", color=color, label=f"{name} rotation")
        centred = [r[name]["rank90_centred"] for r in rows]
        axes[1].plot(at, centred, "--", color=color, lw=1, label=f"{name} rotation, centred")
        heads = [r[name]["rank90_heads"] for r in rows]
        axes[2].plot(at, [np.mean(h) for h in heads], "o-", color=color, label=f"{name} rotation, mean of heads")
        axes[2].fill_between(at, [min(h) for h in heads], [max(h) for h in heads], color=color, alpha=0.15, lw=0)
    width, d = rows[0]["width"], rows[0]["head_dim"]
    axes[0].set(xscale="log", yscale="log", xlabel="component", ylabel="share of the energy",
                title="Eigenvalues, all heads jointly")  # fmt: skip
    axes[0].set_ylim(bottom=1e-7)
    axes[1].set(xlabel="layer", ylabel=f"Rank(90), of {width}", title="All heads jointly", ylim=0)
    axes[2].set(xlabel="layer", ylabel=f"Rank(90), of {d}", title="Per KV head (bands: least to most)", ylim=0)
    return fig


ANALYSIS = Analysis("Rank(90) of keys before and after rotation", spectra, spectra_table, spectra_plot)
