"""Attention of one query per row over every token, quantized but for the first and the newest ones.

Keys and values are quantized in slots, slot = position. Beside them are the first tokens and a ring of the newest ones
in the cache's dtype (`full_precision`): a token is quantized when it leaves the ring, by itself or, if keys are
quantized per channel, together with a block of others (KIVI). One pass reads packed tokens and unpacks them in
registers: at 2 bits and D = 128, 96 bytes per token and KV head (KIVI), where dense bf16 reads 512. On a CPU a bf16
cache's codes are multiplied with queries and weights of 12 to 16 bits, more than bf16 has, and summed exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.codebook import quantize_book, read_book
from kernels.dense_attention import masked_attention
from kernels.gather_attention import gather_rows
from kernels.op import nbytes, operation
from kernels.quantize import (
    GROUP,
    WORDS,
    dequantize,
    dequantize_channels,
    group_size,
    quantize,
    quantize_channels,
)
from kernels.ring import ring_positions
from kernels.skipping_attention import BLOCK, SHORTEST, SPLIT, in_read_blocks, least_weight
from kernels.splits import blocks_of, combine, parts_of, split_count
from kernels.tiles import LOG2_E, dot, load_words, scale_zero, softmax_step, unpack_codes, unpack_units, write_part
from kernels.tuned import tuned


class QuantizedTokens(NamedTuple):
    """Keys, or values, of T positions. From `sinks` to `packed_until` they are packed, all others are whole."""

    data: Tensor  # uint8 [>= B, Hkv, >= T, D * bits / 8]; at 16 bits [..., D]
    # fp16 [>= B, Hkv, T, groups, 2] scales and zeros, or per channel [>= B, Hkv, T / 32, D, 2]; with a book scales
    # alone, [>= B, Hkv, T, 1], or with blocks [>= B, Hkv, T / 32, 1]
    params: Tensor | None
    full_precision: Tensor  # [>= B, Hkv, sinks + R, D]: the first tokens, then a ring of the newest
    bits: int
    sinks: int
    block: int = 0  # tokens that leave the ring together, each 32 of which share scales; 0: one by one
    clip: float = 1.0
    book: Tensor | None = None  # fp32 [2^bits], what codes stand for; None: integers

    @property
    def channels(self) -> bool:
        """Whether each channel has a scale of its own."""
        return self.block > 0 and self.book is None

    @property
    def ring(self) -> int:
        return self.full_precision.shape[2] - self.sinks

    def packed_until(self, pos: Tensor) -> Tensor:
        """The first position behind the packed ones while the token at pos [B] is attended to."""
        if self.block:  # a block is packed when its last token comes, or the one behind it if the ring has room
            return (pos + 1 - (self.ring - self.block)) // self.block * self.block
        return (pos + 1 - self.ring).clamp(min=self.sinks)


def slot_of(pos: Tensor, sinks: int, ring: int) -> Tensor:
    """The slot of a position among the whole tokens."""
    return torch.where(pos < sinks, pos, sinks + (pos - sinks) % ring)


# ---- storing ----


def encode(tokens: QuantizedTokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n, D] -> data and params of n slots; if tokens share scales, n must be a multiple of 32."""
    if tokens.book is not None:
        return quantize_book(x, tokens.bits, tokens.book, GROUP if tokens.block else 1)
    if tokens.block:
        return quantize_channels(x, tokens.bits)
    assert tokens.params is not None
    return quantize(x, tokens.bits, group=group_size(x.shape[-1], tokens.params.shape[3]), clip=tokens.clip)


def store_prompt(tokens: QuantizedTokens, x: Tensor, lengths: Tensor) -> None:
    """Store x [B, Hkv, S, D] of prompts that end at lengths [B]; past them, slots may get anything."""
    B, _, S, _ = x.shape
    if tokens.params is None:
        tokens.data[:B, :, :S] = x
    else:
        each = GROUP if tokens.block else 1
        S = S // each * each  # fewer tokens than share a scale stay whole
        if S:
            tokens.data[:B, :, :S], tokens.params[:B, :, : S // each] = encode(tokens, x[:, :, :S])
    sinks = min(tokens.sinks, x.shape[2])
    tokens.full_precision[:B, :, :sinks] = x[:, :, :sinks]
    newest = tokens.sinks + ring_positions(lengths - 1 - tokens.sinks, tokens.ring)  # [B, R]
    tokens.full_precision[:B, :, tokens.sinks :] = gather_rows(x, newest.clamp(0, x.shape[2] - 1)[:, None])


def _whole_groups(x: Tensor, *rest: object) -> bool:
    """Whether C++ serves: it has whole groups of 32 channels."""
    return x.shape[2] % GROUP == 0


@operation(
    cpp=lambda x, pos, tokens: x.shape[2] % GROUP == 0 and x.dtype == tokens.full_precision.dtype,
    opaque=True,
    mutates=("tokens_full_precision", "tokens_data", "tokens_params"),
    reads=lambda x, pos, tokens: dict(tokens_full_precision=nbytes(x)),
)
def quantized_append(x: Tensor, pos: Tensor, tokens: QuantizedTokens) -> None:
    """Put one token per row, x [B, Hkv, D] at pos [B], into the ring; quantize what leaves it.

    An operator, because a compiled graph that reads a slot of the ring before it writes it would copy the ring.
    """
    data, params, full_precision, _, sinks, block = tokens[:6]
    row, ring = torch.arange(len(pos), device=pos.device), tokens.ring
    slot = slot_of(pos, sinks, ring)
    if not block:
        # Where nothing leaves, the slot's contents go to one that is never read: a sink's, or one of the last R, whose
        # tokens can never leave the ring.
        old, at = full_precision[row, :, slot], (pos - ring) % data.shape[2]
        if params is None:
            data[row, :, at] = old
        else:
            coded = encode(tokens, old[:, :, None])
            data[row, :, at], params[row, :, at] = (part[:, :, 0] for part in coded)
    full_precision[row, :, slot] = x
    if block:
        _flush(tokens, pos)


def _flush(tokens: QuantizedTokens, pos: Tensor) -> None:
    """Quantize a block in those rows where one leaves the ring, the newest token at pos [B]."""
    block, params = tokens.block, tokens.params
    assert params is not None
    end = pos + 1 - (tokens.ring - block)
    due = (end % block == 0) & (end > 0)
    if pos.device.type == "cpu":
        rows = due.nonzero()[:, 0]
        if not len(rows):
            return
    else:  # no number may reach the host: all rows are quantized, and some written
        rows = torch.arange(len(pos), device=pos.device)
    first, row = (end[rows] - block).clamp(min=0)[:, None], rows[:, None]
    slot = slot_of(first + torch.arange(block, device=pos.device), tokens.sinks, tokens.ring)
    coded = encode(tokens, gather_rows(tokens.full_precision[rows], slot[:, None]))
    for part, new, each in ((tokens.data, coded[0], 1), (params, coded[1], GROUP)):
        at = first // each + torch.arange(block // each, device=pos.device)
        at = at.clamp(max=part.shape[2] - 1)  # where none is due, a block may be longer than the store
        new = new.transpose(1, 2)  # with a slice between advanced indices, their dimensions come first
        there = due[rows].view(-1, 1, *[1] * (new.dim() - 2))
        part[row, :, at] = torch.where(there, new, part[row, :, at])


def read_tokens(tokens: QuantizedTokens, pos: Tensor, n: int, packed_until: Tensor | None = None) -> Tensor:
    """Dequantized tokens at positions 0..n-1, the newest at pos [B] -> [B, Hkv, n, D] in the dtype of whole ones."""
    if packed_until is None:
        packed_until = tokens.packed_until(pos)
    B, t, data, params = len(pos), torch.arange(n, device=pos.device), tokens.data[: len(pos), :, :n], tokens.params
    if params is None:
        packed = data
    elif tokens.book is not None:
        packed = read_book(data, params[:B], tokens.bits, tokens.book, tokens.data.shape[2] // params.shape[2])
    elif tokens.channels:
        slots = -(-n // GROUP) * GROUP
        packed = dequantize_channels(tokens.data[:B, :, :slots], params[:B, :, : slots // GROUP], tokens.bits)[:, :, :n]
    else:
        packed = dequantize(data, params[:B, :, :n], tokens.bits)
    is_packed = (t >= tokens.sinks) & (t < packed_until[:, None])
    full_precision = tokens.full_precision[:B, :, slot_of(t, tokens.sinks, tokens.ring)]
    return torch.where(is_packed[:, None, :, None], packed.to(full_precision.dtype), full_precision)


# ---- attention ----


def quantized_attention(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, stops: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of q [B, Hq, D] over positions 0..pos [B] -> [B, Hq, D]. Scale 1/sqrt(D).

    Sinks and rings of keys and of values are of one size, and no value is packed that has a whole key. Other slots may
    hold anything. stops: `packed_until` of both, if it is known. bias: what is added to the products q . k before they
    are scaled, fp32 [B, Hq, > pos].
    """
    # a whole key has a whole value: the ring of keys holds no token that the ring of values lacks
    return _quantized_attention(q, k, v, pos, *(stops or (k.packed_until(pos), v.packed_until(pos))), bias)


@operation(cpp=_whole_groups)
def _quantized_attention(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, k_stop: Tensor, v_stop: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    n = v.data.shape[2] if bias is None else bias.shape[2]
    there = torch.arange(n, device=pos.device) <= pos[:, None]
    return masked_attention(q, read_tokens(k, pos, n, k_stop), read_tokens(v, pos, n, v_stop), there[:, None], bias)


@operation(
    cpp=_whole_groups,
    fake=lambda q, k, v, pos, *_: (q.new_empty(q.shape), pos.new_empty(len(q), k.full_precision.shape[1])),
)
def skipping_quantized_attention(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, k_stop: Tensor, v_stop: Tensor,
    bias: Tensor | None, scale: float, shortest: int = SHORTEST,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`quantized_attention` without the values of blocks that weigh next to nothing, and the number of tokens whose
    values were read [B, Hkv] int64. scale, shortest: as in `skipping_attention`. Whole tokens are always read, and
    blocks in which some values are whole."""
    n = v.data.shape[2] if bias is None else bias.shape[2]
    keys = read_tokens(k, pos, n, k_stop)
    read = values_read(q, keys, pos, k.sinks, k_stop, v_stop, bias, scale, shortest)
    return masked_attention(q, keys, read_tokens(v, pos, n, v_stop), read, bias), read.sum(2)


def values_read(
    q: Tensor, keys: Tensor, pos: Tensor, sinks: int, k_stop: Tensor, v_stop: Tensor, bias: Tensor | None,
    scale: float, shortest: int = SHORTEST,
) -> Tensor:  # fmt: skip
    """Which tokens of keys [B, Hkv, n, D] `skipping_quantized_attention` reads values of -> bool [B, Hkv, n]."""
    t = torch.arange(keys.shape[2], device=q.device)
    logits = q.float().unflatten(1, (keys.shape[1], -1)) @ keys.float().mT
    logits = (logits if bias is None else logits + bias.view(logits.shape)) * q.shape[2] ** -0.5
    packed = (t >= sinks) & (t < k_stop[:, None])
    logits = torch.where(packed[:, None, None], logits, float("-inf"))
    read = in_read_blocks(logits, pos + 1, scale, shortest) & packed[:, None]
    always = ~packed | ((t // BLOCK + 1) * BLOCK > v_stop[:, None])
    return (read | always[:, None]) & (t <= pos[:, None])[:, None]


# ---- Triton ----

BLOCK_N = GROUP  # keys per channel share their scales
NUM_WARPS, NUM_STAGES = 4, 3


@triton.jit
def _unpacked(
    packed, third, scales, book, slot, inside, offs_u, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Tokens quantized by themselves, [N, 8 * U], GROUP channels with a pair of params each; with a book GROUP tokens
    with a scale."""
    words = load_words(packed, third, slot, inside, offs_u, D, BITS)
    if book is not None:
        scale = tl.load(scales + slot // GROUP, mask=inside, other=0.0).to(tl.float32)
        return unpack_units(words, scale[:, None], 0.0, None, BITS, DTYPE, book)
    else:
        real, groups = inside[:, None] & (offs_u < D // 8), (D + GROUP - 1) // GROUP
        scale, zero = scale_zero(tl.load(scales + slot[:, None] * groups + offs_u // (GROUP // 8), mask=real, other=0))
        return unpack_units(words, scale, zero, None, BITS, DTYPE)


@triton.jit
def _quantized_attention_kernel(
    q, k, k_third, k_params, k_whole, v, v_third, v_params, v_whole, pos, k_stop, v_stop, k_book, v_book, bias, part,
    lse, read, skip, shortest, q_strides, bias_row, H, K_SLOTS, V_SLOTS, sinks, ring, S, S_PACKED,
    G: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): the first S_PACKED splits share the packed keys, the others the whole ones."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    offs_u = tl.arange(0, BLOCK_D // 8)
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0)
    if bias is not None:
        p_bias = bias + (pid_bh * G + offs_g[:, None]) * bias_row
    m_i = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: a block may hold sinks alone, and -inf less -inf is NaN
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    newest = tl.load(pos + pid_b).to(tl.int32)
    packed_keys, packed_values = tl.load(k_stop + pid_b).to(tl.int32), tl.load(v_stop + pid_b).to(tl.int32)

    step = tl.cdiv(tl.cdiv(packed_keys, S_PACKED), BLOCK_N) * BLOCK_N
    if read is not None:
        step = SPLIT
        least = least_weight(newest + 1, skip, shortest)
        n_read = 0
    lo = split * step
    hi = tl.minimum(packed_keys, lo + step)
    for first in tl.range(lo, hi, BLOCK_N):
        offs_t = first + offs_n
        inside = (offs_t >= sinks) & (offs_t < hi)
        slot = pid_bh * K_SLOTS + offs_t
        if K_BITS == 16:
            b_k = tl.load(k + slot[:, None] * D + offs_d, mask=inside[:, None] & (offs_d < D), other=0.0)
            logits = dot(b_q, tl.trans(b_k))
        elif CHANNELS:  # q . (scale * code + zero) = (q * scale) . code + q . zero
            words = load_words(k, k_third, slot, inside, offs_u, D, K_BITS)
            at = (pid_bh * (K_SLOTS // 32) + first // 32) * D + offs_d
            scale, zero = scale_zero(tl.load(k_params + at, mask=offs_d < D, other=0))
            if (K_BITS == 2 or K_BITS == 4) and b_q.dtype != tl.float32:
                code = unpack_codes(words, K_BITS, b_q.dtype)
            else:
                code = unpack_units(words, 1.0, 0.0, None, K_BITS, b_q.dtype)
            logits = dot((b_q * scale[None, :]).to(b_q.dtype), tl.trans(code)) + tl.sum(b_q * zero[None, :], 1)[:, None]
        else:
            b_k = _unpacked(k, k_third, k_params, k_book, slot, inside, offs_u, D, K_BITS, K_GROUP, b_q.dtype)
            logits = dot(b_q, tl.trans(b_k))
        if bias is not None:
            logits += tl.load(p_bias + offs_t, mask=inside[None, :] & (offs_g[:, None] < G), other=0.0)
        weighs = True
        if read is not None:
            most = tl.max(tl.where(inside[None, :], logits * SCALE, float("-inf")), 1)
            weighs = tl.max(((most - m_i >= least) & (offs_g < G)).to(tl.int32), 0) > 0
            weighs = weighs | (first + BLOCK_N > packed_values)
            n_read += tl.where(weighs, tl.sum(inside.to(tl.int32), 0), 0)
        if weighs:
            slot, inner = pid_bh * V_SLOTS + offs_t, inside & (offs_t < packed_values)
            if V_BITS == 16:
                b_v = tl.load(v + slot[:, None] * D + offs_d, mask=inner[:, None] & (offs_d < D), other=0.0)
            else:
                b_v = _unpacked(v, v_third, v_params, v_book, slot, inner, offs_u, D, V_BITS, V_GROUP, b_q.dtype)
            if CHANNELS:  # keys leave the ring before their values do
                late = inside & (offs_t >= packed_values)
                whole = (pid_bh * (sinks + ring) + sinks + (offs_t - sinks) % ring) * D
                b_v += tl.load(v_whole + whole[:, None] + offs_d, mask=late[:, None] & (offs_d < D), other=0.0)
            m_i, l_i, acc = softmax_step(logits * SCALE, inside, b_v, m_i, l_i, acc)

    # sinks and then the ring as one list of whole rows; of the splits before, none has a part of it
    begin = tl.maximum(packed_keys, sinks)
    n_sinks = tl.minimum(newest + 1, sinks)
    n_whole = n_sinks + tl.maximum(newest + 1 - begin, 0)
    step = tl.cdiv(tl.cdiv(n_whole, S - S_PACKED), BLOCK_N) * BLOCK_N
    lo = (split - S_PACKED) * step
    hi = tl.minimum(n_whole, lo + step)
    for first in range(tl.maximum(lo, 0), hi, BLOCK_N):
        offs_i = first + offs_n
        inside = offs_i < hi
        offs_t = tl.where(offs_i < n_sinks, offs_i, begin + offs_i - n_sinks)
        at = (pid_bh * (sinks + ring) + tl.where(offs_t < sinks, offs_t, sinks + (offs_t - sinks) % ring)) * D
        at = tl.multiple_of(at, 8)
        real = inside[:, None] & (offs_d < D)
        b_k = tl.load(k_whole + at[:, None] + offs_d, mask=real, other=0.0)
        b_v = tl.load(v_whole + at[:, None] + offs_d, mask=real, other=0.0)
        logits = dot(b_q, tl.trans(b_k))
        if bias is not None:
            logits += tl.load(p_bias + offs_t, mask=inside[None, :] & (offs_g[:, None] < G), other=0.0)
        m_i, l_i, acc = softmax_step(logits * SCALE, inside, b_v, m_i, l_i, acc)
    if read is not None:
        tl.store(read + pid_bh * S + split, (n_read + tl.maximum(hi - tl.maximum(lo, 0), 0)).to(tl.int64))
    write_part(m_i, l_i, acc, part, lse, pid_bh * G + offs_g, offs_g, split, S, G, D, BLOCK_D)


def _side(tokens: QuantizedTokens, D: int) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Keys or values as arguments of the kernel: codes; the same by bytes, for the third of 3 bits; params; and the
    number of channels, or with a book of tokens, that share them."""
    data, params, bits = tokens.data, tokens.params, tokens.bits
    words = data if bits == 16 or (bits == 3 and D % 16) else data.view(WORDS.get(bits, torch.int16))
    third, each = data if bits == 3 else None, GROUP
    if params is None or tokens.book is not None:
        return words, third, params, each if params is None else data.shape[2] // params.shape[2]
    return words, third, params.view(torch.int32), each if tokens.channels else group_size(D, params.shape[3])


@_quantized_attention.triton
def launch(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, k_stop: Tensor, v_stop: Tensor,
    bias: Tensor | None = None, splits: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """The Triton version of `quantized_attention`; tests give splits (of the packed tokens, of the whole ones)."""
    if splits is None:
        T, n_whole = v.data.shape[2], k.full_precision.shape[2]
        S = split_count(len(q) * k.full_precision.shape[1], T + n_whole, 2 * BLOCK_N, q.device)
        share = round(S * T / (T + n_whole))
        splits = (max(1, min(share, triton.cdiv(T, BLOCK_N))), max(1, S - share))
    return _launched(q, k, v, pos, k_stop, v_stop, bias, splits)


@skipping_quantized_attention.triton
def launch_skipping(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, k_stop: Tensor, v_stop: Tensor,
    bias: Tensor | None, scale: float, shortest: int = SHORTEST,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton version of `skipping_quantized_attention`."""
    splits = -(-v.data.shape[2] // SPLIT), triton.cdiv(k.full_precision.shape[2], 2 * BLOCK_N)
    read = pos.new_empty(len(q), k.full_precision.shape[1], sum(splits))
    return _launched(q, k, v, pos, k_stop, v_stop, bias, splits, read, scale, shortest), read.sum(2)


def _launched(
    q: Tensor, k: QuantizedTokens, v: QuantizedTokens, pos: Tensor, k_stop: Tensor, v_stop: Tensor,
    bias: Tensor | None, splits: tuple[int, int], read: Tensor | None = None, scale: float = 0.0, shortest: int = 1,
) -> Tensor:  # fmt: skip
    B, Hq, D = q.shape
    H = k.full_precision.shape[1]
    buffers = (*k[:3], *v[:3], bias)
    assert all(x is None or x.is_contiguous() for x in buffers) and q.stride(2) == 1
    part, lse = parts_of(q, sum(splits))
    k_side, v_side = _side(k, D), _side(v, D)
    _quantized_attention_kernel[(B * H, sum(splits))](
        q, *k_side[:3], k.full_precision, *v_side[:3], v.full_precision,
        pos.contiguous(), k_stop.contiguous(), v_stop.contiguous(), k.book, v.book, bias, part, lse, read, scale,
        shortest, q.stride(), None if bias is None else bias.shape[2], H, k.data.shape[2], v.data.shape[2], k.sinks,
        k.ring, sum(splits), splits[0], **blocks_of(Hq, H, D), K_BITS=k.bits, V_BITS=v.bits, K_GROUP=k_side[3],
        V_GROUP=v_side[3], CHANNELS=k.channels, BLOCK_N=BLOCK_N, SPLIT=SPLIT,
        # whole rows of more than 512 bytes, in several stages, would not fit into 100 KB of shared memory
        **tuned("_quantized_attention_kernel", num_warps=NUM_WARPS,
                num_stages=NUM_STAGES if D * q.element_size() <= 512 else 1),
    )  # fmt: skip
    return part if lse is None else combine(part, lse, q.dtype)
