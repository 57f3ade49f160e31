"""Low-rank keys and values: projection, and attention over latents (OjaKV). kernels/oja.py updates the bases.

A basis is [B or 1, Hkv, D, r] in fp32, orthonormal columns: one per row and KV head, or shared by all rows (1).
Latents [B, Hkv, n, r] are the coordinates of tokens [B, Hkv, n, D] in it, in the cache's dtype. Keys and values have
ranks of their own, r_k and r_v.

The Triton kernels attend in the latent space, whatever `latent` says: the two forms are equal (App. A.3), and this one
reads r_k + r_v elements per token and never forms its D channels. There are three launches, so that the bases are read
once per head and not once for every part of its tokens: `_fold` projects the queries onto the key basis, `_attend`
splits latents and full-rank tokens over programs, and `_expand` adds up the parts, latents through the value basis.

A rank is seldom a multiple of 8 (77 of 128), and rows of 77 bf16 begin at any even address: a thread could read only 2
bytes at once. So the cache lays latents out with tokens side by side, [B, Hkv, r, C], and hands out the transposed
view: 16 bytes of a thread are 8 tokens of one coordinate, for any r and with nothing stored beside the r coordinates of
the paper; the number of slots C must be a multiple of SLOTS. The kernels take either layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton, version_for
from kernels.dense_attention import masked_attention
from kernels.op import operation, whole_vectors
from kernels.splits import blocks_of, split_count
from kernels.tiles import LOG2_E, dot, softmax_step

SLOTS = 16  # Triton reads 16 bytes at once where a stride is a multiple of 16


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Tokens [B, Hkv, n, D] -> latents [B, Hkv, n, r] in the dtype of the tokens."""
    return (x.float() @ basis).to(x.dtype)


def reconstruct(latents: Tensor, basis: Tensor) -> Tensor:
    """The inverse of `project`, but for what lies outside the basis: [B, Hkv, n, r] -> [B, Hkv, n, D]."""
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
    latent: bool = True,
) -> Tensor:
    """One query per row over latents and full-rank tokens together. Scale 1/sqrt(D), softmax in fp32.

    q [B, Hq, D]; k_lat [B, Hkv, C, r_k] and v_lat [B, Hkv, C, r_v] of which row b holds the first stored[b]; bases
    [B or 1, Hkv, D, r_k] and [B or 1, Hkv, D, r_v]; k_full and v_full [B, Hkv, F, D] of which filled [B, F] are held
    -> [B, Hq, D]. Other slots may hold anything.
    latent: fold the key basis into the queries and expand the output with the value basis, so that the work per token
    is of widths r_k and r_v (OjaKV, Sec. 3.2). Otherwise reconstruct keys and values (Sec. 3.3). The same to rounding
    (App. A.3).
    """
    if latent or version_for(q.device, q.dtype) == "triton":
        return _lowrank_attention(q, k_lat, v_lat, k_basis, v_basis, stored, k_full, v_full, filled)
    keys = torch.cat((reconstruct(k_lat, k_basis), k_full), 2)
    values = torch.cat((reconstruct(v_lat, v_basis), v_full), 2)
    held = torch.cat((torch.arange(k_lat.shape[2], device=q.device) < stored[:, None], filled), 1)
    return masked_attention(q, keys, values, held[:, None])


def _latent_space(
    q: Tensor,
    k_lat: Tensor,
    v_lat: Tensor,
    k_basis: Tensor,
    v_basis: Tensor,
    held: Tensor | None,
    k_full: Tensor,
    v_full: Tensor,
    filled: Tensor,
) -> Tensor:
    """`lowrank_attention` over all latents, or where held [B, C] is True."""
    B, Hq, D = q.shape
    C, groups = k_lat.shape[2], q.reshape(B, k_lat.shape[1], -1, D).float()
    lat, full = (groups @ k_basis) @ k_lat.float().mT, groups @ k_full.float().mT  # [B, Hkv, g, C], [B, Hkv, g, F]
    full = full.masked_fill(~filled[:, None, None], float("-inf"))
    v_full = v_full.float().masked_fill(~filled[:, None, :, None], 0)  # 0 * NaN is NaN
    if held is not None:
        lat = lat.masked_fill(~held[:, None, None], float("-inf"))
        v_lat = v_lat.masked_fill(~held[:, None, :, None], 0)
    p = (torch.cat((lat, full), -1) * D**-0.5).softmax(-1)
    y = (p[..., :C] @ v_lat.float()) @ v_basis.mT + p[..., C:] @ v_full
    return y.to(q.dtype).view(B, Hq, D)


def _serves(q: Tensor, k_lat: Tensor, v_lat: Tensor, *rest: object) -> bool:
    """Latents lie coordinate by coordinate in memory."""
    return whole_vectors(q) and k_lat.stride(2) == v_lat.stride(2) == 1


@operation(cpp=_serves, opaque=True)
def _lowrank_attention(
    q: Tensor, k_lat: Tensor, v_lat: Tensor, k_basis: Tensor, v_basis: Tensor, stored: Tensor, k_full: Tensor,
    v_full: Tensor, filled: Tensor,
) -> Tensor:  # fmt: skip
    """On a CPU it reads stored latents only: all rows in one call if they have equally many, otherwise row by row."""
    rest = k_full, v_full, filled
    if q.device.type != "cpu":  # no length may reach the host
        held = torch.arange(k_lat.shape[2], device=q.device) < stored[:, None]
        return _latent_space(q, k_lat, v_lat, k_basis, v_basis, held, *rest)
    counts = stored.tolist()
    if len(set(counts)) == 1:
        n = counts[0]
        return _latent_space(q, k_lat[:, :, :n], v_lat[:, :, :n], k_basis, v_basis, None, *rest)
    out = []
    for b, n in enumerate(counts):
        k_turn, v_turn = (x if len(x) == 1 else x[b : b + 1] for x in (k_basis, v_basis))
        k, v, row = k_lat[b : b + 1, :, :n], v_lat[b : b + 1, :, :n], slice(b, b + 1)
        out.append(_latent_space(q[row], k, v, k_turn, v_turn, None, *(x[row] for x in rest)))
    return torch.cat(out)


# ---- Triton ----

TILE_BYTES = 16384  # bytes of K or V in a block: three stages take 64 to 96 KB a program, and two programs fit
NUM_WARPS, NUM_STAGES = 4, 3
FOLD_R = 32  # coordinates of a program of `_fold`
EXPAND_D = 32  # channels of a program of `_expand`


@triton.jit
def _fold(
    q, basis, q_lat, q_strides, basis_row, H,
    G: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, block of coordinates): the group's queries in the key basis, q_lat [B, Hq, R]."""
    group = tl.program_id(0).to(tl.int64)
    b, h = group // H, group % H
    g, d, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    query = q + b * q_strides[0] + (h * G + g[:, None]) * q_strides[1] + d
    x = tl.load(query, mask=(g[:, None] < G) & (d < D), other=0.0)
    u = basis + b * basis_row + h * (D * R) + d[:, None] * R + c
    y = dot(x.to(tl.float32), tl.load(u, mask=(d[:, None] < D) & (c < R), other=0.0))
    to = q_lat + (group * G + g[:, None]) * R + c
    tl.store(to, y.to(q_lat.dtype.element_ty), mask=(g[:, None] < G) & (c < R))


@triton.jit
def _store(
    part, lse, top, total, y, head, split, parts, first_split, S, g, c, G: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Normalized, what a program has seen is row `split` of part [.., parts, WIDTH] and has a weight in lse [.., S]."""
    some, total = total > 0, tl.maximum(total, 1e-30)
    real = (g[:, None] < G) & (c < WIDTH)
    tl.store(part + (head[:, None] * parts + split) * WIDTH + c, y / total[:, None], mask=real)
    weight = tl.where(some, top + tl.log2(total), float("-inf"))  # no token, no weight
    tl.store(lse + head * S + first_split + split, weight, mask=g < G)


@triton.jit
def _attend(
    q, q_lat, k_lat, v_lat, stored, k_full, v_full, filled, part_lat, part_full, lse,
    q_strides, k_strides, v_strides, H, C, F, S, S_LAT,
    G: tl.constexpr, D: tl.constexpr, R_K: tl.constexpr, R_V: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): the first S_LAT splits share the row's latents, the others its whole tokens."""
    group, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = group // H, group % H
    g, n, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    c, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    head = group * G + g
    top = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: a block may hold no token, and -inf less -inf is NaN
    total = tl.zeros([BLOCK_G], tl.float32)
    if split < S_LAT:
        x = tl.load(q_lat + head[:, None] * R_K + c, mask=(g[:, None] < G) & (c < R_K), other=0.0)
        y = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        # what is split is the row's own number, not the buffer: all programs have work at any length
        many = tl.minimum(tl.load(stored + b), C).to(tl.int32)
        step = tl.cdiv(tl.cdiv(many, S_LAT), BLOCK_N) * BLOCK_N
        lo = split * step
        hi = tl.minimum(many, lo + step)
        whole = lo + tl.maximum(hi - lo, 0) // BLOCK_N * BLOCK_N
        lat_slot, lat_chan = v_strides[2], v_strides[3]  # of K, too
        k_at = k_lat + b * k_strides[0] + h * k_strides[1] + (c[:, None] * lat_chan + n * lat_slot)  # [R_K, N]
        v_at = v_lat + b * v_strides[0] + h * v_strides[1] + (e[:, None] * lat_chan + n * lat_slot)  # [R_V, N]
        for first in range(lo, whole, BLOCK_N):  # all of it is stored: no mask along the tokens narrows the loads
            keys = tl.load(k_at + first * lat_slot, mask=c[:, None] < R_K, other=0.0)
            values = tl.load(v_at + first * lat_slot, mask=e[:, None] < R_V, other=0.0)
            top, total, y = softmax_step(dot(x, keys) * SCALE, n >= 0, tl.trans(values), top, total, y)
        # the rest, less than a block; other slots may be NaN. Its addresses are not to take registers of the loop above
        for first in tl.range(whole, hi, BLOCK_N, num_stages=1, disable_licm=True):
            inside = first + n < hi
            keys = tl.load(k_at + first * lat_slot, mask=(c[:, None] < R_K) & inside, other=0.0)
            values = tl.load(v_at + first * lat_slot, mask=(e[:, None] < R_V) & inside, other=0.0)
            top, total, y = softmax_step(dot(x, keys) * SCALE, inside, tl.trans(values), top, total, y)
        _store(part_lat, lse, top, total, y, head, split, S_LAT, 0, S, g, e, G, R_V)
    else:
        query = q + b * q_strides[0] + (h * G + g[:, None]) * q_strides[1] + d
        x = tl.load(query, mask=(g[:, None] < G) & (d < D), other=0.0).to(k_full.dtype.element_ty)
        y = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        step = tl.cdiv(tl.cdiv(F, S - S_LAT), BLOCK_N) * BLOCK_N
        lo = (split - S_LAT) * step
        hi = tl.minimum(F, lo + step)
        k_full += group * F * D
        v_full += group * F * D
        for first in tl.range(lo, hi, BLOCK_N, disable_licm=True):  # as above
            slot = first + n
            held = tl.load(filled + b * F + slot, mask=slot < hi, other=0) != 0
            at, real = slot[:, None] * D + d, held[:, None] & (d < D)
            keys, values = tl.load(k_full + at, mask=real, other=0.0), tl.load(v_full + at, mask=real, other=0.0)
            top, total, y = softmax_step(dot(x, tl.trans(keys)) * SCALE, held, values, top, total, y)
        _store(part_full, lse, top, total, y, head, split - S_LAT, S - S_LAT, S_LAT, S, g, d, G, D)


@triton.jit
def _expand(
    part_lat, part_full, lse, basis, out, basis_row, Hq, H, S, S_LAT, D: tl.constexpr, R: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row and query head, block of channels): the parts by their weights, latent ones through the basis."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // Hq, row % Hq // (Hq // H)
    s, f, c = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # everything that is read is asked for before any of it is used
    u = basis + b * basis_row + h * (D * R) + d[:, None] * R + c
    u = tl.load(u, mask=(d[:, None] < D) & (c < R), other=0.0)
    latent = tl.load(part_lat + (row * S_LAT + s[:, None]) * R + c, mask=(s[:, None] < S_LAT) & (c < R), other=0.0)
    full = part_full + (row * (S - S_LAT) + f[:, None]) * D + d
    full = tl.load(full, mask=(f[:, None] < S - S_LAT) & (d < D), other=0.0)
    w_lat = tl.load(lse + row * S + s, mask=s < S_LAT, other=float("-inf"))
    w_full = tl.load(lse + row * S + S_LAT + f, mask=f < S - S_LAT, other=float("-inf"))
    top = tl.maximum(tl.maximum(tl.max(w_lat), tl.max(w_full)), -1e30)
    w_lat, w_full = tl.exp2(w_lat - top), tl.exp2(w_full - top)
    latent = tl.sum(latent * w_lat[:, None], 0)
    y = tl.sum(u * latent[None, :], 1) + tl.sum(full * w_full[:, None], 0)
    y /= tl.maximum(tl.sum(w_lat) + tl.sum(w_full), 1e-30)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=d < D)


def block_size(D: int, r: int, itemsize: int) -> int:
    """Tokens per block: tiles of TILE_BYTES at the wider of the two widths."""
    return min(128, max(16, TILE_BYTES // (triton.next_power_of_2(max(D, r, 16)) * itemsize)))


def rank_block(r: int) -> int:
    return max(16, triton.next_power_of_2(r))


def expand_warps(parts: int) -> int:
    """More warps for many parts: a thread of `_expand` holds its share of all, 64 numbers of 64 parts at rank 128."""
    return 8 if parts > 16 else 4


def split_counts(groups: int, C: int, r: float, F: int, D: int, block: int, device: torch.device) -> tuple[int, int]:
    """Parts of the latents, which fill the card, and of the full-rank tokens, at least one: all of similar bytes.

    r: the mean of both ranks.
    """
    parts = split_count(groups, C, block, device)
    return parts, max(1, min(round(parts * F * D / (C * r)), triton.cdiv(F, block)))


@_lowrank_attention.triton
def launch(
    q: Tensor,
    k_lat: Tensor,
    v_lat: Tensor,
    k_basis: Tensor,
    v_basis: Tensor,
    stored: Tensor,
    k_full: Tensor,
    v_full: Tensor,
    filled: Tensor,
    block: int | None = None,
    splits: tuple[int, int] | None = None,
) -> Tensor:
    """The Triton version of `lowrank_attention`; tests give block (a power of two >= 16) and splits."""
    B, Hq, D = q.shape
    (H, C, r_k), r_v = k_lat.shape[1:], v_lat.shape[3]
    F = k_full.shape[2]
    assert q.stride(2) == 1 and k_lat.stride()[2:] == v_lat.stride()[2:], "latents of K and V lie alike in a head"
    assert all(x.is_contiguous() for x in (k_basis, v_basis, k_full, v_full)), "bases and full-rank tokens: rows of D"
    block = block or block_size(D, max(r_k, r_v), k_lat.element_size())
    s_lat, s_full = splits or split_counts(B * H, C, (r_k + r_v) / 2, F, D, block, q.device)
    S, (R_K, R_V) = s_lat + s_full, (rank_block(r) for r in (r_k, r_v))
    k_basis_row, v_basis_row = (0 if x.shape[0] == 1 else H * D * x.shape[3] for x in (k_basis, v_basis))
    sizes = blocks_of(Hq, H, D)
    q_lat = torch.empty(B, Hq, r_k, dtype=k_lat.dtype, device=q.device)
    part_lat = torch.empty(B, Hq, s_lat, r_v, dtype=torch.float32, device=q.device)
    part_full = torch.empty(B, Hq, s_full, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, Hq, S, dtype=torch.float32, device=q.device)
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    _fold[(B * H, triton.cdiv(r_k, FOLD_R))](
        q, k_basis, q_lat, q.stride(), k_basis_row, H, **sizes, R=r_k, BLOCK_C=FOLD_R, num_warps=4, num_stages=1
    )
    _attend[(B * H, S)](
        q, q_lat, k_lat, v_lat, stored.contiguous(), k_full, v_full, filled.contiguous(), part_lat, part_full, lse,
        q.stride(), k_lat.stride(), v_lat.stride(), H, C, F, S, s_lat,
        **sizes, R_K=r_k, R_V=r_v, BLOCK_K=R_K, BLOCK_V=R_V, BLOCK_N=block, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    _expand[(B * Hq, triton.cdiv(D, EXPAND_D))](
        part_lat, part_full, lse, v_basis, out, v_basis_row, Hq, H, S, s_lat, D=D, R=r_v,
        BLOCK_S=triton.next_power_of_2(s_lat), BLOCK_F=triton.next_power_of_2(s_full), BLOCK_R=R_V, BLOCK_D=EXPAND_D,
        num_warps=expand_warps(s_lat), num_stages=1,
    )  # fmt: skip
    return out
