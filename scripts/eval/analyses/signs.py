"""Entropy of key signs, and tokens found by sign codes (Self-Indexing KVCache, eq. 5-8)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cache.budget import budget_tokens
from kernels.sign_codes import codebook, lut_score, pack_codes, sign_codes, sign_patterns
from runtime.errors import InputError
from scripts.eval.analyses.capture import Analysis, Layer, Series, Table, mean
from scripts.eval.analyses.measures import recall, sign_entropy, top

SIGN_BUDGETS = (0.02, 0.0375, 0.075, 0.15, 0.3)  # shares of the prompt, around the paper's 7.5 %


def signs(layer: Layer) -> Series:
    """Queries of the second half score the codes of the first half, per KV head."""
    d = layer.held_out[0].k.shape[-1]
    if d % 8:
        raise InputError(
            f"signs: codes are stored in bytes of 8 channels, this model has {d} a head: leave it out of --only"
        )
    rows: list[Series] = []
    entropies: dict[str, list[Tensor]] = dict(before=[], after=[])
    for c in layer.held_out:
        P, n = len(c.k) // 2, c.k.shape[1]
        k = c.k_rot[:P].transpose(0, 1)[None]  # [1, n, P, d]
        x = k - k.mean(2, keepdim=True)
        for name, keys in (("before", k), ("after", x)):
            entropies[name].append(sign_entropy(keys[0].transpose(0, 1)))
        q = c.q_rot[c.at].unflatten(1, (n, -1)).mean(2)  # [Q, n, d]
        codes, valid = sign_codes(x), torch.ones(1, P, dtype=torch.bool, device=k.device)
        patterns = sign_patterns(k.device).expand(1, n, d // 4, 16, 4)

        def look_up(book: Tensor, codes: Tensor, q: Tensor = q) -> Tensor:
            return lut_score(q, book.expand(len(q), -1, -1, -1, -1), pack_codes(codes).expand(len(q), -1, -1, -1))

        scores = {
            "exact": q.transpose(0, 1) @ k[0].mT,
            "codebook": look_up(codebook(x, codes, valid), codes).transpose(0, 1),
            "signs": look_up(patterns, codes).transpose(0, 1),
            "signs, not centred": look_up(patterns, sign_codes(k)).transpose(0, 1),
        }  # [n, Q, P]
        mass = c.mass[..., :P].sum(2).transpose(0, 1)
        row: Series = {}
        for budget in SIGN_BUDGETS:
            count = budget_tokens(budget, torch.full(mass.shape[:2], P, device=k.device))
            truth = top(mass, count)
            row |= {f"{name} {budget:g}": recall(top(s, count), truth) for name, s in scores.items()}
        rows.append(row)
    out: Series = {"recall": mean(rows)}
    for name, parts in entropies.items():
        e = torch.stack(parts).flatten()
        low, high = e.quantile(torch.tensor([0.05, 0.95], dtype=e.dtype, device=e.device)).tolist()
        out[f"entropy_{name}"] = dict(mean=e.mean().item(), low=low, high=high, least=e.min().item())
    return out


SIGN_SCORES = ("exact", "codebook", "signs", "signs, not centred")


def signs_table(rows: list[Series]) -> Table:
    body = [
        [i, *(r[f"entropy_{x}"][y] for x in ("before", "after") for y in ("mean", "low")),
         *(r["recall"][f"{s} 0.075"] for s in SIGN_SCORES)]
        for i, r in enumerate(rows)
    ]  # fmt: skip
    body.append(["mean", *np.mean([b[1:] for b in body], 0).tolist()])
    return [
        "layer",
        "bits before",
        "lowest 5 % before",
        "bits after",
        "lowest 5 % after",
        *(f"R {s}" for s in SIGN_SCORES),
    ], body


ANALYSIS = Analysis("sign entropy before and after centring; recall (R) of the oracle's 7.5 % of the prompt",
                    signs, signs_table)  # fmt: skip
