"""Bases of low-rank keys and values that follow their tokens: Oja's rule, QR, and latents in a new basis (OjaKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation

# For rule "column": the floor of a column's energy is what this many tokens would give it if they were spread evenly
# over all D channels. Without it, the few tokens of a short prompt, or of one step, would turn columns that hold next
# to nothing of them by the full eta: on the shipped model, updates by 256 tokens one by one multiply the residual
# energy of the text behind them by 3.2, and with the floor by 0.98. Ours, not the paper's.
COLUMN_TOKENS = 32
TINY = 1e-30  # a divisor for what is all zeros
# Shares of its trace that are added to the diagonal of U^T U: above the rounding error of 256 x 256 products in fp64.
# After the first, the second decomposition has a condition number below 10 unless fp32 cannot tell columns apart.
SHIFTS = 1e-13, 1e-15
NUM_WARPS = 8  # of `sequential` in Triton: 64 numbers of a basis of 128 x 128 a thread, none is spilled


def oja_step(basis: Tensor, x: Tensor, eta: float, rule: str = "sequential") -> Tensor:
    """Turn a basis [B, Hkv, D, r] towards tokens x [B, Hkv, m, D] by Oja's rule (OjaKV, Sec. 5.2); both fp32.

    A token of zeros changes nothing. The result's columns are not orthonormal: see `orthonormalize`.
    sequential: one token at a time in the order of x, Sec. 5.2; that each step is divided by |x|^2 is ours.
    raw: U + eta (X - Y U^T)^T Y with Y = X U, Algorithm 1 to the letter: it diverges once eta |X|^2 is large.
    batch, ours: that sum divided by sum |x|^2. column, ours: its column c divided by that column's energy, sum_t
    y_tc^2, or by COLUMN_TOKENS / D of a token's mean |x|^2 if that is more.
    """
    if rule == "sequential":
        x = x * (eta**0.5 / torch.linalg.vector_norm(x, dim=3, keepdim=True).clamp(min=TINY))
        return sequential(basis.flatten(0, 1), x.flatten(0, 1)).view_as(basis)
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


@operation(cpp=lambda basis, x: x.dtype == basis.dtype == torch.float32)
def sequential(basis: Tensor, x: Tensor) -> Tensor:
    """Bases U [N, D, r] after tokens x [N, m, D], one by one: U += (x - U y) y^T with y = U^T x of the running U.

    All N bases at once; a kernel keeps each in registers or cache, so that a token costs 6 D r flops and no memory.
    """
    basis = basis.clone()
    for token in x.split(1, 1):  # [N, 1, D]
        y = token @ basis
        basis.baddbmm_((token - y @ basis.mT).mT, y)
    return basis


@triton.jit
def _sequential(
    x, basis, out, m, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Program (row and KV head): its basis stays in registers from the first token to the last."""
    pid_bh, offs_d, offs_r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    start, at, real = pid_bh * (D * R), offs_d[:, None] * R + offs_r, (offs_d[:, None] < D) & (offs_r < R)
    b_u = tl.load(basis + start + at, mask=real, other=0.0)
    for t in range(m):
        token = tl.load(x + (pid_bh * m + t) * D + offs_d, mask=offs_d < D, other=0.0)
        coords = tl.sum(b_u * token[:, None], 0)
        b_u += (token - tl.sum(b_u * coords[None, :], 1))[:, None] * coords[None, :]
    tl.store(out + start + at, b_u, mask=real)


@sequential.triton
def launch(basis: Tensor, x: Tensor) -> Tensor:
    """The Triton version of `sequential`."""
    (N, D, r), out = basis.shape, torch.empty(basis.shape, dtype=torch.float32, device=x.device)
    _sequential[(N,)](
        x.contiguous(), basis.contiguous(), out, x.shape[1], D=D, R=r, **blocks(D, r), num_warps=NUM_WARPS
    )
    return out


def blocks(D: int, r: int) -> dict[str, int]:
    return dict(BLOCK_D=triton.next_power_of_2(D), BLOCK_R=triton.next_power_of_2(r))


def orthonormalize(basis: Tensor) -> Tensor:
    """Q of the QR decomposition with diag(R) > 0: otherwise columns flip, and latents stored before change sign.

    basis [..., D, r]. On a GPU by `cholesky_qr`, as torch decomposes the matrices of a batch one by one there.
    """
    if basis.device.type != "cpu":
        return cholesky_qr(basis)
    q, r = torch.linalg.qr(basis)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]


def cholesky_qr(basis: Tensor) -> Tensor:
    """The same Q by two Cholesky decompositions of U^T U, in fp64: products of the whole batch, no sync with the host.

    The first makes the columns nearly orthonormal, the second orthonormal. What is added to the diagonal keeps both
    positive definite (shifted Cholesky QR, Fukaya et al. 2020), so that neither can fail and no error is checked for:
    columns that depend on those before them come out as anything between zero and unit length, never as NaN.
    """
    x = basis.double()
    for shift in SHIFTS:
        gram = x.mT @ x
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal += shift * diagonal.sum(-1, keepdim=True) + TINY
        factor = torch.linalg.cholesky_ex(gram).L
        x = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
    return x.to(basis.dtype)


def change_basis(latents: Tensor, old: Tensor, new: Tensor) -> None:
    """In place: latents [B, Hkv, n, r] stored under `old` become those of their reconstruction under `new`.

    Row by row, because a whole layer in fp32 is large; transposed, because the cache holds them so.
    """
    for row, turn in zip(latents.mT, new.mT @ old, strict=True):
        row.copy_(turn @ row.float())
