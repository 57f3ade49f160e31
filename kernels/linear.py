"""Products with weights of few bits: y = x W^T + bias, W in bf16, or in codes of 8 or 4 bits.

A group of inputs shares a scale: W = scale * (code - zero), or scale * code + minimum. Symmetric codes have neither
zero nor minimum: 8-bit ones are signed, 4-bit ones are centred at 8. Codes of 8 bits may also be floats (e4m3), whose
scales are fp32. Other scales and minima are fp16, or 8-bit integers that count steps, each shared by several groups.
Decoding has few rows of x and takes the time of reading W. 16 rows of W lie side by side, [out / 16, in / n, 16, n]
with the n inputs of a 32-bit word (4 bits: 8, 8 bits: 4, bf16: 2), so that a vector has the same inputs of 16 outputs.
For many rows of x, a prompt, W is unpacked some rows at a time for a matmul.

On an x86 CPU with AVX2, few rows of x become 16-bit integers with a step for up to 128 inputs: sums of their products
with 8- or 4-bit codes are exact, and a number is off by 2^-16 of the largest one beside it. With AMX, which multiplies
tiles of bf16, a prompt in fp32 is the sum of two bf16 parts, as is W: products are off by about 2^-16. Without tiles
but with VNNI, which multiplies bytes, a prompt's rows are integers for codes, too; for W in bf16 they are two parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.native import VECTOR, ask
from kernels.op import operation, whole_vectors
from kernels.splits import multiprocessors, share_of
from kernels.tiles import dot
from kernels.tuned import tuned

ROWS = 16  # rows of W side by side
MANY = 32  # rows of x from which a matrix product of unpacked rows is faster than unpacking in registers
MANY_BF16 = 8  # rows from which torch is faster with weights as they are in bf16, where the processor multiplies tiles
WORD = 4  # bytes that a lane holds


class Weight(NamedTuple):
    """A packed weight [out, in]; out is padded to blocks of 16 rows.

    packed uint8, or float8_e4m3fn, [out / 16, in / n, 16, n * bits / 8] (`interleave`); scale [out / 16, groups, 16]
    fp16, int8 if there are steps, None in bf16; step fp16 [out / 16, groups / s, 16]; zero, of 4-bit codes, uint8 [out
    / 16, groups, 8] (`pack_zeros`); minimum and min_step like scale and step. A group has a multiple of 16 inputs.
    """

    packed: Tensor
    scale: Tensor | None = None
    step: Tensor | None = None
    zero: Tensor | None = None
    minimum: Tensor | None = None
    min_step: Tensor | None = None

    def blocks(self, index: slice | Tensor) -> Weight:
        """The weight of some blocks of 16 rows, by an index of the first dimension."""
        return Weight(*(None if t is None else t[index] for t in self))  # type: ignore[arg-type]


# ---- layouts ----


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes uint8, int8 or float8 [out, in], bf16 for 16 bits -> bytes uint8 [out, in * bits / 8], the first input
    lowest."""
    if bits == 4:
        return codes[:, ::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.uint8)


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`."""
    if data.dtype == torch.float8_e4m3fn:
        return data
    if bits == 4:
        return torch.stack((data & 15, data >> 4), -1).flatten(1)
    return data.contiguous().view(torch.int8 if bits == 8 else torch.bfloat16)


def pack_zeros(zero: Tensor) -> Tensor:
    """Zeros uint8 [..., 16] of 4-bit codes -> [..., 8]: a byte has those of two rows 8 apart, the first lowest."""
    return zero[..., :8] | (zero[..., 8:] << 4)


def unpack_zeros(data: Tensor) -> Tensor:
    """The inverse of `pack_zeros`."""
    return torch.cat((data & 15, data >> 4), -1)


def interleave(data: Tensor) -> Tensor:
    """Rows uint8 [out, n], out a multiple of 16 -> [out / 16, n / 4, 16, 4]."""
    return data.view(-1, ROWS, data.shape[1] // WORD, WORD).transpose(1, 2).contiguous()


def separate(data: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    return data.transpose(1, 2).flatten(0, 1).flatten(1)


def dequantize(
    codes: Tensor,
    scale: Tensor | None,
    step: Tensor | None,
    zero: Tensor | None,
    minimum: Tensor | None,
    min_step: Tensor | None,
    bits: int,
) -> Tensor:
    """codes [out, in]; scale, zero and minimum [out, groups]; steps [out, fewer groups] -> fp32 [out, in]."""
    if scale is None:
        return codes.float()
    grouped = codes.float().unflatten(1, (scale.shape[1], -1))
    offset = zero.float()[..., None] if zero is not None else 8.0 if bits == 4 and minimum is None else 0.0
    weight = (grouped - offset) * in_steps(scale, step)[..., None]
    return (weight if minimum is None else weight + in_steps(minimum, min_step)[..., None]).flatten(1)


def in_steps(x: Tensor, step: Tensor | None) -> Tensor:
    """Scales or minima [out, groups] in fp32."""
    if step is None:
        return x.float()
    return (x.float().unflatten(1, (step.shape[1], -1)) * step.float()[..., None]).flatten(1)


def sharing(x: Tensor | None, step: Tensor | None) -> int:
    """Groups that share a step, of packed scales or minima [blocks, groups, 16]."""
    return 1 if x is None or step is None else x.shape[1] // step.shape[1]


# ---- the products ----


def serves_dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """On a CPU few rows of x go through C++: torch takes up to twice as long for 2 to 16 rows, and for one in bf16.

    For one row in fp32, torch is a tenth faster on an Intel Xeon with AVX-512; on an AMD EPYC it takes up to twice as
    long without AVX-512, and two to three times as long with it.
    """
    rows, bf16 = x.numel() // x.shape[-1], x.dtype == torch.bfloat16
    here = rows < MANY and weight.dtype == x.dtype and weight.is_contiguous()
    here = here and not torch.is_grad_enabled() and x.shape[-1] % VECTOR == 0
    here = here and (rows > 1 or bf16 or ask("multiplies_one_row"))
    return here and not (bf16 and rows >= MANY_BF16 and ask("has_tiles"))


@operation(cpp=serves_dense, fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] not packed, bias [out] -> [..., out]."""
    return F.linear(x, weight, bias)


def separate_all(w: Weight, bits: int) -> Weight:
    """The arguments of `dequantize` except bits: codes and the groups' numbers, row by row."""
    zero = None if w.zero is None else unpack_zeros(w.zero)
    rows = (None if t is None else t.transpose(1, 2).flatten(0, 1) for t in (*w[1:3], zero, *w[4:]))
    return Weight(unpack_bits(separate(w.packed), bits), *rows)


@operation(
    cpp=whole_vectors,
    fake=lambda x, packed, *_: x.new_empty(*x.shape[:-1], packed.shape[0] * ROWS),
)
def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bias: Tensor | None, bits: int,
) -> Tensor:  # fmt: skip
    """x [..., in] fp32 or bf16, a `Weight`, bias fp32 [out] -> [..., out] in the dtype of x; sums in fp32."""
    w = Weight(packed, scale, step, zero, minimum, min_step)
    weight = dequantize(*separate_all(w, bits), bits).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


# ---- Triton ----

UNPACKED = 256  # rows of x from which W is unpacked, once, for cuBLAS, instead of in registers by every tile of rows
UNPACK_TILE = 1 << 24  # numbers of W that are unpacked at a time: 32 MB in bf16, which an H100's L2 holds
SPLIT = 4  # the fewest tiles of a row of W that a program reads, if rows are split


@triton.jit
def _code(b_w, mask, j: tl.constexpr, BITS: tl.constexpr, E4M3: tl.constexpr):
    """Number j of int32 words, in fp32 and exactly; of 4 bits less 8. mask: the ones of a code.

    A code stays where it is in its half of the word: as the mantissa of 2^(23 - at), of which bit `at` counts as 1. One
    instruction puts the exponent around it and one subtracts it; a conversion takes a shift more, at a lower rate. The
    mask is no constant: an instruction takes one, and ptxas would load a second one again for every code.
    """
    if BITS == 16:
        return (b_w << 16 if j == 0 else b_w & -0x10000).to(tl.float32, bitcast=True)
    elif E4M3:  # a sign, 4 bits of exponent and 3 of mantissa, in their places in fp32: the number times 2^-120
        b_w = b_w << (24 - 8 * j)
        return ((b_w & -0x80000000) | (b_w >> 4 & 0x07F00000)).to(tl.float32, bitcast=True) * 2.0**120
    else:
        HALF: tl.constexpr = 16 // BITS
        AT: tl.constexpr = j % HALF * BITS
        EXPONENT: tl.constexpr = (127 + 23 - AT) << 23
        if BITS == 8:
            b_w = b_w ^ -0x7F7F7F80  # 0x80808080: signed codes and 128
        if j >= HALF:
            b_w = b_w >> 16
        return ((b_w & (mask << AT)) | EXPONENT).to(tl.float32, bitcast=True) - (2.0 ** (23 - AT) + 2 ** (BITS - 1))


@triton.jit
def _in_steps(ptr, step, group, base, lane, S: tl.constexpr, GROUPS, real):
    """Scales or minima of groups [1, C, 1] of blocks [R, 1, 1] -> fp32 [R, C, 16]."""
    value = tl.load(ptr + base * (GROUPS * 16) + (group * 16 + lane), mask=real, other=0).to(tl.float32)
    if step is not None:
        steps = step + base * (GROUPS // S * 16) + (group // S * 16 + lane)
        value *= tl.load(steps, mask=real, other=0.0).to(tl.float32)
    return value


@triton.jit
def _offset(b_s, zero, minimum, min_step, group, base, lane, mask, BITS: tl.constexpr, MS: tl.constexpr, GROUPS, real):
    """What W = b_s * `_code` + offset has beside the scales b_s, with zeros or minima: fp32 of the shape of b_s."""
    if minimum is not None:
        offset = _in_steps(minimum, min_step, group, base, lane, MS, GROUPS, real)
        if BITS == 4:
            offset += 8 * b_s
    else:
        b_z = tl.load(zero + base * (GROUPS * 8) + (group * 8 + lane % 8), mask=real, other=0).to(tl.int32)
        at = lane // 8 * 4
        exponent = (127 + 23 - at) << 23
        middle = exponent.to(tl.float32, bitcast=True) + 8
        offset = (middle - ((b_z & (mask << at)) | exponent).to(tl.float32, bitcast=True)) * b_s
    return offset


@triton.jit
def _number(
    b_w, mask, b_s, offset, j: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, E4M3: tl.constexpr = False
):
    num = _code(b_w, mask, j, BITS, E4M3)
    if b_s is not None:
        num *= b_s
    if offset is not None:
        num += offset
    return num.to(DTYPE)


@triton.jit
def _numbers(b_w, mask, b_s, offset, BITS: tl.constexpr, E4M3: tl.constexpr, DTYPE: tl.constexpr):
    """Words [R, C, 16] and their scales and offsets -> W [R * 16, C * 32 / BITS]; those of a word in one thread."""
    R: tl.constexpr = b_w.shape[0]
    C: tl.constexpr = b_w.shape[1]
    if BITS == 16:
        num = tl.join(_number(b_w, mask, b_s, offset, 0, BITS, DTYPE), _number(b_w, mask, b_s, offset, 1, BITS, DTYPE))
    elif BITS == 8:
        w02 = tl.join(
            _number(b_w, mask, b_s, offset, 0, BITS, DTYPE, E4M3), _number(b_w, mask, b_s, offset, 2, BITS, DTYPE, E4M3)
        )
        w13 = tl.join(
            _number(b_w, mask, b_s, offset, 1, BITS, DTYPE, E4M3), _number(b_w, mask, b_s, offset, 3, BITS, DTYPE, E4M3)
        )
        num = tl.join(w02, w13)
    else:
        w04 = tl.join(_number(b_w, mask, b_s, offset, 0, BITS, DTYPE), _number(b_w, mask, b_s, offset, 4, BITS, DTYPE))
        w15 = tl.join(_number(b_w, mask, b_s, offset, 1, BITS, DTYPE), _number(b_w, mask, b_s, offset, 5, BITS, DTYPE))
        w26 = tl.join(_number(b_w, mask, b_s, offset, 2, BITS, DTYPE), _number(b_w, mask, b_s, offset, 6, BITS, DTYPE))
        w37 = tl.join(_number(b_w, mask, b_s, offset, 3, BITS, DTYPE), _number(b_w, mask, b_s, offset, 7, BITS, DTYPE))
        num = tl.join(tl.join(w04, w26), tl.join(w15, w37))
    num = tl.permute(tl.reshape(num, [R, C, 16, 32 // BITS]), [0, 2, 1, 3])
    return tl.reshape(num, [R * 16, C * (32 // BITS)])


@triton.jit
def _packed_linear_kernel(
    x, packed, scale, step, zero, minimum, min_step, bias, expert, y, mask, M, blocks, IN,
    BITS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MS: tl.constexpr,
    E4M3: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROWS_X: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program multiplies R blocks of 16 rows of W by ROWS_X rows of x: one by sums, 16 and more on tensor cores.

    It takes C words of each row at a time, of its share of the inputs, and writes y [share, M, out]. S and MS: groups
    that share a step of scales and of minima. One row: a thread adds up its words of four rows of W in fp32, scaled
    once a word; threads' sums meet behind the loop. expert: of each row of x, whose weight, of `blocks`
    blocks, it is multiplied with; None: one weight.
    """
    PER: tl.constexpr = 32 // BITS  # inputs in a word
    block = tl.program_id(0) * R + tl.arange(0, R)
    offs_m = tl.program_id(1) * ROWS_X + tl.arange(0, ROWS_X)
    share = tl.program_id(2)
    words = IN // PER
    base = tl.minimum(block, blocks - 1).to(tl.int64)[:, None, None]  # beyond the end: the last block, not stored
    if expert is not None:
        base += tl.load(expert + tl.program_id(1)) * blocks
        x += tl.program_id(1).to(tl.int64) * IN
    lane = tl.arange(0, 16)[None, None, :]
    acc = tl.zeros([R, C, 16] if ROWS_X == 1 else [R * 16, ROWS_X], tl.float32)
    begin, end = share_of(words, share, tl.num_programs(2), C)
    for first in tl.range(begin, end, C, num_stages=STAGES):
        offs_c = (first + tl.arange(0, C))[None, :, None]
        real = offs_c < words
        b_w = tl.load(packed + base * (words * 16) + (offs_c * 16 + lane), mask=real, other=0)  # [R, C, 16]
        b_s = None
        offset = None
        if scale is not None:
            group = offs_c * PER // G
            b_s = _in_steps(scale, step, group, base, lane, S, IN // G, real)
            if zero is not None or minimum is not None:
                offset = _offset(b_s, zero, minimum, min_step, group, base, lane, mask, BITS, MS, IN // G, real)
        if ROWS_X == 1:
            part = tl.zeros([R, C, 16], tl.float32)
            inputs = tl.zeros([1, C, 1], tl.float32)
            for j in tl.static_range(PER):
                one = tl.load(x + offs_c * PER + j, mask=real, other=0.0).to(tl.float32)
                part += _code(b_w, mask, j, BITS, E4M3) * one
                inputs += one
            acc += part if b_s is None else part * b_s
            if offset is not None:
                acc += offset * inputs
        else:
            offs_k = first * PER + tl.arange(0, C * PER)
            b_x = tl.load(x + offs_m[:, None] * IN + offs_k, mask=(offs_m[:, None] < M) & (offs_k < IN), other=0.0)
            acc = dot(_numbers(b_w, mask, b_s, offset, BITS, E4M3, b_x.dtype), tl.trans(b_x), acc)
    offs_out = tl.reshape(block[:, None] * 16 + tl.arange(0, 16), [R * 16])
    if ROWS_X == 1:
        acc = tl.reshape(tl.sum(acc, 1), [R * 16, 1])
    if bias is not None and share == 0:
        acc += tl.load(bias + offs_out, mask=offs_out < blocks * 16, other=0.0)[:, None]
    p_y = y + (share * M + offs_m).to(tl.int64)[None, :] * (blocks * 16) + offs_out[:, None]
    tl.store(p_y, acc.to(y.dtype.element_ty), mask=(offs_out < blocks * 16)[:, None] & (offs_m < M)[None, :])


@triton.jit
def _unpack_rows(
    packed, scale, step, zero, minimum, min_step, w, mask, IN,
    BITS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MS: tl.constexpr, E4M3: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A block's 16 rows, C words of each -> w [out, IN]."""
    PER: tl.constexpr = 32 // BITS
    block = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * C
    words, offs_c, lane = IN // PER, (first + tl.arange(0, C))[None, :, None], tl.arange(0, 16)[None, None, :]
    real = offs_c < words
    b_w = tl.load(packed + block * (words * 16) + (offs_c * 16 + lane), mask=real, other=0)
    b_s = None
    offset = None
    if scale is not None:
        group = offs_c * PER // G
        b_s = _in_steps(scale, step, group, block, lane, S, IN // G, real)
        if zero is not None or minimum is not None:
            offset = _offset(b_s, zero, minimum, min_step, group, block, lane, mask, BITS, MS, IN // G, real)
    offs_k = first * PER + tl.arange(0, C * PER)
    p_w = w + (block * 16 + tl.arange(0, 16))[:, None] * IN + offs_k
    tl.store(p_w, _numbers(b_w, mask, b_s, offset, BITS, E4M3, w.dtype.element_ty), mask=(offs_k < IN)[None, :])


def tile_of(M: int, bits: int, blocks: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Constants of the kernel: rows of x and blocks of W of a program, words of a row of W in a tile, stages, warps.

    One row: a thread takes 16 bytes of a block. Three tiles are on their way while one is multiplied. Blocks of a
    program share what is done for x; where there are few blocks, more warps read one. On tensor cores: 64 rows of x and
    128 inputs, half of both in fp32 or for W in bf16, a quarter of the inputs for both: what spills no registers.
    """
    if M == 1:
        R = next((r for r in (4, 2) if blocks >= 4 * r * multiprocessors(device)), 1)
        return dict(R=R, C=64 if R == 1 else 32, ROWS_X=1, STAGES=4, num_warps=8 if R == 1 else 4)
    fp32, bf16_weight = dtype == torch.float32, bits == 16
    rows = min(32 if fp32 or bf16_weight else 64, max(16, triton.next_power_of_2(M)))
    return dict(R=4, C=4 * bits >> fp32 + bf16_weight, ROWS_X=rows, STAGES=3, num_warps=4)


def share_count(programs: int, tiles: int, device: torch.device) -> int:
    """Shares of the inputs that give about two programs per multiprocessor. A tenth less is accepted: a second launch,
    which adds up the shares' sums, costs more than that."""
    return max(1, min(round(2 * multiprocessors(device) / programs), tiles // SPLIT))


def _shapes(w: Weight, n: int, bits: int) -> dict[str, int]:
    group = n if w.scale is None else n // w.scale.shape[1]
    floats = w.scale is not None and w.scale.dtype == torch.float32  # no others have scales in fp32
    return dict(BITS=bits, G=group, S=sharing(w.scale, w.step), MS=sharing(w.minimum, w.min_step), E4M3=floats)


@packed_linear.triton
def _in_triton(
    x: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bias: Tensor | None, bits: int,
) -> Tensor:  # fmt: skip
    w = Weight(packed.view(torch.int32), scale, step, zero, minimum, min_step)
    lead, blocks, x = x.shape[:-1], packed.shape[0], x.flatten(0, -2).contiguous()
    M, n = x.shape
    if M >= UNPACKED:
        return _unpacked_product(x, w, bias, bits).unflatten(0, lead)
    tile = tile_of(M, bits, blocks, x.dtype, x.device)
    grid = (triton.cdiv(blocks, tile["R"]), triton.cdiv(M, tile["ROWS_X"]))
    shares = share_count(grid[0] * grid[1], triton.cdiv(n * bits // 32, tile["C"]), x.device)
    y = x.new_empty(shares, M, blocks * ROWS, dtype=x.dtype if shares == 1 else torch.float32)
    given = (x, *w, bias, None, y, 2**bits - 1, M, blocks, n)
    tile |= tuned("_packed_linear_kernel", num_warps=tile["num_warps"])
    _packed_linear_kernel[(*grid, shares)](*given, **_shapes(w, n, bits), **tile)
    return (y[0] if shares == 1 else y.sum(0).to(x.dtype)).unflatten(0, lead)


def _unpacked_product(x: Tensor, w: Weight, bias: Tensor | None, bits: int) -> Tensor:
    """For a prompt: UNPACK_TILE numbers of W at a time are unpacked for cuBLAS, in the dtype of x."""
    n, blocks = x.shape[1], len(w.packed)
    y = x.new_empty(len(x), blocks * ROWS)
    some = min(blocks, max(1, UNPACK_TILE // (n * ROWS)))
    rows = x.new_empty(some * ROWS, n)
    for first in range(0, blocks, some):
        part = w.blocks(slice(first, first + some))
        count = len(part.packed)
        _unpack_rows[(count, triton.cdiv(n, 128))](
            *part, rows, 2**bits - 1, n, **_shapes(w, n, bits), C=4 * bits, **tuned("_unpack_rows", num_warps=4)
        )
        torch.mm(x, rows[: count * ROWS].T, out=y[:, first * ROWS : (first + count) * ROWS])
    return y if bias is None else y.add_(bias)
