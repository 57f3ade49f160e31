"""Attention of one query per row over three kinds of tokens: sinks, chosen packed tokens, and the newest ones.

Self-Indexing KVCache attends to sinks in full precision, to the chosen tokens of the compressed store, and to a ring
of decoded tokens in full precision, under one softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.gather_attention import gather_rows
from kernels.native import VECTOR
from kernels.op import operation, picked
from kernels.quantize import GROUP, WORDS
from kernels.ring import ring_positions
from kernels.sign_codes import SUB
from kernels.splits import block_size, blocks_of, combine, parts_of, share_of, split_count
from kernels.tiles import LOG2_E, dot, softmax_step, unpack_tile, write_part
from kernels.tuned import tuned

UNIT = 8  # channels that are one word of `bits` bytes, beside one byte of sign codes


class PackedTokens(NamedTuple):
    """T slots of each row and KV head, [>= B, Hkv, T, ...], some of which a list chooses."""

    k: Tensor  # uint8 [..., D * bits / 8]: key magnitudes, or signed keys if there are no codes; at 16 bits [..., D]
    v: Tensor
    bits: int
    k_params: Tensor | None = None  # fp16 [..., D / 32, 2] scales and zeros; none at 16 bits, nor the following
    v_params: Tensor | None = None
    alpha: Tensor | None = None  # fp32 [>= B, Hkv, D]: keys are stored divided by it
    codes: Tensor | None = None  # uint8 [..., D / 8]: signs of the keys, 4 channels to 4 bits


class FullPrecisionTokens(NamedTuple):
    """Tokens in full precision. Empty slots weigh 0: keys may be anything, values must be finite."""

    sink_k: Tensor  # [>= B, Hkv, n, D]: the first min(n, prompt_len) slots are attended to
    sink_v: Tensor
    tail_k: Tensor  # [>= B, Hkv, R, D]: the token at position p in slot (p - prompt_len) % R
    tail_v: Tensor


def _reads(q: Tensor, idx: Tensor, count: Tensor, packed: PackedTokens, *_: Any) -> dict[str, int]:
    parts = {f"packed_{name}": x for name, x in packed._asdict().items() if name not in ("bits", "alpha")}
    return {name: picked(idx, x) for name, x in parts.items()}


def _serves(q: Tensor, idx: Tensor, count: Tensor, packed: PackedTokens, *_: Any) -> bool:
    return q.shape[2] % (VECTOR if packed.k_params is None else GROUP) == 0


@operation(cpp=_serves, reads=_reads)
def packed_gather_attention(
    q: Tensor, idx: Tensor, count: Tensor, packed: PackedTokens, full_precision: FullPrecisionTokens, pos: Tensor,
    prompt_len: Tensor, flushed: Tensor,
) -> Tensor:  # fmt: skip
    """Softmax attention over the sinks, the first `count` of the packed slots idx, and the newest tokens.

    q [B, Hq, D] (rotated), idx [B, Hkv, K] int64, count [B, Hkv], pos [B] of the newest token, prompt_len [>= B],
    flushed [1]: decoded tokens that are packed already, so that the ring holds positions prompt_len + flushed to pos
    -> [B, Hq, D]. Scale 1/sqrt(D). Entries of idx past the count point anywhere.
    """
    alpha, (sink_k, sink_v, tail_k, tail_v) = packed.alpha, full_precision
    B, Hq, D = q.shape
    H = idx.shape[1]
    grouped = q.view(B, H, -1, D).float()
    chosen_k, chosen_v = fetch(packed, idx)
    chosen = torch.arange(idx.shape[2], device=q.device) < count[..., None]
    sinks = torch.arange(sink_k.shape[2], device=q.device) < prompt_len[:B, None]
    tail = ring_positions(pos - prompt_len[:B], tail_k.shape[2]) >= flushed
    mask = torch.cat((sinks[:, None].expand(B, H, -1), chosen, tail[:, None].expand(B, H, -1)), 2)

    scaled = grouped if alpha is None else grouped * alpha[:B, :, None]
    scaled = scaled if packed.k_params is None else unit_order(scaled)
    # one softmax over three parts: joining their logits copies one number per token, joining the keys would copy D
    parts = ((grouped, sink_k[:B]), (scaled, chosen_k), (grouped, tail_k[:B]))
    logits = torch.cat([x @ keys.float().mT for x, keys in parts], 3) * D**-0.5
    p = torch.where(mask[:, :, None], logits, float("-inf")).softmax(-1).to(q.dtype)
    values = (sink_v[:B], chosen_v.to(q.dtype).masked_fill(~chosen[..., None], 0), tail_v[:B])
    split = p.split([x.shape[2] for x in values], 3)
    y = [(part @ x).float() for part, x in zip(split, values, strict=True)]
    y[1] = y[1] if packed.v_params is None else y[1].unflatten(-1, (UNIT, -1)).mT.flatten(-2)
    return (y[0] + y[1] + y[2]).to(q.dtype).view(B, Hq, D)


def fetch(packed: PackedTokens, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Keys, still divided by alpha (eq. 13), and values (eq. 11) of slots idx [B, Hkv, K] -> two [B, Hkv, K, D].

    Below 16 bits the channels come in `unit_order`.
    """

    def take(buffer: Tensor) -> Tensor:
        return gather_rows(buffer.flatten(3), idx)

    if packed.k_params is None or packed.v_params is None:
        return take(packed.k), take(packed.v)
    signs = None if packed.codes is None else take(packed.codes)
    k = unpack_units(take(packed.k), take(packed.k_params.flatten(3)), packed.bits, signs)
    return k, unpack_units(take(packed.v), take(packed.v_params.flatten(3)), packed.bits)


def read_packed(packed: PackedTokens, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantized keys and values of slots idx [B, Hkv, K] -> two [B, Hkv, K, D], channels in their order."""
    k, v = fetch(packed, idx)
    if packed.k_params is not None:
        k, v = (x.unflatten(-1, (UNIT, -1)).mT.flatten(-2) for x in (k, v))
    return (k if packed.alpha is None else k * packed.alpha[: len(k), :, None]), v


def unit_order(x: Tensor) -> Tensor:
    """Reorder [..., D]: the first channels of all units of 8 channels, then their second channels, and so on."""
    return x.unflatten(-1, (-1, UNIT)).mT.flatten(-2)


def unpack_units(packed: Tensor, params: Tensor, bits: int, signs: Tensor | None = None) -> Tensor:
    """Bytes [..., D * bits / 8], params [..., D / 16] and sign codes [..., D / 8] -> fp32 [..., D] in `unit_order`.

    A unit of 8 channels is one word of `bits` bytes and one byte of signs. Neighbours in this order are the same bits
    of neighbouring words, so a compiled loop over them is fully vectorized; the order of channels would need a shuffle
    for every number.
    """
    words = packed.view(WORDS[bits])
    words, signs = words.int() if bits < 8 else words, None if signs is None else signs.int()
    scale, zero = params.float().unflatten(-1, (-1, 2)).unbind(-1)
    each = GROUP // UNIT
    if words.shape[-1] % each:  # the last group is smaller
        scale, zero = (x.repeat_interleave(each, -1)[..., : words.shape[-1]] for x in (scale, zero))
    else:
        scale, zero = scale[..., None], zero[..., None]
        words, signs = words.unflatten(-1, (-1, each)), None if signs is None else signs.unflatten(-1, (-1, each))
    whole = words.dim() > packed.dim()
    out = []
    for r in range(UNIT):
        x = (words >> (bits * r) & (2**bits - 1)).float() * scale + zero
        if signs is not None:
            # the even subvector's code is in the low half of the byte, its first channel in the highest bit of the half
            bit = signs >> (3 - r if r < SUB else 11 - r) & 1
            x = x * (bit * 2 - 1).float()
        out.append(x.flatten(-2) if whole else x)
    return torch.stack(out, -2).flatten(-2)


# ---- Triton ----

UNPACKED = 32  # most tokens of a block that is unpacked in registers: 64 take 170 and hold two programs, not four
NUM_WARPS, NUM_STAGES = 4, 3


@triton.jit
def _packed_gather_attention_kernel(
    q, idx, count, k, v, k_params, v_params, alpha, codes, sink_k, sink_v, tail_k, tail_v, pos, prompt_len, flushed,
    part, lse, q_strides, idx_strides, count_strides, H, T, K, sinks, ring, S,
    G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, split): its share of the list, the sinks and the tail, laid end to end as they are."""
    pid_bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // H, pid_bh % H
    offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    p_q = q + pid_b * q_strides[0] + (pid_h * G + offs_g[:, None]) * q_strides[1] + offs_d
    b_q = tl.load(p_q, mask=(offs_g[:, None] < G) & (offs_d < D), other=0.0)
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)

    # a ring is empty behind a prompt, and a list may be short: what is shared is what is there, not what could be
    chosen = tl.minimum(tl.load(count + pid_b * count_strides[0] + pid_h * count_strides[1]), K).to(tl.int32)
    n_prompt = tl.load(prompt_len + pid_b).to(tl.int32)
    newest = tl.load(pos + pid_b).to(tl.int32) - n_prompt
    oldest = tl.maximum(tl.load(flushed).to(tl.int32), newest - ring + 1)
    n_sinks = tl.minimum(n_prompt, sinks)
    n_whole = n_sinks + tl.maximum(newest - oldest + 1, 0)
    lo, end = share_of(chosen + n_whole, split, S, BLOCK_N)
    hi = tl.minimum(chosen, end)
    idx += pid_b * idx_strides[0] + pid_h * idx_strides[1]
    if BITS == 16:
        for first in tl.range(lo, hi, BLOCK_N, num_stages=5):
            inside = first + offs_n < hi
            slot = pid_bh * T + tl.load(idx + first + offs_n, mask=inside, other=0)
            real = inside[:, None] & (offs_d < D)
            b_k = tl.load(k + slot[:, None] * D + offs_d, mask=real, other=0.0)
            b_v = tl.load(v + slot[:, None] * D + offs_d, mask=real, other=0.0)
            m_i, l_i, acc = softmax_step(dot(b_q, tl.trans(b_k)) * SCALE, inside, b_v, m_i, l_i, acc)
    else:
        DOWN: tl.constexpr = 0.00390625 if b_q.dtype == tl.float16 else 1.0  # fp16 would overflow: a power of two
        b_qa = (b_q * (tl.load(alpha + pid_bh * D + offs_d, mask=offs_d < D, other=0.0) * DOWN)).to(b_q.dtype)
        offs_u, offs_e = tl.arange(0, BLOCK_D // 8), tl.arange(0, BLOCK_D // 32)
        for first in tl.range(lo, hi, BLOCK_N, num_stages=5):
            inside = first + offs_n < hi
            slot = pid_bh * T + tl.load(idx + first + offs_n, mask=inside, other=0)
            unit, real = slot[:, None] * (D // 8) + offs_u, inside[:, None] & (offs_u < D // 8)
            pair, some = slot[:, None] * ((D + 31) // 32) + offs_e, inside[:, None] & (offs_e < (D + 31) // 32)
            k_words, k_pairs = tl.load(k + unit, mask=real, other=0), tl.load(k_params + pair, mask=some, other=0)
            v_words, v_pairs = tl.load(v + unit, mask=real, other=0), tl.load(v_params + pair, mask=some, other=0)
            signs = codes
            if codes is not None:
                signs = tl.load(codes + unit, mask=real, other=0)
            b_k = unpack_tile(k_words, k_pairs, signs, BITS, b_q.dtype)
            logits = dot(b_qa, tl.trans(b_k)) * (SCALE / DOWN)
            b_v = unpack_tile(v_words, v_pairs, None, BITS, b_q.dtype)
            m_i, l_i, acc = softmax_step(logits, inside, b_v, m_i, l_i, acc)

    # sinks and then tail as one list of whole rows
    hi = end - chosen
    for first in range(tl.maximum(lo - chosen, 0), hi, BLOCK_N):
        offs_i = first + offs_n
        inside = offs_i < hi
        real = inside[:, None] & (offs_d < D)
        sink, tail = (pid_bh * sinks + offs_i) * D, (pid_bh * ring + (oldest + offs_i - n_sinks) % ring) * D
        p_k = tl.multiple_of(tl.where(offs_i < n_sinks, sink_k + sink, tail_k + tail), 16)
        p_v = tl.multiple_of(tl.where(offs_i < n_sinks, sink_v + sink, tail_v + tail), 16)
        b_k = tl.load(p_k[:, None] + offs_d, mask=real, other=0.0)
        b_v = tl.load(p_v[:, None] + offs_d, mask=real, other=0.0)
        m_i, l_i, acc = softmax_step(dot(b_q, tl.trans(b_k)) * SCALE, inside, b_v, m_i, l_i, acc)
    write_part(m_i, l_i, acc, part, lse, pid_bh * G + offs_g, offs_g, split, S, G, D, BLOCK_D)


@packed_gather_attention.triton
def launch(
    q: Tensor, idx: Tensor, count: Tensor, packed: PackedTokens, full_precision: FullPrecisionTokens, pos: Tensor,
    prompt_len: Tensor, flushed: Tensor, block: int | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """The Triton version; tests give block (a power of two >= 16) and splits."""
    (k, v, bits, k_params, v_params, alpha, codes), (sink_k, sink_v, tail_k, tail_v) = packed, full_precision
    B, Hq, D = q.shape
    H, K = idx.shape[1:]
    T, sinks, ring = k.shape[2], sink_k.shape[2], tail_k.shape[2]
    buffers = (k, v, k_params, v_params, alpha, codes, sink_k, sink_v, tail_k, tail_v)
    assert all(x is None or x.is_contiguous() for x in buffers) and q.stride(2) == idx.stride(2) == 1
    if block is None:
        block = block_size(B * H, K + sinks + ring, triton.next_power_of_2(D) * q.element_size(), q.device)
        block = block if bits == 16 else min(block, UNPACKED)
    options = tuned("_packed_gather_attention_kernel", BLOCK_N=block, num_warps=NUM_WARPS, num_stages=NUM_STAGES)
    wave = 2 if bits == 16 else 4  # unpacking waits for latency and arithmetic, not for memory: all that fit
    splits = splits or split_count(B * H, K + sinks + ring, options["BLOCK_N"], q.device, wave)
    part, lse = parts_of(q, splits)
    if bits < 16:  # as words of 8 channels, and pairs of scale and zero
        k, v = k.view(WORDS[bits]), v.view(WORDS[bits])
        k_params, v_params = (None if x is None else x.view(torch.int32) for x in (k_params, v_params))
    _packed_gather_attention_kernel[(B * H, splits)](
        q, idx, count, k, v, k_params, v_params, alpha, codes, sink_k, sink_v, tail_k, tail_v,
        pos.contiguous(), prompt_len, flushed, part, lse, q.stride(), idx.stride(), count.stride(), H, T, K,
        sinks, ring, splits,
        **blocks_of(Hq, H, D, 32), BITS=bits, **options,
    )  # fmt: skip
    return part if lse is None else combine(part, lse, q.dtype)
