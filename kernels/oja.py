"""Bases of low-rank keys and values that follow their tokens: Oja's rule, QR, and latents in a new basis (OjaKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import nbytes, operation
from kernels.splits import score_grid
from kernels.tiles import dot
from kernels.tuned import tuned

# For rule "column": the floor of a column's energy is what this many tokens would give it if they were spread evenly
# over all D channels. Without it, the few tokens of a short prompt, or of one step, would turn columns that hold next
# to nothing of them by the full eta: on the shipped model, updates by 256 tokens one by one multiply the residual
# energy of the text behind them by 3.2, and with the floor by 0.98. Ours, not the paper's.
COLUMN_TOKENS = 32
TINY = 1e-30  # a divisor for what is all zeros
# Shares of its trace that are added to the diagonal of U^T U: above the rounding error of 256 x 256 products in fp64.
# After the first, the second decomposition has a condition number below 10 unless fp32 cannot tell columns apart.
SHIFTS = 1e-13, 1e-15
BLOCK_N, BLOCK_C, NUM_WARPS = 16, 32, 4  # `sequential` in Triton: tokens of a block, rows and columns of a tile
TURN_TILE, TURN_C = 16384, 64  # `change_basis`: bytes of latents that a program turns, coordinates at a time


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
def _tile(x, first, n, lo, width, stride, N: tl.constexpr, C: tl.constexpr):
    """Rows from `first` on, below n, and columns from lo on, below `width`: [N, C], zeros outside."""
    offs_n, offs_c = first + tl.arange(0, N), lo + tl.arange(0, C)
    return tl.load(x + offs_n[:, None] * stride + offs_c, mask=(offs_n[:, None] < n) & (offs_c < width), other=0.0)


@triton.jit
def _sequential(x, basis, coords, m, D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Program (row and KV head): its basis U [D, R], in place, by blocks of N tokens X [N, D].

    With y_t = U_t^T x_t and z_t = x_t - U_t y_t, the basis before token t is U + sum_{i<t} z_i y_i^T, so that y_t = c_t
    + sum_{i<t} (z_i . x_t) y_i, where C = X U of the basis before the block. So tokens of a block meet only in inner
    products, which X X^T and K = C C^T give, and what goes token by token is a step on numbers [N, N]: T with Y = T C;
    P = T K, whose row i has y_i . c_t; S, whose row i has z_i . x_t; and M with Z = M (X - Y U^T).
    """
    pid_bh, offs_n, offs_c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    basis += pid_bh * (D * R)
    coords += pid_bh * (BLOCK_N * R)
    x += pid_bh * m * D
    for first in range(0, m, BLOCK_N):
        k, gram = tl.zeros([BLOCK_N, BLOCK_N], tl.float32), tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
        for lo in range(0, R, BLOCK_C):
            c = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
            for d in range(0, D, BLOCK_C):
                b_x = _tile(x, first, m, d, D, D, BLOCK_N, BLOCK_C)
                c = dot(b_x, _tile(basis, d, D, lo, R, R, BLOCK_C, BLOCK_C), c)
            tl.store(coords + offs_n[:, None] * R + lo + offs_c, c, mask=lo + offs_c < R)
            k = dot(c, tl.trans(c), k)
        for d in range(0, D, BLOCK_C):
            b_x = _tile(x, first, m, d, D, D, BLOCK_N, BLOCK_C)
            gram = dot(b_x, tl.trans(b_x), gram)
        t, s, p, inverse = tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k)
        for i in range(BLOCK_N):
            here, one = offs_n[:, None] == i, (offs_n == i).to(tl.float32)
            weight = tl.sum(tl.where(offs_n[None, :] == i, s, 0.0), 1)[:, None]  # z_j . x_i of the tokens j before i
            t_i, p_i = one + tl.sum(weight * t, 0), tl.sum(tl.where(here, k, weight * p), 0)
            both = tl.sum(p * t_i[None, :], 1)[:, None]  # y_j . y_i
            s_i, m_i = tl.sum(tl.where(here, gram, -both * s), 0) - p_i, one - tl.sum(both * inverse, 0)
            t, p = tl.where(here, t_i[None, :], t), tl.where(here, p_i[None, :], p)
            s, inverse = tl.where(here, s_i[None, :], s), tl.where(here, m_i[None, :], inverse)
        turn = dot(tl.trans(t), inverse)  # U += Z^T Y = (turn (X - T C U^T))^T C
        tl.debug_barrier()  # other threads have stored coords
        for d in range(0, D, BLOCK_C):
            back = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
            for lo in range(0, R, BLOCK_C):
                b_u = _tile(basis, d, D, lo, R, R, BLOCK_C, BLOCK_C)
                back = dot(_tile(coords, 0, BLOCK_N, lo, R, R, BLOCK_N, BLOCK_C), tl.trans(b_u), back)
            z = tl.trans(dot(turn, _tile(x, first, m, d, D, D, BLOCK_N, BLOCK_C) - dot(t, back)))
            for lo in range(0, R, BLOCK_C):
                b_u = _tile(basis, d, D, lo, R, R, BLOCK_C, BLOCK_C)
                b_u = dot(z, _tile(coords, 0, BLOCK_N, lo, R, R, BLOCK_N, BLOCK_C), b_u)
                to = basis + (d + offs_c[:, None]) * R + lo + offs_c
                tl.store(to, b_u, mask=(d + offs_c[:, None] < D) & (lo + offs_c < R))
        tl.debug_barrier()


@sequential.triton
def launch(basis: Tensor, x: Tensor) -> Tensor:
    """The Triton version of `sequential`."""
    (N, D, r), out = basis.shape, basis.clone(memory_format=torch.contiguous_format)
    coords = torch.empty(N, BLOCK_N, r, dtype=torch.float32, device=x.device)
    _sequential[(N,)](
        x.contiguous(), out, coords, x.shape[1], D=D, R=r, BLOCK_N=BLOCK_N,
        **tuned("_sequential", BLOCK_C=BLOCK_C, num_warps=NUM_WARPS, num_stages=1),
    )  # fmt: skip
    return out


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


def change_basis(latents: Tensor, old: Tensor, new: Tensor, stored: Tensor) -> None:
    """In place: the first stored[b] latents of a row of [B, Hkv, n, r], coordinates in `old`, become those of their
    reconstruction in `new`; both bases [B, Hkv, D, r] fp32. Other slots may hold anything, before and after."""
    _change_basis(latents, new.mT @ old, stored)


@operation(mutates=("latents",), reads=lambda latents, *_: dict(latents=nbytes(latents)), opaque=True)
def _change_basis(latents: Tensor, turn: Tensor, stored: Tensor) -> None:
    """turn [B, Hkv, r, r]. Row by row, because a whole layer in fp32 is large; transposed, as the cache holds them."""
    for row, by, n in zip(latents.mT, turn, stored.tolist(), strict=True):
        row[..., :n] = by @ row[..., :n].float()


@triton.jit
def _change_basis_kernel(
    latents, turn, stored, strides, H, C, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and KV head): every so many blocks of N tokens, by C coordinates at a time.

    `turn` in 16 bits would round the latents anew each time; as a sum of two such numbers it keeps 16 bits of each.
    """
    pid_bh = tl.program_id(1).to(tl.int64)
    many = tl.minimum(tl.load(stored + pid_bh // H), C).to(tl.int32)
    offs_r, offs_c, offs_n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    latents += pid_bh // H * strides[0] + pid_bh % H * strides[1]
    turn += pid_bh * (R * R)
    for first in range(tl.program_id(0) * BLOCK_N, many, tl.num_programs(0) * BLOCK_N):
        # up to the end of the buffer, which keeps loads and stores wide
        at, there = latents + (first + offs_n).to(tl.int64) * strides[2], first + offs_n < C
        b_x = tl.load(at + offs_r[:, None] * strides[3], mask=(offs_r[:, None] < R) & there, other=0.0)
        tl.debug_barrier()  # all is read before any thread writes
        for lo in range(0, R, BLOCK_C):
            to = lo + offs_c[:, None]
            b_t = tl.load(turn + to * R + offs_r, mask=(to < R) & (offs_r < R), other=0.0)
            high = b_t.to(b_x.dtype)
            acc = dot(high, b_x)
            if b_x.dtype != tl.float32:
                acc = dot((b_t - high.to(tl.float32)).to(b_x.dtype), b_x, acc)
            tl.store(at + to * strides[3], acc.to(b_x.dtype), mask=(to < R) & there)


@_change_basis.triton
def _(latents: Tensor, turn: Tensor, stored: Tensor) -> None:
    B, H, C, r = latents.shape
    block = max(16, triton.next_power_of_2(r))
    tokens = max(16, TURN_TILE // (block * latents.element_size()))
    options = tuned("_change_basis_kernel", BLOCK_N=tokens, BLOCK_C=TURN_C, num_warps=NUM_WARPS, num_stages=1)
    _change_basis_kernel[score_grid(B * H, C, options["BLOCK_N"], latents.device)](
        latents, turn.contiguous(), stored.contiguous(), latents.stride(), H, C,
        R=r, BLOCK_R=block, **options,
    )  # fmt: skip
