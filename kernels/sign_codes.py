"""Sign codes of Self-Indexing KVCache: 4 channels -> a 4-bit code, one codebook a head, scores by table look-up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation
from kernels.quantize import pack
from kernels.splits import empty_scores, multiprocessors
from kernels.tiles import filled
from kernels.tuned import tuned

SUB = 4  # channels of a subvector (as in the paper: a codebook of 16 fits in shared memory)
TOKENS = 4096  # tokens per pass over the prompt: bounds the int64 cell indices
# For scoring: tokens read at a time; programs per multiprocessor that the tokens are split over, as many as its
# registers hold; and the most tokens of a program, for rows of very different lengths.
LUT_BLOCK, LUT_PROGRAMS, LUT_MOST = 256, 6, 4096


def sign_patterns(device: torch.device | None = None) -> Tensor:
    """[16, 4] of -1 and +1: the pattern of each code, eq. 3 (the first channel is the highest bit)."""
    bits = torch.arange(16, device=device)[:, None] >> torch.arange(SUB - 1, -1, -1, device=device) & 1
    return bits.float() * 2 - 1


def sign_codes(x: Tensor) -> Tensor:
    """Centred keys [..., D] -> codes uint8 [..., D / 4] in 0..15, eq. 2-3; zero counts as positive."""
    weights = (8 >> torch.arange(SUB, device=x.device)).to(torch.uint8)
    return ((x >= 0).unflatten(-1, (-1, SUB)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [..., G] -> bytes [..., G / 2], the even subvector in the low half."""
    return pack(codes, 4)


def codebook(x: Tensor, codes: Tensor, valid: Tensor) -> Tensor:
    """Centroids of the 16 sign cells of every subvector, eq. 4, in one pass over the tokens.

    x [B, H, S, D] centred, codes [B, H, S, D / 4], valid [B, S] bool -> fp32 [B, H, D / 4, 16, 4]. An empty cell, for
    which eq. 4 is 0 / 0, gets its sign pattern times the mean magnitude of its channels.
    """
    B, H, S, D = x.shape
    G = D // SUB
    cells = torch.zeros(B * H * G * 16, SUB + 1, device=x.device)  # sums of the four channels, and the count
    base = (torch.arange(B * H * G, device=x.device) * 16).view(B, H, 1, G)
    magnitude = torch.zeros(B, H, D, device=x.device)
    for i in range(0, S, TOKENS):
        keep = valid[:, None, i : i + TOKENS, None].float()
        part = torch.where(keep > 0, x[:, :, i : i + TOKENS].float(), 0)
        magnitude += part.abs().sum(2)
        weight = keep[..., None].expand(B, H, -1, G, 1)
        rows = torch.cat((part.unflatten(-1, (G, SUB)), weight), -1)
        cells.index_add_(0, (base + codes[:, :, i : i + TOKENS]).flatten(), rows.flatten(0, 3))
    sums, counts = cells.view(B, H, G, 16, SUB + 1).split((SUB, 1), -1)
    magnitude = (magnitude / valid.sum(1).clamp(min=1).view(B, 1, 1)).view(B, H, G, 1, SUB)
    return torch.where(counts > 0, sums / counts.clamp(min=1), sign_patterns(x.device) * magnitude)


@operation(
    cpp=True,
    fake=lambda q, book, packed, *_: empty_scores(*packed.shape[:3], device=q.device),
)
def lut_score(q: Tensor, book: Tensor, packed: Tensor, pos: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """Approximate q . k of every token by a look-up and an add per code, eq. 8; q is the mean of a group's queries.

    q [B, Hq, D], book [B, H, D / 4, 16, 4], packed codes [B, H, T, D / 8] uint8 -> fp32 [B, H, T]. pos [B], if given,
    is the last slot that matters: later ones need not be read, and their scores may be anything. skip [B, H, n] int64,
    if given, are slots that get -inf.
    """
    B, H, _, D = packed.shape
    # a byte holds two codes, so the table is one of pairs of subvectors: 256 entries, half the look-ups
    table = code_table(q, book)
    low, high = table[:, :, 0::2], table[:, :, 1::2]
    pairs = (high[..., :, None] + low[..., None, :]).view(-1, 1)  # [B * H * G / 2 * 256, 1], the last part by the byte
    # bags of D / 8 bytes: on a CPU the fastest sum of looked-up numbers that torch has
    base = torch.arange(B * H * D, dtype=torch.int32, device=q.device).view(B, H, 1, D) * 256
    scores = F.embedding_bag((packed + base).view(-1, D), pairs, mode="sum").view(packed.shape[:3])
    return scores if skip is None else scores.scatter_(2, skip, float("-inf"))


def code_table(q: Tensor, book: Tensor) -> Tensor:
    """The score of each code of each subvector: q and book as in `lut_score` -> fp32 [B, H, D / 4, 16]."""
    query = q.float().view(*book.shape[:2], -1, book.shape[2] * SUB).mean(2)
    return (book @ query.unflatten(-1, (-1, SUB))[..., None]).squeeze(-1)


@triton.jit
def _lut_score(
    q, book, codes, pos, skip, out, codes_strides, out_strides, H, T, part, n_skip,
    GROUP: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (row and head, part of the tokens): the table of the head, then its tokens, W bytes each.

    The table is taken as one long vector: a gather from that goes through shared memory, one load per code, where lanes
    read 16 neighbouring words and never collide. (Along rows of 16, Triton makes it 15 selects. A table of pairs takes
    half the loads, but of 256 words, with collisions.) In all 5 instructions a code.
    """
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    seq_len = filled(pos, pid_b, T)
    lo = tl.program_id(1) * part
    if lo >= seq_len:
        return
    hi = tl.minimum(seq_len, lo + part)
    # a byte: two codes of 16 entries
    offs_w, offs_c, offs_i = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_W * 2), tl.arange(0, 4)
    b_q = tl.zeros([BLOCK_W * 2, 4], tl.float32)
    for g in tl.static_range(GROUP):
        at = q + (pid_bh * GROUP + g) * (W * 8) + offs_c[:, None] * 4 + offs_i
        b_q += tl.load(at, mask=(offs_c < W * 2)[:, None], other=0.0).to(tl.float32)
    b_q = (b_q / GROUP)[:, None, :]
    offs_e = tl.arange(0, 16)
    at = book + pid_bh * (W * 128) + offs_c[:, None, None] * 64 + offs_e[:, None] * 4 + offs_i
    centroid = tl.load(at, mask=(offs_c < W * 2)[:, None, None], other=0.0)
    table = tl.reshape(tl.sum(centroid * b_q, 2), [BLOCK_W * 32])
    codes += pid_b * codes_strides[0] + pid_h * codes_strides[1]
    out += pid_b * out_strides[0] + pid_h * out_strides[1]
    for first in range(lo, hi, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        inside = (offs_t[:, None] < seq_len) & (offs_w < W)
        byte = tl.load(codes + offs_t.to(tl.int64)[:, None] * W + offs_w, mask=inside, other=0).to(tl.int32)
        even = tl.gather(table, tl.reshape((byte & 15) + offs_w * 32, [BLOCK_T * BLOCK_W]), 0)
        odd = tl.gather(table, tl.reshape((byte >> 4) + (offs_w * 32 + 16), [BLOCK_T * BLOCK_W]), 0)
        score = tl.sum(tl.reshape(even + odd, [BLOCK_T, BLOCK_W]), 1)
        tl.store(out + offs_t, score, mask=offs_t < tl.cdiv(T, 16) * 16)
    if skip is not None:
        offs_s = tl.arange(0, BLOCK_S)
        slot = tl.load(skip + pid_bh * n_skip + offs_s, mask=offs_s < n_skip, other=-1)
        tl.debug_barrier()  # another thread of the program may have stored the score
        tl.store(out + slot, tl.full([BLOCK_S], float("-inf"), tl.float32), mask=(slot >= lo) & (slot < hi))


@lut_score.triton
def _lut_score_triton(
    q: Tensor, book: Tensor, packed: Tensor, pos: Tensor | None, skip: Tensor | None = None,
    block: int = LUT_BLOCK, part: int | None = None,
) -> Tensor:  # fmt: skip
    """The Triton version of `lut_score`; tests give tokens per block and per program."""
    B, H, T, W = packed.shape
    assert packed.stride(3) == 1 and packed.stride(2) == W, "a token's codes and a head's tokens must be contiguous"
    out = empty_scores(B, H, T, device=q.device)
    options = tuned("_lut_score", BLOCK_T=block, num_warps=4)
    block = options["BLOCK_T"]
    tokens = triton.cdiv(B * H * T, LUT_PROGRAMS * multiprocessors(q.device))
    part = part or triton.cdiv(min(tokens, LUT_MOST), block) * block
    skip = None if skip is None or skip.shape[2] == 0 else skip.contiguous()
    n = 0 if skip is None else skip.shape[2]
    _lut_score[(B * H, triton.cdiv(T, part))](
        q.contiguous(), book.contiguous(), packed, None if pos is None else pos.contiguous(), skip, out,
        packed.stride(), out.stride(), H, T, part, n,
        GROUP=q.shape[1] // H, W=W, BLOCK_W=triton.next_power_of_2(W),
        BLOCK_S=triton.next_power_of_2(max(n, 1)), **options,
    )  # fmt: skip
    return out
