"""Bases of low-rank keys and values that follow their tokens: Oja's rule, and what goes with a new basis (OjaKV)."""

from __future__ import annotations

import torch
from torch import Tensor

# Of rule "column": a column that holds less than this many tokens would, were they spread over all D channels, is
# divided by what they would hold. Otherwise the few tokens of a short prompt, or of one step, turn columns towards
# themselves by the full eta where they have next to nothing in them: on the shipped model, updates by 256 tokens one by
# one multiply the residual energy of the text behind them by 3.2, and with the floor by 0.98. Ours, not the paper's.
COLUMN_TOKENS = 32
TINY = 1e-30  # divides what is all zeros


def oja_step(basis: Tensor, x: Tensor, eta: float, rule: str = "column") -> Tensor:
    """Turn a basis [B, Hkv, D, r] towards tokens x [B, Hkv, m, D] by Oja's rule (OjaKV, Sec. 5.2); both fp32.

    A token of zeros changes nothing. The result's columns are not orthonormal: see `orthonormalize`.
    raw: U + eta (X - Y U^T)^T Y with Y = X U, Algorithm 1 to the letter: it diverges once eta |X|^2 is large.
    batch: that sum divided by sum |x|^2. column: column c of it divided by its own energy, sum_t y_tc^2, or if that is
    more by COLUMN_TOKENS / D of a token's mean |x|^2.
    sequential: one token at a time in the order of x, each step divided by |x|^2.
    """
    if rule == "sequential":
        for token in x.split(1, 2):  # [B, Hkv, 1, D]
            basis = oja_step(basis, token, eta, "batch")
        return basis
    y = x @ basis
    step = (x - y @ basis.mT).mT @ y  # [B, Hkv, D, r]
    total = x.square().sum((2, 3), keepdim=True)
    if rule == "batch":
        step = step / total.clamp(min=TINY)
    elif rule == "column":
        energy = y.square().sum(2, keepdim=True)  # [B, Hkv, 1, r]
        tokens = (x != 0).any(3, keepdim=True).sum(2, keepdim=True).clamp(min=1)  # zeros are padding
        step = step / energy.maximum(total / tokens * (COLUMN_TOKENS / x.shape[3])).clamp(min=TINY)
    return basis + eta * step


def orthonormalize(basis: Tensor) -> Tensor:
    """Q of the QR decomposition with diag(R) > 0: otherwise columns flip, and latents stored before point backwards."""
    q, r = torch.linalg.qr(basis)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]


def change_basis(latents: Tensor, old: Tensor, new: Tensor) -> None:
    """In place: latents [B, Hkv, n, r] stored under `old` become those of their reconstruction under `new`.

    Row by row, because a whole layer in fp32 is large; transposed, because so the cache holds them.
    """
    for row, turn in zip(latents.mT, new.mT @ old, strict=True):
        row.copy_(turn @ row.float())
