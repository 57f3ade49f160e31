"""The measures of the analyses: covered and moved attention, residual energy, overlap of subspaces."""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(x: Tensor, centred: bool = True) -> Tensor:
    """x [S, ..., m] over S tokens -> [..., m, m] in fp64."""
    x = x.double()
    if centred:
        x = x - x.mean(0)
    return torch.einsum("s...i,s...j->...ij", x, x) / len(x)


def attention_mass(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """Causal softmax attention of q [Q, Hq, D] at positions at [Q] over k [S, n, D], both rotated -> [Q, n, g, S]."""
    logits = torch.einsum("qngd,snd->qngs", q.unflatten(1, (k.shape[1], -1)), k) * k.shape[-1] ** -0.5
    future = torch.arange(len(k), device=k.device) > at[:, None]
    return logits.masked_fill(future[:, None, None], float("-inf")).softmax(-1)


def top(scores: Tensor, count: Tensor) -> Tensor:
    """The count [...] highest of scores [..., S] -> bool [..., S]."""
    idx = scores.topk(int(count.max()), dim=-1).indices
    kept = (torch.arange(idx.shape[-1], device=idx.device) < count[..., None]).expand_as(idx)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, idx, kept)


def covered(mass: Tensor, chosen: Tensor) -> float:
    """Overlap score: share of the attention mass [..., S] on the chosen tokens, mean (SALS, Sec. 3.2)."""
    return ((mass * chosen).sum(-1) / mass.sum(-1)).mean().item()


def moved(mass: Tensor, other: Tensor) -> float:
    """Mean total variation between two attentions [..., S]: the share of the mass that is on other tokens."""
    return (mass - other).abs().sum(-1).mean().item() / 2


def residual_energy(x: Tensor, u: Tensor) -> float:
    """RER = |X - X U U^T|^2 / |X|^2 of x [n, S, d] under u [n, d, r], mean over the n heads (OjaKV, Sec. 4)."""
    rest = x - x @ u @ u.mT
    return (rest.square().sum((1, 2)) / x.square().sum((1, 2))).mean().item()


def subspace_overlap(u: Tensor, w: Tensor) -> float:
    """SO = Tr(U^T W W^T U) / r of bases [n, d, r], mean over the n heads (OjaKV, Sec. 4)."""
    return ((u.mT @ w).square().sum((1, 2)) / u.shape[-1]).mean().item()
