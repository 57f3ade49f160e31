"""Labels of Double Sparsity: a few channels of every key, quantized together per token, and scores by them.

The kernels read and write each byte of the labels once. In scoring, a thread loads whole tokens, 16 bytes at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.latent_score import head_scores
from kernels.op import nbytes, operation
from kernels.quantize import half_params, pack
from kernels.splits import empty_scores, score_grid
from kernels.tiles import filled, scale_zero
from kernels.tuned import tuned

SCORED, WARPS = 512, 4  # tokens of a program: 10 KB at 32 channels of 4 bits, and as many programs as fit hide latency
STORED = 16  # tokens of a program that stores a prompt


def quantize_labels(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., r], bits 2 or 4, r * bits a multiple of 8 -> packed uint8 [..., r * bits / 8], params fp16 [..., 2].

    As in kernels/quantize.py, but with one scale and zero for all r channels of a token: asymmetric, zero = min. Codes
    are taken against the scale and zero as stored in fp16.
    """
    levels, x = 2**bits - 1, x.float()
    scale, zero = half_params(x.amin(-1), x.amax(-1), levels)
    step = scale.float().clamp(min=1e-8)  # a constant token has scale 0: every code is 0
    codes = ((x - zero.float()[..., None]) / step[..., None]).round_().clamp_(0, levels).to(torch.uint8)
    return pack(codes, bits), torch.stack((scale, zero), -1)


def store_labels(
    k: Tensor, channels: Tensor, start: Tensor | None, labels: Tensor, params: Tensor | None, bits: int
) -> None:
    """Write `channels` of S keys per row as labels into slots start, start + 1, ... of the row; None: from slot 0 on.

    k [B, H, S, D], channels [H, r] int64, start [B]; labels and params, [>= B, H, T, ...], as in `label_score`.
    """
    if params is None:
        _put(labels, _of_channels(k, channels), start)
    else:
        _store_labels(k, channels, start, labels, params, bits)


@operation(
    cpp=True,
    mutates=("labels", "params"),
    reads=lambda k, channels, *_: dict(k=nbytes(k) * channels.shape[1] // k.shape[3]),
)
def _store_labels(
    k: Tensor, channels: Tensor, start: Tensor | None, labels: Tensor, params: Tensor, bits: int
) -> None:  # fmt: skip
    for buffer, part in zip((labels, params), quantize_labels(_of_channels(k, channels), bits), strict=True):
        _put(buffer, part, start)


def _of_channels(k: Tensor, channels: Tensor) -> Tensor:
    """[B, H, S, r]"""
    return k.gather(3, channels[None, :, None].expand(len(k), -1, k.shape[2], -1))


def _put(buffer: Tensor, part: Tensor, start: Tensor | None) -> None:
    B, _, S, _ = part.shape
    if start is None:
        buffer[:B, :, :S] = part
    else:  # with a slice between advanced indices, their dimensions come first
        row, slot = torch.arange(B, device=part.device)[:, None], torch.arange(S, device=part.device)
        buffer[row, :, start[:, None] + slot] = part.transpose(1, 2).to(buffer.dtype)


@operation(cpp=True, fake=lambda q, channels: q.new_empty(len(q), *channels.shape, dtype=torch.float32))
def label_queries(q: Tensor, channels: Tensor) -> Tensor:
    """The label channels of each group's queries, summed: q [B, H * g, D], channels [H, r] -> fp32 [B, H, r]."""
    groups = q.unflatten(1, (len(channels), -1)).float().sum(2)
    return groups.gather(2, channels.expand(len(q), -1, -1))


def label_score(q: Tensor, labels: Tensor, params: Tensor | None, bits: int, pos: Tensor | None = None) -> Tensor:
    """Approximate q . k of every token from its labels, without softmax or scale (Algorithm 1), in fp32.

    q [B, H, r] fp32, the group's queries summed; labels [B, H, T, r * bits / 8] uint8 and params [B, H, T, 2], or
    labels [B, H, T, r] as they are and no params -> fp32 [B, H, T]; slots that are not filled may score anything. pos
    [B], if given, is the last slot that matters: later ones need not be read, and may score anything, too.
    """
    if params is None:
        return head_scores(q[:, :, None], labels, pos)[:, :, 0]
    return _label_score(q, labels, params, bits, pos)


@operation(
    cpp=True,
    fake=lambda q, labels, *_: empty_scores(len(q), *labels.shape[1:3], device=q.device),
)
def _label_score(q: Tensor, labels: Tensor, params: Tensor, bits: int, pos: Tensor | None) -> Tensor:
    # q . (scale * code + zero) = scale * (q . code) + zero * sum(q): labels are never dequantized. Nor are codes
    # reordered: the i-th codes of all bytes are a matrix of their own
    parts = [((labels >> i * bits & 2**bits - 1).float(), q[..., i :: 8 // bits]) for i in range(8 // bits)]
    if torch.compiler.is_compiling():  # becomes one loop over bytes; eagerly each operation would be a copy
        codes = sum(x * y[:, :, None] for x, y in parts).sum(-1)
    else:
        codes = sum(x @ y[..., None] for x, y in parts)[..., 0]
    scale, zero = params.float().unbind(-1)
    return scale * codes + zero * q.sum(-1, keepdim=True)


# ---- scoring ----


@triton.jit
def _label_score_kernel(
    q, labels, pairs, pos, out, labels_strides, pairs_strides, out_strides, H, T,
    R: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and head): every so many blocks of tokens, each W integers of 4 bytes, or of 1.

    Codes need no conversion: the float whose bits are an integer n < 2^24 is n * 2^-149, subnormal or just above. So a
    code is masked where it stands, one instruction, and multiplied; the power of two that is missing goes into q.
    """
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h, seq_len = pid_bh // H, pid_bh % H, filled(pos, pid_bh // H, T)
    offs_w = tl.arange(0, BLOCK_W)
    q += pid_bh * R + offs_w * (R // W)
    labels += pid_b * labels_strides[0] + pid_h * labels_strides[1] + offs_w
    pairs += pid_b * pairs_strides[0] + pid_h * pairs_strides[1]
    out += pid_b * out_strides[0] + pid_h * out_strides[1]
    for first in range(tl.program_id(0) * BLOCK_T, seq_len, tl.num_programs(0) * BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        slot = offs_t.to(tl.int64)
        inside = (offs_t[:, None] < seq_len) & (offs_w < W)
        words = tl.load(labels + slot[:, None] * W, mask=inside, other=0).to(tl.int32)
        both = tl.load(pairs + slot, mask=offs_t < seq_len, other=0)  # fp16 scale, then zero
        upper = words >> 24
        score, total = tl.zeros([BLOCK_T, BLOCK_W], tl.float32), tl.zeros([BLOCK_W], tl.float32)
        for i in tl.static_range(R // W):
            b_q = tl.load(q + i, mask=offs_w < W, other=0.0)
            total += b_q
            if i * BITS < 24:
                code = words & ((2**BITS - 1) << (i * BITS))
                score += code.to(tl.float32, bitcast=True) * (b_q * 2.0 ** (104 - i * BITS))
            else:
                code = upper & ((2**BITS - 1) << (i * BITS - 24))
                score += code.to(tl.float32, bitcast=True) * (b_q * 2.0 ** (128 - i * BITS))
        scale, zero = scale_zero(both)
        logits = scale * (tl.sum(score, 1) * 2.0**45) + zero * tl.sum(total)
        tl.store(out + offs_t, logits, mask=offs_t < tl.cdiv(T, 16) * 16)


@_label_score.triton
def _label_score_triton(q: Tensor, labels: Tensor, params: Tensor, bits: int, pos: Tensor | None) -> Tensor:
    B, H, T, W = labels.shape
    out, options = empty_scores(B, H, T, device=q.device), tuned("_label_score_kernel", BLOCK_T=SCORED, num_warps=WARPS)
    if W % 4 == 0:
        labels, W = labels.view(torch.int32), W // 4
    params = params.view(torch.int32)[..., 0]
    _label_score_kernel[score_grid(B * H, T, options["BLOCK_T"], q.device)](
        q.contiguous(), labels, params, None if pos is None else pos.contiguous(), out,
        labels.stride(), params.stride(), out.stride(), H, T,
        R=q.shape[2], BITS=bits, W=W, BLOCK_W=triton.next_power_of_2(W), **options,
    )  # fmt: skip
    return out


# ---- storing ----


@triton.jit
def _store_labels_kernel(
    k, channels, start, labels, pairs, k_strides, labels_strides, pairs_strides, H, S,
    R: tl.constexpr, BITS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, row and head)."""
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    PER: tl.constexpr = 8 // BITS
    offs_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    offs_w, offs_i = tl.arange(0, BLOCK_W), tl.arange(0, PER)
    channel = offs_w[:, None] * PER + offs_i
    real = (offs_s[:, None, None] < S) & (channel < R)
    at = tl.load(channels + pid_h * R + channel, mask=channel < R, other=0)
    at += k + pid_b * k_strides[0] + pid_h * k_strides[1] + offs_s.to(tl.int64)[:, None, None] * k_strides[2]
    b_k = tl.load(at, mask=real, other=0.0).to(tl.float32)  # [BLOCK_S, BLOCK_W, PER]: a byte holds PER channels
    low = tl.min(tl.min(tl.where(real, b_k, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(real, b_k, float("-inf")), 2), 1)
    zero = tl.minimum(tl.maximum(low, -65504.0), 65504.0).to(tl.float16)
    scale = tl.div_rn(high - zero.to(tl.float32), tl.full([BLOCK_S], 2**BITS - 1, tl.float32))
    scale = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16)
    step = tl.maximum(scale.to(tl.float32), 1e-8)[:, None, None] + tl.zeros_like(b_k)
    code = tl.div_rn(b_k - zero.to(tl.float32)[:, None, None], step)
    # clamped before it is rounded, which changes nothing; adding 1.5 * 2^23 rounds to integers, halves to even
    code = tl.minimum(tl.maximum(code, 0.0), 2**BITS - 1) + 12582912.0 - 12582912.0
    packed = tl.sum(tl.where(channel < R, code.to(tl.int32) << (offs_i * BITS), 0), 2)
    slot = offs_s.to(tl.int64)
    if start is not None:
        slot += tl.load(start + pid_b)
    W: tl.constexpr = R // PER
    to = labels + pid_b * labels_strides[0] + pid_h * labels_strides[1] + slot[:, None] * W + offs_w
    tl.store(to, packed.to(tl.uint8), mask=(offs_s[:, None] < S) & (offs_w < W))
    to = pairs + pid_b * pairs_strides[0] + pid_h * pairs_strides[1] + slot * 2
    tl.store(to, scale, mask=offs_s < S)
    tl.store(to + 1, zero, mask=offs_s < S)


@_store_labels.triton
def _store_labels_triton(
    k: Tensor, channels: Tensor, start: Tensor | None, labels: Tensor, params: Tensor, bits: int
) -> None:
    B, H, S, _ = k.shape
    W = labels.shape[3]
    k = k if k.stride(3) == 1 else k.contiguous()
    options = tuned("_store_labels_kernel", BLOCK_S=min(STORED, triton.next_power_of_2(S)), num_warps=1)
    _store_labels_kernel[(triton.cdiv(S, options["BLOCK_S"]), B * H)](
        k, channels, None if start is None else start.contiguous(), labels, params,
        k.stride(), labels.stride(), params.stride(), H, S,
        R=channels.shape[1], BITS=bits, BLOCK_W=triton.next_power_of_2(W), **options,
    )  # fmt: skip
