"""Low-rank keys and values: projection, attention over latents, and Oja's rule for the bases (OjaKV).

A basis is [B or 1, Hkv, D, r] in fp32, orthonormal columns: one per row and KV head, or shared by all rows (1).
Latents [B, Hkv, n, r] are the coordinates of tokens [B, Hkv, n, D] in it, in the cache's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dense_attention import masked_attention

# Least share of the energy in a column: a coordinate of 1e-6 of a token is fp32 noise, and no direction to follow.
COLUMN_FLOOR = 1e-12
TINY = 1e-30  # divides what is all zeros


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Tokens [B, Hkv, n, D] -> latents [B, Hkv, n, r] in the dtype of the tokens."""
    return (x.float() @ basis).to(x.dtype)


def reconstruct(latents: Tensor, basis: Tensor) -> Tensor:
    """The inverse up to what lies outside of the basis: [B, Hkv, n, r] -> [B, Hkv, n, D]."""
    return (latents.float() @ basis.mT).to(latents.dtype)


def lowrank_attention(
    q: Tensor,
    k_lat: Tensor,
    v_lat: Tensor,
    k_basis: Tensor,
    v_basis: Tensor,
    stored: Tensor,
    k_full: Tensor,
    v_full: Tensor,
    filled: Tensor,
    latent: bool = False,
) -> Tensor:
    """One query per row over latents and full-rank tokens together. Scale 1/sqrt(D), softmax in fp32.

    q [B, Hq, D]; k_lat and v_lat [B, Hkv, C, r] of which row b holds the first stored[b]; bases [B or 1, Hkv, D, r];
    k_full and v_full [B, Hkv, F, D] of which filled [B, F] are held -> [B, Hq, D]. Other slots may hold anything.
    latent: fold the key basis into the queries and expand the output with the value basis, so that the work per token
    is of width r (OjaKV, Sec. 3.2). Otherwise reconstruct keys and values (Sec. 3.3). The same to rounding (App. A.3).
    """
    B, Hq, D = q.shape
    C = k_lat.shape[2]
    held = torch.cat((torch.arange(C, device=q.device) < stored[:, None], filled), 1)[:, None]  # [B, 1, C + F]
    if not latent:
        keys = torch.cat((reconstruct(k_lat, k_basis), k_full), 2)
        values = torch.cat((reconstruct(v_lat, v_basis), v_full), 2)
        return masked_attention(q, keys, values, held)
    groups = q.view(B, k_lat.shape[1], -1, D).float()
    logits = torch.cat(((groups @ k_basis) @ k_lat.float().mT, groups @ k_full.float().mT), -1)  # [B, Hkv, g, C + F]
    p = torch.where(held[:, :, None], logits * D**-0.5, float("-inf")).softmax(-1)
    hole = ~held[..., None]  # 0 * NaN is NaN: values of empty slots must not reach the products
    y = (p[..., :C] @ v_lat.float().masked_fill(hole[:, :, :C], 0)) @ v_basis.mT
    y = y + p[..., C:] @ v_full.float().masked_fill(hole[:, :, C:], 0)
    return y.to(q.dtype).view(B, Hq, D)


def oja_step(basis: Tensor, x: Tensor, eta: float, rule: str = "column") -> Tensor:
    """Turn a basis [B, Hkv, D, r] towards tokens x [B, Hkv, m, D] by Oja's rule (OjaKV, Sec. 5.2); both fp32.

    A token of zeros changes nothing. The result's columns are not orthonormal: see `orthonormalize`.
    raw: U + eta (X - Y U^T)^T Y with Y = X U, Algorithm 1 to the letter: it diverges once eta |X|^2 is large.
    batch: that sum divided by sum |x|^2. column: column c of it divided by its own energy, sum_t y_tc^2.
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
        step = step / energy.maximum(COLUMN_FLOOR * total).clamp(min=TINY)
    return basis + eta * step


def orthonormalize(basis: Tensor) -> Tensor:
    """Q of the QR decomposition with diag(R) > 0: otherwise columns flip, and latents stored before point backwards."""
    q, r = torch.linalg.qr(basis)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]


def change_basis(latents: Tensor, old: Tensor, new: Tensor) -> None:
    """In place: latents [B, Hkv, n, r] stored under `old` become those of their reconstruction under `new`.

    Row by row, because a whole layer in fp32 is large.
    """
    for row, turn in zip(latents, old.mT @ new, strict=True):
        row.copy_(row.float() @ turn)
