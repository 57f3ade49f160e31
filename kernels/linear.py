"""Products with weights of few bits: y = x W^T + bias, W in bf16, or in codes of 8 or 4 bits.

A group of inputs shares a scale: W = scale * (code - zero), or scale * code + minimum. Symmetric codes have neither:
8-bit ones are signed, 4-bit ones are around 8. Scales and minima are fp16, or integers of 8 bits that count steps, of
which several groups share one. Decoding has few rows of x, and its time is that of reading W. 16 rows of W lie side by
side, [out / 16, in / n, 16, n] with the n inputs of a 32-bit word (4 bits: 8, 8 bits: 4, bf16: 2), so that a vector has
the same inputs of 16 outputs. For many rows of x, a prompt, some rows of W at a time are unpacked for a matrix product.

On an x86 CPU with AVX2 few rows of x become integers of 16 bits with a step for up to 128 inputs: sums of their
products with 8- or 4-bit codes are exact, and a number is off by 2^-16 of the largest beside it. On one that multiplies
tiles of bf16 (AMX) a prompt in fp32 is the sum of two bf16 parts, as is W: products are off by about 2^-16. Without
tiles, where it multiplies bytes (VNNI), a prompt's rows are integers for codes, too; for W in bf16 they are two parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native
from kernels.backend import on_cpu, tl, triton, use_native, use_triton
from kernels.splits import multiprocessors
from kernels.tiles import dot

ROWS = 16  # of W side by side
MANY = 32  # rows of x from which a matrix product of unpacked rows is faster than unpacking in registers
MANY_BF16 = 8  # rows from which torch is faster with weights as they are in bf16, where the processor multiplies tiles
TILE = 1 << 21  # numbers that are unpacked for one matrix product: 8 MB in fp32, which the caches hold
WORD = 4  # bytes that a lane holds


class Weight(NamedTuple):
    """A packed weight [out, in]; out is padded to blocks of 16 rows.

    packed uint8 [out / 16, in / n, 16, n * bits / 8] (`interleave`); scale [out / 16, groups, 16] fp16, int8 if there
    are steps, None in bf16; step fp16 [out / 16, groups / s, 16]; zero, of 4-bit codes, uint8 [out / 16, groups, 8]
    (`pack_zeros`); minimum and min_step like scale and step. A group has a multiple of 16 inputs.
    """

    packed: Tensor
    scale: Tensor | None = None
    step: Tensor | None = None
    zero: Tensor | None = None
    minimum: Tensor | None = None
    min_step: Tensor | None = None

    def blocks(self, index: slice | Tensor) -> Weight:
        """Of some of the first dimension, blocks of 16 rows."""
        return Weight(*(None if t is None else t[index] for t in self))  # type: ignore[arg-type]


# ---- layouts ----


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 or int8 [out, in], bf16 for 16 bits -> bytes uint8 [out, in * bits / 8], the first input lowest."""
    if bits == 4:
        return codes[:, ::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.uint8)


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`."""
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


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] not packed, bias [out] -> [..., out].

    On a CPU few rows of x go through C++: torch takes up to twice as long for 2 to 16 of them, and for one in bf16. One
    in fp32 it multiplies a tenth faster on an Intel Xeon with AVX-512; on an AMD EPYC it takes up to twice as long
    without AVX-512, two to three times as long with it.
    """
    rows, bf16 = x.numel() // x.shape[-1], x.dtype == torch.bfloat16
    here = rows < MANY and weight.dtype == x.dtype and weight.is_contiguous()
    here = here and not torch.is_grad_enabled() and use_native(x, x.shape[-1]) and not use_triton(x)
    here = here and (rows > 1 or bf16 or native.multiplies_one_row())
    if here and not (bf16 and rows >= MANY_BF16 and native.has_tiles()):
        return native.dense_linear(x.flatten(0, -2).contiguous(), weight, bias).unflatten(0, x.shape[:-1])
    return F.linear(x, weight, bias)


def packed_linear(x: Tensor, w: Weight, bias: Tensor | None, bits: int) -> Tensor:
    """x [..., in] fp32 or bf16, bias fp32 [out] -> [..., out] in its dtype; sums in fp32."""
    rows = x.flatten(0, -2)
    kernel = use_triton(x) or use_native(x, x.shape[-1])
    if len(rows) < MANY and not use_triton(x) and kernel:
        return native.linear(rows.contiguous(), *w, bias, bits).unflatten(0, x.shape[:-1])
    y = (torch.ops.kv_fast.packed_linear if kernel else _in_torch)(rows, *w, bias, bits)
    return y.unflatten(0, x.shape[:-1])


def separate_all(w: Weight, bits: int) -> Weight:
    """What `dequantize` takes but for bits: codes and numbers of groups, a row after the other."""
    zero = None if w.zero is None else unpack_zeros(w.zero)
    rows = (None if t is None else t.transpose(1, 2).flatten(0, 1) for t in (*w[1:3], zero, *w[4:]))
    return Weight(unpack_bits(separate(w.packed), bits), *rows)


def _in_torch(
    x: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bias: Tensor | None, bits: int,
) -> Tensor:  # fmt: skip
    w = Weight(packed, scale, step, zero, minimum, min_step)
    weight = dequantize(*separate_all(w, bits), bits).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _in_cpp(
    x: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bias: Tensor | None, bits: int,
) -> Tensor:  # fmt: skip
    x, w = x.detach().contiguous(), (packed, scale, step, zero, minimum, min_step)  # codes are not trained
    if native.has_many_rows(bits):
        return native.many_rows(x, w, bias, bits)
    out, n = packed.shape[0] * ROWS, max(1, TILE // (x.shape[1] * ROWS))
    y = x.new_empty(len(x), out)
    for first in range(0, packed.shape[0], n):
        rows = native.unpack_rows(x.dtype, w, bits, first, min(n, packed.shape[0] - first))
        torch.mm(x, rows, out=y[:, first * ROWS : (first + n) * ROWS])
    return y if bias is None else y.add_(bias)


# ---- Triton ----

FEW = 16  # rows of x that the kernel takes: a tensor core's. More of them, a prompt, multiply W as unpacked by torch
INPUTS = 128  # of W in a tile


@triton.jit
def _in_steps(x, step, at, S: tl.constexpr, lane, there):
    """Scales or minima of groups `at` [R, n, 1], counted over blocks -> fp32 [R, n, 16]."""
    value = tl.load(x + at * 16 + lane, mask=there[:, None, None], other=0).to(tl.float32)
    if step is not None:
        value *= tl.load(step + at // S * 16 + lane, mask=there[:, None, None], other=0.0).to(tl.float32)
    return value


@triton.jit
def _packed_linear(
    x, packed, scale, step, zero, minimum, min_step, bias, y, x_row, y_row, M, blocks, IN,
    BITS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MS: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """A program multiplies R blocks of 16 rows of W, K inputs at a time: one row of x by sums, 16 by dot.

    S and MS: groups that share a step of scales and of minima.
    """
    PER: tl.constexpr = 32 // BITS  # inputs in a word
    GT: tl.constexpr = G if G < K else K  # inputs of a tile that share a scale
    block = tl.program_id(0) * R + tl.arange(0, R)
    there = block < blocks
    block = block.to(tl.int64)
    lane, c, j, k = tl.arange(0, 16), tl.arange(0, K // PER), tl.arange(0, PER), tl.arange(0, K)
    word = packed + block[:, None, None] * (IN // PER * 16) + c[None, :, None] * 16 + lane
    group = block[:, None, None] * (IN // G)
    m = tl.arange(0, 16)
    alone = tl.zeros([R, 16], tl.float32)
    together = tl.zeros([16, R * 16], tl.float32)
    for first in range(0, IN, K):
        w = tl.load(word + first // PER * 16, mask=there[:, None, None], other=0)  # [R, K / PER, 16]
        w = w[:, :, None, :] >> (j * BITS)[None, None, :, None]
        if BITS == 16:
            q = (w << 16).to(tl.float32, bitcast=True)
        else:
            q = ((w & 15) if BITS == 4 else (w << 24) >> 24).to(tl.float32)
        q = tl.reshape(q, [R, K, 16])
        if BITS != 16:
            at = group + ((first + tl.arange(0, K // GT) * GT) // G)[None, :, None]
            s = _in_steps(scale, step, at, S, lane, there)[:, :, None, :]
            q = tl.reshape(q, [R, K // GT, GT, 16])
            if zero is not None:
                z = tl.load(zero + at * 8 + lane % 8, mask=there[:, None, None], other=0).to(tl.int32)
                q = q - ((z >> (lane // 8 * 4)) & 15).to(tl.float32)[:, :, None, :]
            elif BITS == 4 and minimum is None:
                q = q - 8.0
            q = q * s
            if minimum is not None:
                q += _in_steps(minimum, min_step, at, MS, lane, there)[:, :, None, :]
            q = tl.reshape(q, [R, K, 16])
        if ONE:
            row = tl.load(x + first + k).to(tl.float32)
            alone += tl.sum(q * row[None, :, None], 1)
        else:
            rows = tl.load(x + m[:, None] * x_row + first + k, mask=m[:, None] < M, other=0.0)
            q = tl.reshape(tl.permute(q, (1, 0, 2)), [K, R * 16])
            together += dot(rows, q.to(rows.dtype))
    out = tl.reshape(block[:, None] * 16 + lane, [R * 16])
    real = out < blocks * 16
    if ONE:
        total = tl.reshape(alone, [R * 16])
        if bias is not None:
            total += tl.load(bias + out, mask=real, other=0.0)
        tl.store(y + out, total.to(y.dtype.element_ty), mask=real)
    else:
        if bias is not None:
            together += tl.load(bias + out, mask=real, other=0.0)[None, :]
        tl.store(y + m[:, None] * y_row + out, together.to(y.dtype.element_ty), mask=(m[:, None] < M) & real)


def tile_of(n: int, group: int, blocks: int, device: torch.device) -> dict[str, int]:
    """Blocks of 16 rows and inputs of a tile: fewer blocks where multiprocessors would be idle."""
    K = next(k for k in (INPUTS, 64, 32, 16) if n % k == 0 and (group % k == 0 or k % group == 0))
    R = next((r for r in (4, 2) if blocks >= 2 * r * multiprocessors(device)), 1)
    return dict(R=R, K=K)


def _in_triton(
    x: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bias: Tensor | None, bits: int,
) -> Tensor:  # fmt: skip
    (M, n), blocks = x.shape, packed.shape[0]
    if M > FEW:
        return _in_torch(x, packed, scale, step, zero, minimum, min_step, bias, bits)
    x, y = x.contiguous(), x.new_empty(M, blocks * ROWS)
    group = n if scale is None else n // scale.shape[1]
    tile = tile_of(n, group, blocks, x.device)
    _packed_linear[(triton.cdiv(blocks, tile["R"]),)](
        x, packed.view(torch.int32), scale, step, zero, minimum, min_step, bias, y, n, blocks * ROWS, M, blocks, n,
        BITS=bits, G=group, S=sharing(scale, step), MS=sharing(minimum, min_step), **tile, ONE=M == 1,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define(
    "packed_linear(Tensor x, Tensor packed, Tensor? scale, Tensor? step, Tensor? zero, Tensor? minimum, "
    "Tensor? min_step, Tensor? bias, int bits) -> Tensor"
)
_lib.impl("packed_linear", on_cpu(_in_triton, _in_cpp), "CPU")
_lib.impl("packed_linear", _in_triton, "CUDA")
torch.library.register_fake(
    "kv_fast::packed_linear",
    lambda x, packed, *rest: x.new_empty(len(x), packed.shape[0] * ROWS),
    lib=_lib,
)
