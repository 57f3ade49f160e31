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
from kernels.skipping_attention import BLOCK, SHORTEST, SPLIT, in_read_blocks, least_weight
from kernels.splits import blocks_of, split_count
from kernels.tiles import LOG2_E, dot, softmax_step
from kernels.tuned import tuned

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
    """`lowrank_attention` over all latents, or where held [B, 1 or Hkv, C] is True."""
    B, Hq, D = q.shape
    C, groups = k_lat.shape[2], q.reshape(B, k_lat.shape[1], -1, D).float()
    lat, full = (groups @ k_basis) @ k_lat.float().mT, groups @ k_full.float().mT  # [B, Hkv, g, C], [B, Hkv, g, F]
    full = full.masked_fill(~filled[:, None, None], float("-inf"))
    v_full = v_full.float().masked_fill(~filled[:, None, :, None], 0)  # 0 * NaN is NaN
    if held is not None:
        lat = lat.masked_fill(~held[:, :, None], float("-inf"))
        v_lat = v_lat.masked_fill(~held[..., None], 0)
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
        return _latent_space(q, k_lat, v_lat, k_basis, v_basis, held[:, None], *rest)
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


@operation(
    cpp=_serves,
    fake=lambda q, k_lat, *_: (q.new_empty(q.shape), q.new_empty(k_lat.shape[:2], dtype=torch.int64)),
)
def skipping_lowrank_attention(
    q: Tensor, k_lat: Tensor, v_lat: Tensor, k_basis: Tensor, v_basis: Tensor, stored: Tensor, k_full: Tensor,
    v_full: Tensor, filled: Tensor, length: Tensor, scale: float, shortest: int = SHORTEST,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`lowrank_attention` without the values of blocks of latents that weigh next to nothing, and the number of tokens
    whose values were read [B, Hkv] int64. length [B]: of the context; scale, shortest: as in `skipping_attention`.
    Full-rank tokens are always read."""
    read = values_read(q, k_lat, k_basis, stored, length, scale, shortest)
    y = _latent_space(q, k_lat, v_lat, k_basis, v_basis, read, k_full, v_full, filled)
    return y, read.sum(2) + filled.sum(1, keepdim=True)


def values_read(
    q: Tensor, k_lat: Tensor, k_basis: Tensor, stored: Tensor, length: Tensor, scale: float, shortest: int = SHORTEST
) -> Tensor:
    """The latents whose values `skipping_lowrank_attention` reads: bool [B, Hkv, C]."""
    held = (torch.arange(k_lat.shape[2], device=q.device) < stored[:, None])[:, None]
    logits = (q.unflatten(1, (k_lat.shape[1], -1)).float() @ k_basis) @ k_lat.float().mT * q.shape[2] ** -0.5
    logits = torch.where(held[:, :, None], logits, float("-inf"))
    return in_read_blocks(logits, length, scale, shortest) & held


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
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0)
    p_u = basis + pid_b * basis_row + pid_h * (D * R) + offs_d[:, None] * R + offs_c
    acc = dot(b_q.to(tl.float32), tl.load(p_u, mask=(offs_d[:, None] < D) & (offs_c < R), other=0.0))
    to = q_lat + (pid_bh * G + offs_g[:, None]) * R + offs_c
    tl.store(to, acc.to(q_lat.dtype.element_ty), mask=(offs_g[:, None] < G) & (offs_c < R))


@triton.jit
def _store(
    part, lse, m_i, l_i, acc, head, split, parts, first_split, S, offs_g, offs_c, G: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Normalized, what a program has seen is row `split` of part [.., parts, WIDTH] and has a weight in lse [.., S]."""
    some, l_i = l_i > 0, tl.maximum(l_i, 1e-30)
    real = (offs_g[:, None] < G) & (offs_c < WIDTH)
    tl.store(part + (head[:, None] * parts + split) * WIDTH + offs_c, acc / l_i[:, None], mask=real)
    weight = tl.where(some, m_i + tl.log2(l_i), float("-inf"))  # no token, no weight
    tl.store(lse + head * S + first_split + split, weight, mask=offs_g < G)


@triton.jit
def _attend(
    q, q_lat, k_lat, v_lat, stored, k_full, v_full, filled, part_lat, part_full, lse, read, length, scale, shortest,
    q_strides, k_strides, v_strides, H, C, F, S, S_LAT,
    G: tl.constexpr, D: tl.constexpr, R_K: tl.constexpr, R_V: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): the first S_LAT splits share the row's latents, the others its whole tokens.
    With `read`, a split has SPLIT latents, and values of blocks that weigh next to nothing are not read."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_n, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    head = pid_bh * G + offs_g
    m_i = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: a block may hold no token, and -inf less -inf is NaN
    l_i = tl.zeros([BLOCK_G], tl.float32)
    n_read = tl.full([], 0, tl.int64)
    if split < S_LAT:
        b_q = tl.load(q_lat + head[:, None] * R_K + offs_k, mask=(offs_g[:, None] < G) & (offs_k < R_K), other=0.0)
        acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        # what is split is the row's own number, not the buffer: all programs have work at any length
        many = tl.minimum(tl.load(stored + pid_b), C).to(tl.int32)
        step = tl.cdiv(tl.cdiv(many, S_LAT), BLOCK_N) * BLOCK_N
        if read is not None:
            step = SPLIT
            least = least_weight(tl.load(length + pid_b).to(tl.int32), scale, shortest)
        lo = split * step
        hi = tl.minimum(many, lo + step)
        whole = lo + tl.maximum(hi - lo, 0) // BLOCK_N * BLOCK_N
        lat_slot, lat_chan = v_strides[2], v_strides[3]  # of K, too
        # [R_K, N] and [R_V, N]
        p_k = k_lat + pid_b * k_strides[0] + pid_h * k_strides[1] + (offs_k[:, None] * lat_chan + offs_n * lat_slot)
        p_v = v_lat + pid_b * v_strides[0] + pid_h * v_strides[1] + (offs_v[:, None] * lat_chan + offs_n * lat_slot)
        for first in range(lo, whole, BLOCK_N):  # all of it is stored: no mask along the tokens narrows the loads
            b_k = tl.load(p_k + first * lat_slot, mask=offs_k[:, None] < R_K, other=0.0)
            if read is None:
                b_v = tl.load(p_v + first * lat_slot, mask=offs_v[:, None] < R_V, other=0.0)
                m_i, l_i, acc = softmax_step(dot(b_q, b_k) * SCALE, offs_n >= 0, tl.trans(b_v), m_i, l_i, acc)
            else:
                logits = dot(b_q, b_k) * SCALE
                if tl.max(((tl.max(logits, 1) - m_i >= least) & (offs_g < G)).to(tl.int32), 0) > 0:
                    b_v = tl.load(p_v + first * lat_slot, mask=offs_v[:, None] < R_V, other=0.0)
                    m_i, l_i, acc = softmax_step(logits, offs_n >= 0, tl.trans(b_v), m_i, l_i, acc)
                    n_read += BLOCK_N
        # The rest, less than a block: other slots of the buffer are read with it, which keeps the loads wide, but count
        # for nothing, NaN or not. Its addresses are not to take registers of the loop above.
        for first in tl.range(whole, hi, BLOCK_N, num_stages=1, disable_licm=True):
            inside, there = first + offs_n < hi, first + offs_n < C
            b_k = tl.load(p_k + first * lat_slot, mask=(offs_k[:, None] < R_K) & there, other=0.0)
            logits = dot(b_q, b_k) * SCALE
            weighs = True
            if read is not None:
                most = tl.max(tl.where(inside[None, :], logits, float("-inf")), 1)
                weighs = tl.max(((most - m_i >= least) & (offs_g < G)).to(tl.int32), 0) > 0
            if weighs:
                b_v = tl.load(p_v + first * lat_slot, mask=(offs_v[:, None] < R_V) & there, other=0.0)
                b_v = tl.where(inside, b_v, 0.0)
                m_i, l_i, acc = softmax_step(logits, inside, tl.trans(b_v), m_i, l_i, acc)
                n_read += tl.minimum(hi - first, BLOCK_N)
        _store(part_lat, lse, m_i, l_i, acc, head, split, S_LAT, 0, S, offs_g, offs_v, G, R_V)
    else:
        p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
        b_q_full = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0).to(k_full.dtype.element_ty)
        acc_full = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        step = tl.cdiv(tl.cdiv(F, S - S_LAT), BLOCK_N) * BLOCK_N
        lo = (split - S_LAT) * step
        hi = tl.minimum(F, lo + step)
        k_full += pid_bh * F * D
        v_full += pid_bh * F * D
        for first in tl.range(lo, hi, BLOCK_N, disable_licm=True):  # as above
            slot = first + offs_n
            held = tl.load(filled + pid_b * F + slot, mask=slot < hi, other=0) != 0
            at, real = slot[:, None] * D + offs_d, held[:, None] & (offs_d < D)
            b_k, b_v = tl.load(k_full + at, mask=real, other=0.0), tl.load(v_full + at, mask=real, other=0.0)
            m_i, l_i, acc_full = softmax_step(dot(b_q_full, tl.trans(b_k)) * SCALE, held, b_v, m_i, l_i, acc_full)
            n_read += tl.sum(held.to(tl.int32), 0)
        _store(part_full, lse, m_i, l_i, acc_full, head, split - S_LAT, S - S_LAT, S_LAT, S, offs_g, offs_d, G, D)
    if read is not None:
        tl.store(read + pid_bh * S + split, n_read)


@triton.jit
def _expand(
    part_lat, part_full, lse, basis, out, basis_row, Hq, H, S, S_LAT, D: tl.constexpr, R: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row and query head, block of channels): the parts by their weights, latent ones through the basis."""
    row = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = row // Hq, row % Hq // (Hq // H)
    offs_s, offs_f, offs_r = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_R)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # everything that is read is asked for before any of it is used
    b_u = basis + pid_b * basis_row + pid_h * (D * R) + offs_d[:, None] * R + offs_r
    b_u = tl.load(b_u, mask=(offs_d[:, None] < D) & (offs_r < R), other=0.0)
    latent = tl.load(
        part_lat + (row * S_LAT + offs_s[:, None]) * R + offs_r,
        mask=(offs_s[:, None] < S_LAT) & (offs_r < R),
        other=0.0,
    )
    full = part_full + (row * (S - S_LAT) + offs_f[:, None]) * D + offs_d
    full = tl.load(full, mask=(offs_f[:, None] < S - S_LAT) & (offs_d < D), other=0.0)
    w_lat = tl.load(lse + row * S + offs_s, mask=offs_s < S_LAT, other=float("-inf"))
    w_full = tl.load(lse + row * S + S_LAT + offs_f, mask=offs_f < S - S_LAT, other=float("-inf"))
    m_i = tl.maximum(tl.maximum(tl.max(w_lat), tl.max(w_full)), -1e30)
    w_lat, w_full = tl.exp2(w_lat - m_i), tl.exp2(w_full - m_i)
    latent = tl.sum(latent * w_lat[:, None], 0)
    acc = tl.sum(b_u * latent[None, :], 1) + tl.sum(full * w_full[:, None], 0)
    acc /= tl.maximum(tl.sum(w_lat) + tl.sum(w_full), 1e-30)
    tl.store(out + row * D + offs_d, acc.to(out.dtype.element_ty), mask=offs_d < D)


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
    return parts, max(1, min(round(parts * F * D / max(1, C * r)), triton.cdiv(F, block)))


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
    skips: tuple[Tensor, Tensor, float, int] | None = None,
) -> Tensor:
    """The Triton version of `lowrank_attention`; tests give block (a power of two >= 16) and splits. skips: `read`,
    [B, Hkv, splits], which is filled, and length, scale and shortest of `skipping_lowrank_attention`."""
    B, Hq, D = q.shape
    (H, C, r_k), r_v = k_lat.shape[1:], v_lat.shape[3]
    F = k_full.shape[2]
    assert q.stride(2) == 1 and k_lat.stride()[2:] == v_lat.stride()[2:], "latents of K and V lie alike in a head"
    assert all(x.is_contiguous() for x in (k_basis, v_basis, k_full, v_full)), "bases and full-rank tokens: rows of D"
    options = tuned("_attend", BLOCK_N=block or block_size(D, max(r_k, r_v), k_lat.element_size()),
                    num_warps=NUM_WARPS, num_stages=NUM_STAGES)  # fmt: skip
    block = options["BLOCK_N"]
    if skips:
        block = options["BLOCK_N"] = BLOCK
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
        q, k_basis, q_lat, q.stride(), k_basis_row, H,
        **sizes, R=r_k, BLOCK_C=FOLD_R, **tuned("_fold", num_warps=4, num_stages=1),
    )  # fmt: skip
    _attend[(B * H, S)](
        q, q_lat, k_lat, v_lat, stored.contiguous(), k_full, v_full, filled.contiguous(), part_lat, part_full, lse,
        *(skips or (None, None, 0.0, 1)), q.stride(), k_lat.stride(), v_lat.stride(), H, C, F, S, s_lat,
        **sizes, R_K=r_k, R_V=r_v, BLOCK_K=R_K, BLOCK_V=R_V, SPLIT=SPLIT, **options,
    )  # fmt: skip
    _expand[(B * Hq, triton.cdiv(D, EXPAND_D))](
        part_lat, part_full, lse, v_basis, out, v_basis_row, Hq, H, S, s_lat, D=D, R=r_v,
        BLOCK_S=triton.next_power_of_2(s_lat), BLOCK_F=triton.next_power_of_2(s_full), BLOCK_R=R_V, BLOCK_D=EXPAND_D,
        **tuned("_expand", num_warps=expand_warps(s_lat), num_stages=1),
    )  # fmt: skip
    return out


@skipping_lowrank_attention.triton
def launch_skipping(
    q: Tensor, k_lat: Tensor, v_lat: Tensor, k_basis: Tensor, v_basis: Tensor, stored: Tensor, k_full: Tensor,
    v_full: Tensor, filled: Tensor, length: Tensor, scale: float, shortest: int = SHORTEST,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton version of `skipping_lowrank_attention`."""
    splits = triton.cdiv(k_lat.shape[2], SPLIT), triton.cdiv(k_full.shape[2], 2 * BLOCK)
    read = stored.new_empty(*k_lat.shape[:2], sum(splits))
    given = (q, k_lat, v_lat, k_basis, v_basis, stored, k_full, v_full, filled)
    y = launch(*given, splits=splits, skips=(read, length.contiguous(), scale, shortest))
    return y, read.sum(2)
