"""Inputs of adjacent layers, and tokens chosen by a predicted query (Double Sparsity, Section 5.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cache.budget import budget_tokens
from kernels.rope import apply_rope
from scripts.eval.analyses.capture import Analysis, Layer, Series, Table, mean
from scripts.eval.analyses.measures import covered, recall, top

LABELS, LABEL_BUDGET = 0.25, 0.0625  # double_sparsity's defaults


def adjacent(layer: Layer) -> Series:
    """Tokens of the layer chosen by exact labels, so that only the query is tested. Nothing for the first layer."""
    if layer.index == 0:
        return {}
    cos, sin = layer.rope
    rows = []
    for c in layer.held_out:
        assert c.before is not None
        n, d = c.k.shape[1:]
        channel = layer.get("channels.qk")[:, : max(1, round(LABELS * d))]  # [n, r]
        labels = c.k_rot.gather(2, channel.expand(len(c.k), -1, -1))
        predicted = apply_rope(layer.block.predicted_query(c.before[c.at]).float(), cos[c.at], sin[c.at])
        count = budget_tokens(LABEL_BUDGET, c.at + 1)[:, None].expand(-1, n)
        chosen = []
        for q in (predicted, c.q_rot[c.at]):
            q = q.unflatten(1, (n, -1)).sum(2).gather(2, channel.expand(len(q), -1, -1))  # [Q, n, r]
            chosen.append(top(c.past(torch.einsum("qnr,snr->qns", q, labels)), count))
        row = dict(cosine=F.cosine_similarity(c.before.float(), c.x.float(), dim=-1).mean().item())
        row |= dict(hit_rate=recall(*chosen))
        for name, tokens in (("mass_predicted", chosen[0]), ("mass_true", chosen[1]), ("mass_oracle", None)):
            tokens = top(c.mass.mean(2), count) if tokens is None else tokens
            row[name] = covered(c.mass, tokens[:, :, None])
        rows.append(row)
    return mean(rows)


def adjacent_table(rows: list[Series]) -> Table:
    if len(rows) < 2:
        return ["layers"], []
    body = [[f"{i} -> {i + 1}", *r.values()] for i, r in enumerate(rows[1:])]
    return ["layers", *rows[-1]], [*body, ["mean", *mean(rows[1:]).values()]]


ANALYSIS = Analysis("inputs of adjacent layers; 1/16 of the tokens by predicted and true queries, and their mass",
                    adjacent, adjacent_table, ("double_sparsity",))  # fmt: skip
