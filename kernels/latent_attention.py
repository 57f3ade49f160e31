"""Attention over tokens whose keys lie in a latent space: expanded, rotated at their own positions, attended to.

Because of the rotation, the query cannot be folded into the basis: (R_t K_t) . q = latent_t . (U^T R_t^T q), and
R_t^T q differs for every token t. Folding it would cost 2 r D operations per token and query head; expanding the key
costs them once per token and KV head, and on tensor cores. So keys are expanded, but only into registers: a rotation in
halves (x1, x2) pairs channels c and c + D / 2, and the product of a tile of latents with a head's columns of the basis
leaves both channels of a pair in registers of one thread. Nothing moves between threads before the logits' product.

What bounds it: K tokens of r coordinates cost 2 K r D operations per row and KV head, while device memory gives
K (2 r + bytes of the values) per row, once for all heads. At Llama-3.1-8B's shapes (8 KV heads, D = 128), sals-25
(r = 256, 4 bits) and K = 4096 chosen of 32K, that is 2.1 GFLOP and 4.7 MB a row: 455 operations a byte, where an H100
balances at 295 (989 TFLOP/s, 3.35 TB/s). Llama-2-7B (32 heads, r = 1024), 512 of 4K: 4.3 GFLOP and 2.4 MB, 1820 a byte.
Unlike other decode attention this is a matrix product followed by a softmax, and is tiled as one. A program reads, for
N tokens and one head, N r latents and r D numbers of the basis, both out of L2, where the latents stay for all heads
and the basis for all rows: 2 r (N + D) bytes for 2 N r D operations. N = D = 128 are 64 operations a byte: if L2 gives
5.5 TB/s, 350 of the 989 TFLOP/s. So L2 is the limit (the kernel report counts its bytes); N = 64 would reach 43 a byte,
N = 256 or two heads per program 85, with twice the accumulators. Angles come from the table by position, 2 D bytes of
fp16 per token and head: at r = 128 as much as the latents.

128 x 128 accumulators are 64 per thread in 8 warps; rotation, prefetched data and the values' tile bring this to some
230 registers: one program per multiprocessor on an H100, which waits for the indices, for both parts of the latents and
for the angles of every tile, one after the other.

Where a head's columns of the basis fit into shared memory (KEPT: r = 128 and 256, sals-12.5 and -25 of Llama-3.1-8B),
they are read once a program, all loads of a tile are issued together, and indices a tile before that. Tiles have 64
tokens: at r = 128 in 4 warps, 232 to 254 registers and 105 to 110 KB, so that another program computes meanwhile; at
r = 256 in 8 warps, 233 to 255 registers and 173 to 177 KB, one program. A token and head then take 2 r + 2 D +
D bits / 8 bytes of L2 and the scales: 560 instead of 816, and 848 instead of 1360.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.backend import HIP, tl, triton
from kernels.dense_attention import masked_attention
from kernels.latent import LatentTokens, latent_tokens, read_tokens
from kernels.native import VECTOR
from kernels.op import operation, picked
from kernels.quantize import WORDS
from kernels.rope import apply_rope
from kernels.splits import blocks_of, combine, multiprocessors, parts_of, split_count
from kernels.tiles import LOG2_E, dot, halves, rotated_logits, scale_zero, unpack_tile, unpack_units
from kernels.tuned import tuned

MAX_BLOCK = 128  # tokens of a tile
# coordinates of a tile of latents (N x 32) or of the basis (32 x D): 16 KB both, four stages; 64 spill below cc 9
BLOCK_R = 32
NUM_STAGES = 4
KEPT = 65536  # bytes of a head's columns of the basis, at most, that a program keeps in shared memory
SHARED = 32768  # the most of which two programs share a multiprocessor


def latent_attention(
    q: Tensor,
    basis: Tensor,
    ring: LatentTokens,
    store: LatentTokens,
    pos: Tensor,
    idx: Tensor | None,
    count: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    recent: int,
) -> Tensor:
    """Softmax attention over the newest tokens and the first `count` slots idx of the store. Scale 1/sqrt(D).

    q [B, Hq, D] rotated; basis [>= r, n*D] with the basis vectors in rows, of which latents of r coordinates use the
    first r; pos [B] of the newest token: it and those before it, `recent` in all, are in the ring of R >= recent slots,
    slot = position mod R, and all older ones in the store, slot = position. idx [B, 1, K] int64, count [B, 1], entries
    past the count point anywhere; None: all older ones. cos and sin, [1 or >= B, T, D/2] fp32, tables by position ->
    [B, Hq, D].
    """
    lead, rest = store.latents
    return _latent_attention(
        q, basis, ring.latents[0], *ring.coded(), lead, rest, *store.coded(), pos, idx, count, cos, sin,
        ring.bits, store.bits, recent,
    )  # fmt: skip


def _reads(q: Tensor, *args: Any) -> dict[str, int]:
    names, idx = ("lead", "rest", "v", "params"), args[9]
    return {} if idx is None else {name: picked(idx, x, 1) for name, x in zip(names, args[4:8], strict=True)}


@operation(
    cpp=lambda q, *_: q.shape[2] // 2 % VECTOR == 0,  # halves are rotated
    reads=_reads,
)
def _latent_attention(
    q: Tensor, basis: Tensor, ring_k: Tensor, ring_v: Tensor, ring_params: Tensor | None, lead: Tensor, rest: Tensor,
    v: Tensor, params: Tensor | None, pos: Tensor, idx: Tensor | None, count: Tensor | None, cos: Tensor, sin: Tensor,
    ring_bits: int, bits: int, recent: int,
) -> Tensor:  # fmt: skip
    n = basis.shape[1]
    ring, store = latent_tokens((ring_k,), ring_v, ring_params, n), latent_tokens((lead, rest), v, params, n)
    k, values, _, mask = expand_tokens(basis, ring, store, pos, idx, count, cos, sin, recent, q.shape[2])
    return masked_attention(q, k, values, mask[:, None])


def expand_tokens(
    basis: Tensor,
    ring: LatentTokens,
    store: LatentTokens,
    pos: Tensor,
    idx: Tensor | None,
    count: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    recent: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens of `latent_attention`, expanded: rotated keys and values [B, n, N, D], their positions [B, N], and
    which of them exist, bool [B, N]."""
    B = len(pos)
    R, row = ring.latents[0].shape[1], torch.arange(B, device=pos.device)[:, None]
    newest = pos[:, None] - torch.arange(recent, device=pos.device)
    if idx is None or count is None:  # the last slots of a store, `recent` of them, never hold anything
        idx = torch.arange(store.latents[0].shape[1] - recent, device=pos.device).expand(B, -1)
        count = (pos + 1 - recent)[:, None]
    else:
        idx = idx[:, 0]
    keys, values = [], []
    for tokens, slot in ((ring, newest % R), (store, idx)):
        latents, v = read_tokens(tokens, slot)
        keys.append(latents @ basis[: latents.shape[2]])
        values.append(v.to(basis.dtype))
    k, v = (torch.cat(x, 1).unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (keys, values))
    at = torch.cat((newest.clamp(min=0), idx), 1)
    table = (cos[0][at], sin[0][at]) if len(cos) == 1 else (cos[row, at], sin[row, at])
    chosen = torch.arange(idx.shape[1], device=pos.device) < count
    return apply_rope(k, *(x[:, None] for x in table)), v, at, torch.cat((newest >= 0, chosen), 1)


# ---- Triton ----


@triton.jit
def _expand(
    b_k, latents, row, inside, basis, rank, first: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add to the keys b_k [N, BLOCK_D] of a head what R coordinates from `first` on give, in rows `row` [N] of
    `latents`. A half of the channels is a half of the columns. rank is R, but not known to the compiler, which else
    would unroll a loop of 8 steps and spill the addresses of all."""
    offs_r, offs_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    channel = offs_c // (BLOCK_D // 2) * (D // 2) + offs_c % (BLOCK_D // 2)
    real = offs_c % (BLOCK_D // 2) < D // 2
    for lo in range(0, rank, BLOCK_R):
        part = tl.load(latents + row[:, None] * R + lo + offs_r, mask=inside[:, None] & (lo + offs_r < R), other=0.0)
        at = basis + (first + lo + offs_r)[:, None] * WIDTH + channel
        b_k = dot(part, tl.load(at, mask=(lo + offs_r[:, None] < R) & real, other=0.0), b_k)
    return b_k


@triton.jit
def _columns(
    basis, first: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A head's columns of R <= BLOCK_R basis vectors, [BLOCK_R, BLOCK_D], its halves apart as in `_expand`."""
    offs_r, offs_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    channel = offs_c // (BLOCK_D // 2) * (D // 2) + offs_c % (BLOCK_D // 2)
    real = (offs_r[:, None] < R) & (offs_c % (BLOCK_D // 2) < D // 2)
    return tl.load(basis + (first + offs_r)[:, None] * WIDTH + channel, mask=real, other=0.0)


@triton.jit
def _expand_by(b_k, latents, row, inside, b_u, R: tl.constexpr):
    """`_expand` by basis vectors b_u of `_columns`."""
    offs_r = tl.arange(0, b_u.shape[0])
    part = tl.load(latents + row[:, None] * R + offs_r, mask=inside[:, None] & (offs_r < R), other=0.0)
    return dot(part, b_u, b_k)


@triton.jit
def _attend(
    q, q_head, offs_g, m_i, l_i, acc, token, slot, inside, basis, b_u0, b_u1, k, rest, v, pairs, cos, sin, pid_h,
    rank0, rank1, WIDTH: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A block of N tokens at positions `token`, in rows `slot` of k [.., R0] and rest [.., R1]: a step of the online
    softmax. Everything is by token first: b_k [N, D] and logits [N, G] stay in the registers of the product that made
    them. acc [D, G]. b_u0, b_u1: the basis by `_columns`, or None."""
    offs_d = tl.arange(0, BLOCK_D)
    # codes are loaded first, to be there when the product is done; 16 bits would take the registers it needs
    if BITS < 16:
        offs_u, offs_e = tl.arange(0, BLOCK_D // 8), tl.arange(0, BLOCK_D // 32)
        unit = slot[:, None] * (WIDTH // 8) + pid_h * (D // 8) + offs_u
        words = tl.load(v + unit, mask=inside[:, None] & (offs_u < D // 8), other=0)
        if D % 32 == 0:
            at = slot[:, None] * (WIDTH // 32) + pid_h * (D // 32) + offs_e
            both = tl.load(pairs + at, mask=inside[:, None] & (offs_e < D // 32), other=0)
        else:  # a group of 32 channels of a row may be of two heads: each 8 channels have their pair
            at = slot[:, None] * ((WIDTH + 31) // 32) + (pid_h * (D // 8) + offs_u) // 4
            both = tl.load(pairs + at, mask=inside[:, None] & (offs_u < D // 8), other=0)

    b_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if b_u0 is not None:
        b_k = _expand_by(b_k, k, slot, inside, b_u0, R0)
    else:
        b_k = _expand(b_k, k, slot, inside, basis, rank0, 0, WIDTH, R0, D, BLOCK_D, BLOCK_R)
    if b_u1 is not None:
        b_k = _expand_by(b_k, rest, slot, inside, b_u1, R1)
    elif R1 > 0:
        b_k = _expand(b_k, rest, slot, inside, basis, rank1, R0, WIDTH, R1, D, BLOCK_D, BLOCK_R)
    k1, k2 = halves(b_k)
    cos += token.to(tl.int64)[:, None] * (D // 2)
    sin += token.to(tl.int64)[:, None] * (D // 2)
    logits = tl.zeros([BLOCK_N, offs_g.shape[0]], tl.float32)
    if BLOCK_D >= 64:  # by quarters: angles take half of the registers
        k1, k3 = halves(k1)
        k2, k4 = halves(k2)
        logits = rotated_logits(k1, k2, q, q_head, cos, sin, inside, offs_g, 0, logits, G, D)
        logits = rotated_logits(k3, k4, q, q_head, cos, sin, inside, offs_g, BLOCK_D // 4, logits, G, D)
    else:
        logits = rotated_logits(k1, k2, q, q_head, cos, sin, inside, offs_g, 0, logits, G, D)
    logits = tl.where(inside[:, None], logits * (D**-0.5 * LOG2_E), float("-inf"))
    m_new = tl.maximum(m_i, tl.max(logits, 0))  # finite: a block starts with a token that is inside
    p, shrink = tl.exp2(logits - m_new[None, :]), tl.exp2(m_i - m_new)
    if BITS < 16:
        if D % 32 == 0:
            b_v = unpack_tile(words, both, None, BITS, q.dtype.element_ty)
        else:
            scale, zero = scale_zero(both)
            b_v = unpack_units(words, scale, zero, None, BITS, q.dtype.element_ty)
    else:
        b_v = tl.load(v + slot[:, None] * WIDTH + pid_h * D + offs_d, mask=inside[:, None] & (offs_d < D), other=0.0)
    acc = dot(tl.trans(b_v), p.to(b_v.dtype), acc * shrink[None, :])
    return m_new, l_i * shrink + tl.sum(p, 0), acc


@triton.jit
def _latent_attention_kernel(
    q, basis, ring_k, ring_v, ring_pairs, lead, rest, v, pairs, pos, idx, count, cos, sin, part, lse,
    q_strides, idx_row, table_row, R, recent, T, K, S, ring_rank, lead_rank, rest_rank,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, RING_RANK: tl.constexpr, LEAD: tl.constexpr, REST: tl.constexpr,
    RING_BITS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_LEAD: tl.constexpr, BLOCK_REST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): attention of the group's G query heads over its blocks of tokens. BLOCK_LEAD
    and BLOCK_REST: padded ranks of the store if its basis vectors are kept, else 0; AHEAD: its loop's stages."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    q += pid_b * q_strides[0] + pid_h * G * q_strides[1]

    # Blocks of the ring and then of the store are dealt out in order. A block of the ring, of more coordinates than one
    # of the store, counts as so many more.
    WEIGHT: tl.constexpr = (RING_RANK + LEAD + REST - 1) // (LEAD + REST)
    newest = tl.load(pos + pid_b).to(tl.int32)
    in_ring = tl.minimum(newest + 1, recent)
    in_store = tl.maximum(newest + 1 - recent, 0)
    if count is not None:
        in_store = tl.maximum(tl.minimum(tl.load(count + pid_b), K), 0).to(tl.int32)
    ring_blocks, store_blocks = tl.cdiv(in_ring, BLOCK_N), tl.cdiv(in_store, BLOCK_N)
    step = tl.cdiv(ring_blocks * WEIGHT + store_blocks, S)
    lo, hi = split * step, (split + 1) * step

    basis += pid_h * D
    cos += pid_b * table_row
    sin += pid_b * table_row
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
    # what does not change between blocks is computed again: hoisted out of both loops it would take 50 registers
    first, last = tl.minimum(tl.cdiv(lo, WEIGHT), ring_blocks), tl.minimum(tl.cdiv(hi, WEIGHT), ring_blocks)
    for block in tl.range(first, last, num_stages=1, disable_licm=True):
        token = newest - block * BLOCK_N - offs_n
        inside = block * BLOCK_N + offs_n < in_ring
        slot = pid_b * R + tl.where(inside, token, 0) % R
        m_i, l_i, acc = _attend(
            q, q_strides[1], offs_g, m_i, l_i, acc, token, slot, inside, basis, None, None, ring_k, ring_k, ring_v,
            ring_pairs, cos, sin, pid_h, ring_rank, 0, H * D, RING_RANK, 0, RING_BITS, G, D, BLOCK_D, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    lo, hi = tl.maximum(lo - ring_blocks * WEIGHT, 0), tl.minimum(hi - ring_blocks * WEIGHT, store_blocks)
    b_u0, b_u1 = None, None
    if BLOCK_LEAD > 0:
        b_u0 = _columns(basis, 0, H * D, LEAD, D, BLOCK_D, BLOCK_LEAD)
    if BLOCK_REST > 0:
        b_u1 = _columns(basis, LEAD, H * D, REST, D, BLOCK_D, BLOCK_REST)
    for block in tl.range(lo, hi, num_stages=AHEAD, disable_licm=BLOCK_LEAD == 0):
        token = block * BLOCK_N + offs_n
        inside = token < in_store
        if idx is not None:
            token = tl.load(idx + pid_b * idx_row + token, mask=inside, other=0).to(tl.int32)
        slot = pid_b * T + token
        m_i, l_i, acc = _attend(
            q, q_strides[1], offs_g, m_i, l_i, acc, token, slot, inside, basis, b_u0, b_u1, lead, rest, v, pairs,
            cos, sin, pid_h, lead_rank, rest_rank, H * D, LEAD, REST, BITS, G, D, BLOCK_D, BLOCK_N, BLOCK_R,
        )  # fmt: skip

    l_i = tl.maximum(l_i, 1e-30)  # a program without tokens writes zeros and -inf
    offs_d, at = tl.arange(0, BLOCK_D), (pid_bh * G + offs_g) * S + split
    acc = (acc / l_i[None, :]).to(part.dtype.element_ty)
    tl.store(part + at[None, :] * D + offs_d[:, None], acc, mask=(offs_g < G) & (offs_d[:, None] < D))
    if lse is not None:
        tl.store(lse + at, m_i + tl.log2(l_i), mask=offs_g < G)


def _config(G: int, D: int, lead: int, block: int, itemsize: int, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options for tiles of `block` tokens."""
    tile, block_r = blocks_of(G, 1, D, 32), BLOCK_R * 2 // itemsize
    # a product of one step would not be pipelined
    constants = tile | dict(BLOCK_N=block, BLOCK_R=block_r if lead > block_r else max(16, block_r // 2))
    many = block * tile["BLOCK_D"] * (2 if _large(itemsize, bits) else 1) > 8192
    return constants, dict(num_warps=8 if many else 4, num_stages=NUM_STAGES)


def _large(itemsize: int, bits: int) -> bool:
    """Whether keys or values take twice the registers, so that a tile must have half the tokens."""
    return itemsize == 4 or bits == 16


def _kept(
    D: int, lead: int, rest: int, itemsize: int, bits: int, chosen: bool, device: torch.device
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of a store whose basis vectors a program keeps, or does not: before Hopper, shared memory
    is too small for two such programs."""
    padded = [max(16, triton.next_power_of_2(r)) if r else 0 for r in (lead, rest)]
    small = HIP or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0))
    held = sum(padded) * max(32, triton.next_power_of_2(D)) * itemsize
    if small or _large(itemsize, bits) or held > KEPT:
        return dict(BLOCK_LEAD=0, BLOCK_REST=0, AHEAD=1), {}
    ahead = 3 if chosen else 2  # indices, then all else
    constants = dict(BLOCK_LEAD=padded[0], BLOCK_REST=padded[1], AHEAD=ahead)
    return constants, dict(num_warps=4 if held <= SHARED else 8)


def block_size(
    programs: int, n: int, D: int, itemsize: int, bits: int, device: torch.device, kept: bool = False
) -> int:
    """Tokens of a tile: MAX_BLOCK, fewer for wide heads, where that many would leave multiprocessors idle, and for two
    programs with a kept basis to share a multiprocessor's memory."""
    block = MAX_BLOCK // (2 if kept or _large(itemsize, bits) else 1)
    block = max(32, min(block, block * 128 // triton.next_power_of_2(D)))
    while block > 32 and programs * triton.cdiv(n, block) < multiprocessors(device):
        block //= 2
    return block


@_latent_attention.triton
def _launch(
    q: Tensor, basis: Tensor,
    ring_k: Tensor, ring_v: Tensor, ring_params: Tensor | None,
    lead: Tensor, rest: Tensor, v: Tensor, params: Tensor | None,
    pos: Tensor, idx: Tensor | None, count: Tensor | None, cos: Tensor, sin: Tensor,
    ring_bits: int, bits: int, recent: int,
    block: int | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """The Triton version of `latent_attention`; tests give block (a power of two >= 16) and splits."""
    (B, Hq, D), (T, R) = q.shape, (lead.shape[1], ring_k.shape[1])
    H, K = basis.shape[1] // D, T - recent if idx is None else idx.shape[2]
    tensors = (basis, ring_k, ring_v, ring_params, lead, rest, v, params)
    assert all(x is None or x.is_contiguous() for x in tensors) and q.stride(2) == 1
    assert cos.stride()[1:] == sin.stride()[1:] == (D // 2, 1), "a position's angles must be contiguous"
    ranks = dict(RING_RANK=ring_k.shape[2], LEAD=lead.shape[2], REST=rest.shape[2])
    n = K + recent * triton.cdiv(ranks["RING_RANK"], ranks["LEAD"] + ranks["REST"])
    kept, warps = _kept(D, ranks["LEAD"], ranks["REST"], q.element_size(), bits, idx is not None, q.device)
    block = block or block_size(B * H, n, D, q.element_size(), bits, q.device, kept["AHEAD"] > 1)
    constants, options = _config(Hq // H, D, ranks["LEAD"], block, q.element_size(), bits)
    tiles = {n: constants.pop(n) for n in ("BLOCK_N", "BLOCK_R")}  # what a sweep may change, with the options
    options, constants = tuned("_latent_attention_kernel", **tiles | options | warps), constants | kept
    splits = splits or split_count(B * H, n, options["BLOCK_N"], q.device)
    if ring_params is not None:
        ring_v, ring_params = ring_v.view(WORDS[ring_bits]), ring_params.view(torch.int32)
    if params is not None:
        v, params = v.view(WORDS[bits]), params.view(torch.int32)
    idx, count = (None if x is None else x.contiguous() for x in (idx, count))
    part, lse = parts_of(q, splits)
    _latent_attention_kernel[(B * H, splits)](
        q, basis, ring_k, ring_v, ring_params, lead, rest, v, params, pos.contiguous(), idx, count, cos, sin, part, lse,
        q.stride(), 0 if idx is None else idx.stride(0), 0 if len(cos) == 1 else cos.stride(0),
        R, recent, T, K, splits, *ranks.values(), H=H, **ranks, RING_BITS=ring_bits, BITS=bits, **constants, **options,
    )  # fmt: skip
    return part if lse is None else combine(part, lse, q.dtype)
