"""Products with weights of few bits: y = x W^T + bias, W in bf16, or in codes of 8 or 4 bits.

A group of inputs shares a scale: W = scale * (code - zero). Symmetric codes have no zeros: 8-bit ones are signed, 4-bit
ones are around 8. Decoding has few rows of x, and its time is that of reading W. 16 rows of W lie side by side, [out /
16, in / n, 16, n] with the n inputs of a 32-bit word (4 bits: 8, bf16: 2) or byte (8 bits: 1), so that a vector has one
input of 16 outputs. For many rows of x, a prompt, some rows of W at a time are unpacked for a matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native
from kernels.backend import use_native

ROWS = 16  # of W side by side
MANY = 32  # rows of x from which a matrix product of unpacked rows is faster than unpacking in registers
TILE = 1 << 21  # numbers that are unpacked for one matrix product: 8 MB in fp32, which the caches hold
WORD = {4: 4, 8: 1, 16: 4}  # bytes that a lane holds


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


def interleave(data: Tensor, word: int) -> Tensor:
    """Rows uint8 [out, n], out a multiple of 16 -> [out / 16, n / word, 16, word]."""
    return data.view(-1, ROWS, data.shape[1] // word, word).transpose(1, 2).contiguous()


def separate(data: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    return data.transpose(1, 2).flatten(0, 1).flatten(1)


def dequantize(codes: Tensor, scale: Tensor | None, zero: Tensor | None, bits: int) -> Tensor:
    """codes [out, in], scale and zero [out, groups] -> fp32 [out, in]."""
    if scale is None:
        return codes.float()
    grouped = codes.float().unflatten(1, (scale.shape[1], -1))
    offset = zero.float()[..., None] if zero is not None else 8.0 if bits == 4 else 0.0
    return ((grouped - offset) * scale.float()[..., None]).flatten(1)


# ---- the product ----


def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor | None, zero: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """x [..., in] fp32 or bf16 -> [..., out] in its dtype; sums in fp32.

    packed uint8 [out / 16, in / n, 16, n * bits / 8] (`interleave`), scale fp16 [out / 16, groups, 16] or None in bf16,
    zero uint8 of that shape or None, bias fp32 [out]. A group has a multiple of 16 inputs.
    """
    y = torch.ops.kv_fast.packed_linear(x.flatten(0, -2), packed, scale, zero, bias, bits)
    return y.unflatten(0, x.shape[:-1])


def _in_torch(
    x: Tensor, packed: Tensor, scale: Tensor | None, zero: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    codes = unpack_bits(separate(packed), bits)
    scale, zero = (None if t is None else separate(t[..., None]) for t in (scale, zero))
    weight = dequantize(codes, scale, zero, bits).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _in_cpp(
    x: Tensor, packed: Tensor, scale: Tensor | None, zero: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    if len(x) < MANY:
        return native.linear(x, packed, scale, zero, bias, bits)
    out, n = packed.shape[0] * ROWS, max(1, TILE // (x.shape[1] * ROWS))
    y = x.new_empty(len(x), out)
    for first in range(0, packed.shape[0], n):
        rows = native.unpack_rows(x.dtype, packed, scale, zero, bits, first, min(n, packed.shape[0] - first))
        torch.mm(x, rows, out=y[:, first * ROWS : (first + n) * ROWS])
    return y if bias is None else y.add_(bias)


def _on_cpu(x: Tensor, packed: Tensor, *args) -> Tensor:
    # codes are not trained: nothing flows back
    return (_in_cpp if use_native(x, x.shape[1]) else _in_torch)(x.detach().contiguous(), packed, *args)


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define("packed_linear(Tensor x, Tensor packed, Tensor? scale, Tensor? zero, Tensor? bias, int bits) -> Tensor")
_lib.impl("packed_linear", _on_cpu, "CPU")
torch.library.register_fake(
    "kv_fast::packed_linear",
    lambda x, packed, scale, zero, bias, bits: x.new_empty(len(x), packed.shape[0] * ROWS),
    lib=_lib,
)
