"""A basis from prose on code, before and after Oja's update (OjaKV, Section 4, Table 1)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cache.statistic import principal
from kernels.oja import oja_step, orthonormalize
from kernels.prompt_scores import snapkv_scores
from scripts.eval.analyses.capture import Analysis, Capture, Layer, Series, Table, mean
from scripts.eval.analyses.measures import covariance, residual_energy, subspace_overlap

OJA_RANKS, ETA, IMPORTANT = (0.6, 0.8), 0.1, 0.05  # ojakv's presets and defaults
RULES = ("sequential", "column", "batch", "raw")  # the paper's Sec. 5.2, two of ours, its Algorithm 1 verbatim


def shift(layer: Layer) -> Series:
    """The first half of every sequence of code updates the bases of prose; the whole sequence is measured.

    keys: PCA of keys alone, before and after, as in the paper's table. keys (q and k): the method's basis of keys and
    queries together, whose residual is larger than that of keys alone even without a shift. rer_RULE and so_RULE are
    the values for each rule of Oja's step.
    """

    def heads(x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def basis(moments: Tensor) -> Tensor:
        return principal(moments)[1].float()

    def moments(c: Capture) -> dict[str, Tensor]:
        k = covariance(c.k_rot, centred=False)
        q = covariance(c.q_rot.unflatten(1, (c.k.shape[1], -1)).transpose(1, 2).flatten(0, 1), centred=False)
        g = c.q.shape[1] // c.k.shape[1]
        return {"keys": k, "keys (q and k)": k + g * q, "values": covariance(c.v, centred=False)}

    sums = [moments(c) for c in layer.text["calibration"]]
    out: Series = {}
    for name in sums[0]:
        static = basis(torch.stack([s[name] for s in sums]).sum(0))  # [n, d, d]
        d = static.shape[-1]
        for rank in OJA_RANKS:
            u, rows = static[..., : max(1, round(rank * d))], []
            home = [residual_energy(heads(c.v if name == "values" else c.k_rot), u) for c in layer.text["prose"]]
            for c in layer.text["code"]:
                x = heads(c.v if name == "values" else c.k_rot)
                best = basis(moments(c)["values" if name == "values" else "keys"])[..., : u.shape[-1]]
                tokens = x[None, :, important(c)]
                turned = {rule: orthonormalize(oja_step(u[None], tokens, ETA, rule))[0] for rule in RULES}
                bases = dict(static=u) | turned
                row = {f"rer_{key}": residual_energy(x, w) for key, w in (bases | dict(oracle=best)).items()}
                rows.append(row | {f"so_{key}": subspace_overlap(w, best) for key, w in bases.items()})
            out[f"{name}, {rank}"] = dict(rer_in_domain=float(np.mean(home))) | mean(rows)
    return out


def important(c: Capture) -> Tensor:
    """The tokens of the first half with the most attention from its last 32 queries, in order; one set per layer."""
    P = len(c.k) // 2
    q, k = (t[:P].transpose(0, 1)[None] for t in (c.q_rot, c.k_rot))
    scores = snapkv_scores(q, k, torch.tensor([P], device=k.device), pool=1).sum(1)[0]
    return scores.topk(math.ceil(IMPORTANT * P)).indices.sort().values


def shift_table(rows: list[Series]) -> Table:
    body = [[name, *mean([r[name] for r in rows]).values()] for name in rows[0]]
    return ["basis, rank", *next(iter(rows[0].values()))], body


ANALYSIS = Analysis("residual energy ratio (rer) and subspace overlap (so) on code of a basis from prose",
                    shift, shift_table)  # fmt: skip
