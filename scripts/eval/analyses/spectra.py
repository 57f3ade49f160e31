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


ANALYSIS = Analysis("Rank(90) of keys before and after rotation", spectra, spectra_table)
