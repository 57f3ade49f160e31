"""What the Triton kernels of several operations do to a tile in registers: multiply, attend, rotate, pack and unpack.

These are Triton functions alone; how many tiles a launch takes, and where they go, is in kernels/splits.py.
"""

from __future__ import annotations

from kernels.backend import HIP, INTERPRETED, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)

_INTERPRETED = tl.constexpr(INTERPRETED)
_PRECISION = tl.constexpr("ieee" if HIP else "tf32x3")


@triton.jit
def dot(a, b, acc=None):
    """a @ b + acc on tensor cores, to fp32; fp32 operands as three TF32 products, which keep fp32's precision."""
    if _INTERPRETED:  # the interpreter would multiply the bit patterns of bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=_PRECISION)


@triton.jit
def filled(pos, pid_b, T):
    """The number of slots of row pid_b that matter: all T, or those up to its position."""
    seq_len = T
    if pos is not None:
        seq_len = tl.minimum(tl.load(pos + pid_b) + 1, T).to(tl.int32)
    return seq_len


# ---- softmax attention over blocks of tokens ----


@triton.jit
def softmax_step(logits, inside, b_v, m_i, l_i, acc):
    """Online softmax over a block of tokens, the first of which must be inside: logits [G, N] in units of log 2,
    inside [N], b_v [N, D]; m_i, l_i [G] and acc [G, D] are the running maximum, sum and output, and returned."""
    logits = tl.where(inside[None, :], logits, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    p, shrink = tl.exp2(logits - m_new[:, None]), tl.exp2(m_i - m_new)
    l_i = l_i * shrink + tl.sum(p, 1)
    return m_new, l_i, dot(p.to(b_v.dtype), b_v, acc * shrink[:, None])


@triton.jit
def write_part(
    m_i, l_i, acc, part, lse, head, offs_g, split, S, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store what a program has seen, of query heads `head` [G] of the batch: normalized, and the log of its weight."""
    offs_d = tl.arange(0, BLOCK_D)
    l_i = tl.maximum(l_i, 1e-30)  # a program without tokens writes zeros and -inf
    at = head * S + split
    acc = (acc / l_i[:, None]).to(part.dtype.element_ty)
    tl.store(part + at[:, None] * D + offs_d, acc, mask=(offs_g[:, None] < G) & (offs_d < D))
    if lse is not None:
        tl.store(lse + at, m_i + tl.log2(l_i), mask=offs_g < G)


# ---- keys that are rebuilt and rotated in registers ----


@triton.jit
def halves(x):
    """x [N, C] -> its columns before and after C / 2. Both are in the same registers of the same thread."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def rotated_logits(
    k1, k2, q, q_head, cos, sin, inside, offs_g, first: tl.constexpr, logits, G: tl.constexpr, D: tl.constexpr
):
    """Add to logits [N, G] what pairs of channels (k1, k2) [N, C] from `first` on give, rotated; q [G, D]."""
    offs_c = first + tl.arange(0, k1.shape[1])
    real = inside[:, None] & (offs_c < D // 2)
    b_cos, b_sin = tl.load(cos + offs_c, mask=real, other=0.0), tl.load(sin + offs_c, mask=real, other=0.0)
    p_q, some = q + offs_g * q_head + offs_c[:, None], (offs_g < G) & (offs_c[:, None] < D // 2)
    b_q = tl.load(p_q, mask=some, other=0.0)
    logits = dot((k1 * b_cos - k2 * b_sin).to(b_q.dtype), b_q, logits)
    return dot((k2 * b_cos + k1 * b_sin).to(b_q.dtype), tl.load(p_q + D // 2, mask=some, other=0.0), logits)


# ---- packed tokens: 8 channels are a word of BITS bytes, 32 have a scale and a zero ----


@triton.jit
def scale_zero(pairs):
    """int32 that hold two fp16 numbers -> scale, zero in fp32."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    zero = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def load_words(packed, third, slot, inside, offs_u, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of 8 channels each, [N, U]. Of 3 bits, the low two come from `packed` and the third from `third`, which is
    read by bytes; both come from there if rows are not whole words."""
    real = inside[:, None] & (offs_u < D // 8)
    if BITS == 3:
        if D % 16 == 0:
            low = tl.load(packed + slot[:, None] * (D * 3 // 16) + offs_u, mask=real, other=0).to(tl.int32) & 0xFFFF
        else:
            at = third + slot[:, None] * (D * 3 // 8) + 2 * offs_u
            low = tl.load(at, mask=real, other=0).to(tl.int32) | (tl.load(at + 1, mask=real, other=0).to(tl.int32) << 8)
        high = tl.load(third + slot[:, None] * (D * 3 // 8) + D // 4 + offs_u, mask=real, other=0).to(tl.int32)
        return low | (high << 16)
    else:
        return tl.load(packed + slot[:, None] * (D // 8) + offs_u, mask=real, other=0)


@triton.jit
def _channel(word, scale, zero, codes, channel: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, book):
    """One channel of every unit, dequantized: word, scale, zero, codes [N, U] -> [N, U]. codes: signs, or None; book:
    the numbers that codes stand for, e4m3 for 8 bits, or None."""
    # 3 bits: the low two of all channels, then the third ones
    if BITS == 3:  # noqa: SIM108
        code = ((word >> (2 * channel)) & 3) | (((word >> (16 + channel)) & 1) << 2)
    else:
        code = (word >> (BITS * channel)) & (2**BITS - 1)
    if book is None:
        value = code.to(tl.float32) * scale + zero
    elif BITS == 8:  # e4m3 as the high bits of fp16, whose exponent is 8 less
        half = (((code & 127) << 7) | ((code & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0 * scale
    else:
        value = tl.load(book + code) * scale
    if codes is not None:
        # the even subvector's code is in the low half of the byte, its first channel in the highest bit of the half
        bit: tl.constexpr = 3 - channel if channel < 4 else 11 - channel
        value = tl.where((codes >> bit) & 1 != 0, value, -value)
    return value.to(DTYPE)


@triton.jit
def unpack_tile(word, pairs, codes, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Words [N, U] of 8 channels, int32 [N, U / 4] of scale and zero, codes [N, U] or None -> [N, 8 * U] in order."""
    N: tl.constexpr = word.shape[0]
    U: tl.constexpr = word.shape[1]
    scale, zero = scale_zero(tl.reshape(tl.broadcast_to(pairs[:, :, None], [N, U // 4, 4]), [N, U]))
    return unpack_units(word, scale, zero, codes, BITS, DTYPE)


@triton.jit
def unpack_units(word, s, z, c, BITS: tl.constexpr, DTYPE: tl.constexpr, book=None):
    """`unpack_tile` with a scale and a zero for every unit of 8 channels: fp32 [N, U], or numbers.

    A unit is in one thread, which then holds its 8 neighbouring channels: nothing moves between threads.
    """
    N: tl.constexpr = word.shape[0]
    U: tl.constexpr = word.shape[1]
    x04 = tl.join(_channel(word, s, z, c, 0, BITS, DTYPE, book), _channel(word, s, z, c, 4, BITS, DTYPE, book))
    x15 = tl.join(_channel(word, s, z, c, 1, BITS, DTYPE, book), _channel(word, s, z, c, 5, BITS, DTYPE, book))
    x26 = tl.join(_channel(word, s, z, c, 2, BITS, DTYPE, book), _channel(word, s, z, c, 6, BITS, DTYPE, book))
    x37 = tl.join(_channel(word, s, z, c, 3, BITS, DTYPE, book), _channel(word, s, z, c, 7, BITS, DTYPE, book))
    value = tl.join(tl.join(x04, x26), tl.join(x15, x37))
    return tl.reshape(value, [N, 8 * U])


@triton.jit
def _two(word, channel: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes `channel` and `channel` + 4 of words that have them 16 bits apart, as bf16 or fp16: the lowest bits of the
    mantissa of 128 or 1024. Two codes take a shift, a logic instruction and a subtraction, and no conversion."""
    ONES: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
    BASE: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
    two = ((word >> (BITS * channel)) & ((2**BITS - 1) * 0x10001)) | ONES
    low, high = two.to(tl.int16).to(DTYPE, bitcast=True), (two >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if _INTERPRETED:  # the interpreter would subtract the bit patterns of bf16
        low, high = low.to(tl.float32), high.to(tl.float32)
    return tl.join((low - BASE).to(DTYPE), (high - BASE).to(DTYPE))


@triton.jit
def unpack_codes(word, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Words [N, U] of 8 codes of 2 or 4 bits -> the codes in DTYPE, bf16 or fp16, [N, 8 * U], in order."""
    N: tl.constexpr = word.shape[0]
    U: tl.constexpr = word.shape[1]
    word = word.to(tl.int32)
    if BITS == 2:
        word = (word & 0xFFFF) | (word << 8)  # without the sign
    x04, x15 = _two(word, 0, BITS, DTYPE), _two(word, 1, BITS, DTYPE)
    x26, x37 = _two(word, 2, BITS, DTYPE), _two(word, 3, BITS, DTYPE)
    return tl.reshape(tl.join(tl.join(x04, x26), tl.join(x15, x37)), [N, 8 * U])


@triton.jit
def encode_groups(x, BITS: tl.constexpr):
    """Groups of 32 channels [N, 32] fp32 -> int32 [N, BITS] of codes, int32 [N] of scale and zero.

    Divisions are rounded as torch does, and ties go to the even code, so that both versions give the same bytes.
    """
    LEVELS: tl.constexpr = 2**BITS - 1
    zero = tl.minimum(tl.maximum(tl.min(x, 1), -65504.0), 65504.0).to(tl.float16)
    scale = tl.div_rn(tl.max(x, 1) - zero.to(tl.float32), LEVELS * 1.0)
    scale = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16)
    step = tl.maximum(scale.to(tl.float32), 1e-8)
    code = tl.div_rn(x - zero.to(tl.float32)[:, None], tl.broadcast_to(step[:, None], x.shape))
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS * 1.0) + 12582912.0 - 12582912.0  # 1.5 * 2^23: rounds to an integer
    code = tl.reshape(code.to(tl.int32), [x.shape[0], BITS, 32 // BITS])
    words = tl.sum(code << (tl.arange(0, 32 // BITS) * BITS), 2)
    pair = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return words, pair | (zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)
