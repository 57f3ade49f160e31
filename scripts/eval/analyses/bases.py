"""How much keys in a low-rank basis change the attention, by the data of the basis: what causes a loss (OjaKV, SALS).

A basis of the current text is the best that a calibration, or an update by the text, could give. The best possible
basis approximates the product of queries and keys, not the keys. Centred means that the text's mean key is subtracted,
which does not change the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.budget import budget_tokens
from cache.statistic import principal
from scripts.eval.analyses.capture import Analysis, Capture, Layer, Series, Table, mean
from scripts.eval.analyses.measures import attention_mass, covariance, covered, moved, top

OJA_RANK, SALS_RANK = 0.6, 0.125  # a share of D, ojakv's default; a share of n * D, the scoring rank of sals-25
SALS_BUDGET = 0.125  # of the tokens


def bases(layer: Layer) -> Series:
    """moved: total variation between the attention with keys projected to OJA_RANK and the true one. covered: the mass
    on 1/8 of the tokens, chosen by SALS_RANK of the coordinates."""
    return mean([ojakv(c, layer.get("oja.k_basis")) | sals(c, layer.get("sals.basis")) for c in layer.held_out])


def ojakv(c: Capture, calibrated: Tensor) -> Series:
    n, d = c.k.shape[1:]
    rank, k = max(1, round(OJA_RANK * d)), c.k_rot.double().transpose(0, 1)  # [n, S, D]
    q = c.q_rot.double().unflatten(1, (n, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # [n, S * g, D]
    centred = k - k.mean(1, keepdim=True)
    of_q = q.mT @ q

    def projected(x: Tensor, moments: Tensor) -> Tensor:
        u = principal(moments)[1][..., :rank].double()
        return x @ u @ u.mT

    root = torch.linalg.cholesky(of_q + 1e-9 * of_q.diagonal(dim1=1, dim2=2).mean() * torch.eye(d).to(of_q))
    u, s, vt = torch.linalg.svd(k @ root, full_matrices=False)  # |Q (K - K')^T| is least at this K'
    best = (u[..., :rank] * s[:, None, :rank]) @ vt[:, :rank] @ torch.linalg.inv(root)
    u = calibrated[..., :rank].double()
    keys = {
        "moved: calibrated": k @ u @ u.mT,
        "text, K and Q": projected(k, k.mT @ k + of_q),
        "text, K alone": projected(k, k.mT @ k),
        "text, centred": projected(centred, centred.mT @ centred + of_q),
        "best possible": best,
    }
    return {name: moved(c.mass, attention_mass(c.q_rot[c.at], x.transpose(0, 1).float(), c.at))
            for name, x in keys.items()}  # fmt: skip


def sals(c: Capture, calibrated: Tensor) -> Series:
    width = len(calibrated)
    rank, count = max(1, round(SALS_RANK * width)), budget_tokens(SALS_BUDGET, c.at + 1)
    keys = c.k.flatten(1)
    text, centred = (principal(covariance(keys, c))[1].float() for c in (False, True))
    of = {"covered: calibrated": calibrated, "text": text, "text, centred keys": centred}
    found = {name: covered(c.mass, top(c.latent_scores(u, rank), count)[:, None, None]) for name, u in of.items()}
    return found | {"all coordinates": covered(c.mass, top(c.latent_scores(calibrated, width), count)[:, None, None])}


def bases_table(rows: list[Series]) -> Table:
    return ["layer", *rows[0]], [*([i, *r.values()] for i, r in enumerate(rows)), ["mean", *mean(rows).values()]]


ANALYSIS = Analysis("attention moved by low-rank keys (OjaKV), mass found by latent scores (SALS), by basis",
                    bases, bases_table, ("ojakv", "sals"))  # fmt: skip
