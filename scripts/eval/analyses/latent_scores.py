"""Tokens chosen by latent scores: the mass they cover, the oracle's tokens among them (SALS, Sec. 3.2, 4.3, Fig. 2)."""

from __future__ import annotations

import torch

from cache.budget import budget_tokens
from scripts.eval.analyses.capture import Analysis, Layer, Series, Table, mean
from scripts.eval.analyses.measures import covered, recall, top

SALS_BUDGET, SALS_RANKS = 0.125, (1.0, 0.25, 0.125, 0.0625)  # r = 25 % is scored with r* = 12.5 %, 12.5 % with 6.25 %
FRACTIONS = tuple(2.0**-i for i in range(5, -1, -1))  # r* of n*d, for recall


def overlap(layer: Layer) -> Series:
    """Every query head's attention mass on the one set of tokens of the layer."""
    basis, rows = layer.get("sals.basis"), []
    for c in layer.held_out:
        count = budget_tokens(SALS_BUDGET, c.at + 1)
        scores = {"oracle": c.mass.mean((1, 2))}
        scores |= {f"latent {s:g}": c.latent_scores(basis, max(1, round(s * len(basis)))) for s in SALS_RANKS}
        scores["newest"] = c.past(torch.arange(len(c.k), device=c.k.device).float().expand(len(c.at), -1))
        rows.append({name: covered(c.mass, top(s, count)[:, None, None]) for name, s in scores.items()})
    return mean(rows)


def overlap_table(rows: list[Series]) -> Table:
    return ["layer", *rows[0]], [*([i, *r.values()] for i, r in enumerate(rows)), ["mean", *mean(rows).values()]]


def recalls(layer: Layer) -> Series:
    """Recall of the oracle's tokens, which are those of the layer with the largest mean mass over all heads."""
    basis, rows = layer.get("sals.basis"), []
    for c in layer.held_out:
        count = budget_tokens(SALS_BUDGET, c.at + 1)
        truth = top(c.mass.mean((1, 2)), count)
        rows.append({f"{f:.4g}": recall(top(c.latent_scores(basis, max(1, round(f * len(basis)))), count), truth)
                     for f in FRACTIONS})  # fmt: skip
    return mean(rows)


OVERLAP = Analysis("share of the attention mass on 1/8 of the tokens, by what chooses them; latent: share of n*d",
                   overlap, overlap_table, ("sals",))  # fmt: skip
RECALL = Analysis("share of the oracle's 1/8 of the tokens that latent scores find, by r* / (n*d)",
                  recalls, overlap_table, ("sals",))  # fmt: skip
