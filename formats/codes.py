"""Quantized weights as every format here tells them: integer codes, a scale a group, and perhaps a zero point a group.

The arithmetic is w = scale * (code - zero) in fp32, which is what GGUF (Q4_0, Q8_0), GPTQ, AWQ and compressed-tensors
define; their files differ in how they pack the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import InputError
from kernels.linear import dequantize


@dataclass
class Codes:
    """A weight [out, in] whose rows are quantized in groups of `group` neighbours.

    codes [out, in], uint8 0..15 for 4 bits, int8 for 8 bits; scale [out, in / group] fp32, as in the file;
    zero [out, in / group] uint8 0..15, or None: 8 for 4 bits, 0 for 8 bits. A channel's one scale is group == in.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Neighbours in a row that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def rows(self, index: Tensor) -> Codes:
        """The rows of index [n], in that order."""
        zero = None if self.zero is None else self.zero[index]
        return Codes(self.codes[index], self.scale[index], zero, self.bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """-> [out, in]: scale * (codes - zero) in fp32, the difference being exact, then rounded to dtype."""
        return dequantize(self.codes, self.scale, self.zero, self.bits).to(dtype)


def grouped(where: str, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Codes | Tensor:
    """Codes of unsigned codes and zeros, checked; fp32 [out, in] where Codes cannot say it: 8 bits, not symmetric.

    codes [out, in] uint8, 0..2^bits - 1; scale [out, in / group] of any float; zero [out, in / group] uint8, or None:
    half the range. InputError begins with `where`.
    """
    check(where, codes, scale, zero)
    half = 1 << (bits - 1)
    if zero is not None and bool((zero == half).all()):
        zero = None
    scale = scale.float().contiguous()
    if bits == 4:
        return Codes(codes.contiguous(), scale, None if zero is None else zero.contiguous(), 4)
    signed = Codes((codes ^ half).view(torch.int8).contiguous(), scale, None, 8)  # flips the top bit: minus 128
    return signed if zero is None else asymmetric(signed, zero.short() - half)


def asymmetric(c: Codes, zero: Tensor) -> Tensor:
    """fp32 [out, in] of 8-bit codes with zero points [out, in / group] that may be negative."""
    w = c.codes.short().unflatten(1, (-1, c.group)) - zero[..., None]
    return (w.float() * c.scale[..., None]).flatten(1)


def check(where: str, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """InputError unless the shapes fit each other and every scale is finite."""
    if codes.dim() != 2 or not codes.numel():
        raise InputError(f"{where} has shape {list(codes.shape)}, expected rows and columns: download it again")
    out, n = codes.shape
    if scale.dim() != 2 or scale.shape[0] != out or not scale.shape[1] or n % scale.shape[1]:
        raise InputError(f"{where}: scales {list(scale.shape)} do not fit weights [{out}, {n}]: rows of whole groups")
    if zero is not None and zero.shape != scale.shape:
        raise InputError(f"{where}: zero points {list(zero.shape)} do not fit scales {list(scale.shape)}")
    check_finite(where, scale)


def check_finite(where: str, scale: Tensor) -> None:
    """InputError unless every scale is a finite number."""
    if not scale.float().isfinite().all():
        raise InputError(f"{where} has scales that are NaN or infinity: download it again")


def nibbles(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., n, 8]: the eight 4-bit numbers of a word, lowest bits first."""
    data = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def octets(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., n, 4]: the four 8-bit numbers of a word, lowest bits first."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n, 32 / bits]."""
    return nibbles(words) if bits == 4 else octets(words)


def dtype_name(t: Tensor | torch.dtype) -> str:
    return str(t if isinstance(t, torch.dtype) else t.dtype).removeprefix("torch.")
