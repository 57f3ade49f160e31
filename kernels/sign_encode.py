"""A prompt's keys into sign codes and their codebook: the index that Self-Indexing KVCache builds.

Keys are read twice, first for the mean and the largest magnitude of every channel, then for their codes, D / 8 bytes
per token, and the centroids of the cells. Sums and counts stay in registers and are written once per program, to be
added up afterwards in a fixed order; with atomic additions, the same prompt would give other centroids every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.op import operation
from kernels.sign_codes import SUB, codebook, pack_codes, sign_codes, sign_patterns
from kernels.splits import split_count
from kernels.tuned import tuned


def key_range(k: Tensor, lengths: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean of every channel over a prompt's keys (eq. 5), and the largest magnitude of the centred channel (eq. 12).

    k [B, H, S, D], of which the first lengths [B] >= 1 count; mean [B, H, D], if given, is that of other keys
    -> two fp32 [B, H, D].
    """
    own, low, high = _key_range(k, lengths)
    mean = own if mean is None else mean
    largest, alpha = torch.maximum(-low, high).amax(2, keepdim=True), torch.maximum(high - mean, mean - low)
    # The floor is for short prompts: a channel that is constant in one says nothing about tokens decoded later, which
    # a tiny alpha would take out of fp16's range.
    return mean, alpha.maximum(1e-3 * largest).clamp(min=1e-8)


@operation(
    fake=lambda k, lengths: k.new_empty(3, *k.shape[:2], k.shape[3], dtype=torch.float32),
)
def _key_range(k: Tensor, lengths: Tensor) -> Tensor:
    """Mean, lowest and highest of every channel -> fp32 [3, B, H, D]."""
    keep = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, :, None]
    total = torch.where(keep, k, 0).sum(2, dtype=torch.float32)
    low, high = torch.where(keep, k, float("inf")).amin(2), torch.where(keep, k, float("-inf")).amax(2)
    return torch.stack((total / lengths.view(-1, 1, 1), low.float(), high.float()))


def _fake(k: Tensor, mean: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    B, H, S, D = k.shape
    return k.new_empty(B, H, S, D // 8, dtype=torch.uint8), mean.new_empty(B, H, D // SUB, 16, SUB)


@operation(fake=_fake)
def encode_keys(k: Tensor, mean: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys less their mean -> packed sign codes (eq. 2-3) and the centroids of their cells (eq. 4); see `codebook`.

    k [B, H, S, D], of which the first lengths [B] count for the centroids, mean fp32 [B, H, D]
    -> uint8 [B, H, S, D / 8], fp32 [B, H, D / 4, 16, 4].
    """
    x, valid = k.float() - mean[:, :, None], torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    codes = sign_codes(x)
    return pack_codes(codes), codebook(x, codes, valid)


def encode_others(k: Tensor, mean: Tensor, lengths: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Centroids (eq. 4) and largest magnitudes (eq. 12) of the keys that are not left out, less the mean of all keys.

    k, mean and lengths as in `encode_keys`, left_out [B, H, n] int64, of a prompt of more than n tokens; a shorter one
    has none left out -> fp32 [B, H, D / 4, 16, 4], fp32 [B, H, D].
    """
    many, out = lengths > left_out.shape[2], torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
    out.scatter_(2, left_out, many[:, None, None].expand_as(left_out))
    order = out.sort(dim=-1, stable=True).indices  # those left out come last, even after padding
    rest, n = k.gather(2, order[..., None].expand_as(k)), lengths - many * left_out.shape[2]
    return encode_keys(rest, mean, n)[1], key_range(rest, n, mean)[1]


# ---- Triton ----

# 16 tokens of 16 subvectors against 16 cells are 32 compares and selects a thread and channel; twice as many are 116
# registers in Triton 3.9, but spill in 3.6
BLOCK_T, BLOCK_G = 16, 16
NUM_WARPS, NUM_STAGES = 4, 3
RANGE_T = 64  # tokens at a time in `_key_range`: 16 KB of bf16


@triton.jit
def _key_range_kernel(
    k, lengths, part, k_strides, H, S, parts,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row and head, part of the tokens): sum, lowest and highest of every channel."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.minimum(tl.load(lengths + pid_bh // H), S).to(tl.int32)
    offs_d = tl.arange(0, BLOCK_D)
    k += pid_bh // H * k_strides[0] + pid_bh % H * k_strides[1]
    total = tl.zeros([BLOCK_D], tl.float32)
    low, high = tl.full([BLOCK_D], float("inf"), tl.float32), tl.full([BLOCK_D], float("-inf"), tl.float32)
    step = tl.cdiv(tl.cdiv(seq_len, parts), BLOCK_T) * BLOCK_T
    for first in tl.range(split * step, tl.minimum(seq_len, (split + 1) * step), BLOCK_T, num_stages=3):
        offs_t = first + tl.arange(0, BLOCK_T)
        real = (offs_t < seq_len)[:, None] & (offs_d < D)
        b_k = tl.load(k + offs_t.to(tl.int64)[:, None] * k_strides[2] + offs_d, mask=real, other=0.0).to(tl.float32)
        total += tl.sum(b_k, 0)
        low = tl.minimum(low, tl.min(tl.where(real, b_k, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(real, b_k, float("-inf")), 0))
    to = part + (pid_bh * parts + split) * 3 * D + offs_d
    tl.store(to, total, mask=offs_d < D)
    tl.store(to + D, low, mask=offs_d < D)
    tl.store(to + 2 * D, high, mask=offs_d < D)


@triton.jit
def _encode_keys(
    k, mean, lengths, packed, part, k_strides, H, S, G, parts,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Program (row and head, part of the tokens, block of subvectors)."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_g, pair = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_G // 2)
    channel = tl.program_id(2) * BLOCK_G * 4 + tl.arange(0, BLOCK_G * 4)
    pair += tl.program_id(2) * (BLOCK_G // 2)
    cell = tl.arange(0, 16)
    seq_len = tl.load(lengths + pid_bh // H)
    k += pid_bh // H * k_strides[0] + pid_bh % H * k_strides[1]
    centre = tl.load(mean + pid_bh * (G * 4) + channel, mask=channel < G * 4, other=0.0)
    sum0, sum1 = tl.zeros([BLOCK_G, 16], tl.float32), tl.zeros([BLOCK_G, 16], tl.float32)
    sum2, sum3 = tl.zeros([BLOCK_G, 16], tl.float32), tl.zeros([BLOCK_G, 16], tl.float32)
    count = tl.zeros([BLOCK_G, 16], tl.float32)
    step = tl.cdiv(tl.cdiv(S, parts), BLOCK_T) * BLOCK_T
    for first in range(split * step, tl.minimum(S, (split + 1) * step), BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        some = (offs_t < S)[:, None] & (channel < G * 4)
        b_k = tl.load(k + offs_t.to(tl.int64)[:, None] * k_strides[2] + channel, mask=some, other=0.0)
        b_k = b_k.to(tl.float32) - centre
        even, odd = tl.split(tl.reshape(b_k, [BLOCK_T, BLOCK_G, 2, 2]))  # the channels of a subvector, (0, 2), (1, 3)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        code = (x0 >= 0).to(tl.int32) * 8 + (x1 >= 0).to(tl.int32) * 4 + (x2 >= 0).to(tl.int32) * 2
        code += (x3 >= 0).to(tl.int32)
        low, high = tl.split(tl.reshape(code, [BLOCK_T, BLOCK_G // 2, 2]))
        byte = (low | (high << 4)).to(tl.uint8)
        to = packed + (pid_bh * S + offs_t)[:, None] * (G // 2) + pair
        tl.store(to, byte, mask=(offs_t < S)[:, None] & (pair < G // 2))

        hit = (code[:, :, None] == cell) & (offs_t < seq_len)[:, None, None]
        sum0 += tl.sum(tl.where(hit, x0[:, :, None], 0.0), 0)
        sum1 += tl.sum(tl.where(hit, x1[:, :, None], 0.0), 0)
        sum2 += tl.sum(tl.where(hit, x2[:, :, None], 0.0), 0)
        sum3 += tl.sum(tl.where(hit, x3[:, :, None], 0.0), 0)
        count += tl.sum(tl.where(hit, 1.0, 0.0), 0)
    at, real = ((pid_bh * parts + split) * 5 * G + offs_g[:, None]) * 16 + cell, (offs_g < G)[:, None]
    tl.store(part + at, sum0, mask=real)
    tl.store(part + at + G * 16, sum1, mask=real)
    tl.store(part + at + G * 32, sum2, mask=real)
    tl.store(part + at + G * 48, sum3, mask=real)
    tl.store(part + at + G * 64, count, mask=real)


@_key_range.triton
def _key_range_triton(k: Tensor, lengths: Tensor, parts: int | None = None) -> Tensor:
    """The Triton version of `_key_range`; tests give the number of parts."""
    B, H, S, D = k.shape
    k = k if k.stride(3) == 1 else k.contiguous()
    parts = parts or split_count(B * H, S, RANGE_T, k.device)
    part = torch.empty(B, H, parts, 3, D, dtype=torch.float32, device=k.device)
    _key_range_kernel[(B * H, parts)](
        k, lengths.contiguous(), part, k.stride(), H, S, parts,
        D=D, BLOCK_D=triton.next_power_of_2(D), **tuned("_key_range_kernel", BLOCK_T=RANGE_T, num_warps=NUM_WARPS),
    )  # fmt: skip
    total, low, high = part.unbind(3)
    return torch.stack((total.sum(2) / lengths.view(B, 1, 1), low.amin(2), high.amax(2)))


@encode_keys.triton
def launch(k: Tensor, mean: Tensor, lengths: Tensor, parts: int | None = None) -> tuple[Tensor, Tensor]:
    """The Triton version of `encode_keys`; tests give the number of parts."""
    B, H, S, D = k.shape
    G, k = D // SUB, k if k.stride(3) == 1 else k.contiguous()
    block = min(BLOCK_G, triton.next_power_of_2(G))
    chunks = triton.cdiv(G, block)
    parts = parts or split_count(B * H * chunks, S, BLOCK_T, k.device)
    packed = torch.empty(B, H, S, G // 2, dtype=torch.uint8, device=k.device)
    part = torch.empty(B, H, parts, 5, G, 16, dtype=torch.float32, device=k.device)
    _encode_keys[(B * H, parts, chunks)](
        k, mean.contiguous(), lengths.contiguous(), packed, part, k.stride(), H, S, G, parts,
        BLOCK_G=block,
        **tuned("_encode_keys", BLOCK_T=BLOCK_T, num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )  # fmt: skip
    # [B, H, G, 16, 4 and 1]; contiguous, as what follows takes on this layout, and a traced graph counts on it
    sums, counts = part.sum(2).permute(0, 1, 3, 4, 2).contiguous().split((SUB, 1), -1)
    # all numbers of a cell have the sign of its pattern, so that sums of magnitudes are magnitudes of sums
    magnitude = sums.abs().sum(3, keepdim=True) / lengths.clamp(min=1).view(B, 1, 1, 1, 1)
    return packed, torch.where(counts > 0, sums / counts.clamp(min=1), sign_patterns(k.device) * magnitude)
