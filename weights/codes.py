"""Quantized weights, the same for all formats: integer codes, a scale per group, and perhaps a zero or a minimum.

The arithmetic is w = scale * (code - zero), or scale * code + minimum, in fp32, as GGUF, GPTQ, AWQ and
compressed-tensors define it; their files differ in how they pack these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kernels.linear import dequantize
from runtime.errors import InputError


@dataclass(frozen=True)
class Layout:
    """The format of a weight in memory, which holds its numbers without rounding.

    bits: bits of a code, 4 or 8; 16: bf16 without scales. group: the number of inputs that share a scale; None: a row.
    steps: the number of groups whose scales, 8-bit integers, are multiples of one fp16 step (GGUF's K types); None:
    scales are fp16. minimum: whether each group has one, in the format of the scales. e4m3: codes are 8-bit floats
    with scales in fp32.
    """

    bits: int
    group: int | None = None
    steps: int | None = None
    minimum: bool = False
    e4m3: bool = False


BF16 = Layout(16)


@dataclass
class Codes:
    """A weight [out, in] whose rows are quantized in groups of `group` adjacent inputs.

    codes [out, in], uint8 0..15 for 4 bits, int8 or float8_e4m3fn for 8 bits. scale [out, groups], as in the file; int8
    if in units of step [out, groups / n]. zero [out, groups] uint8 0..15, or None: 8 for 4 bits, 0 for 8 bits. minimum
    [out, groups] is added to scale * code instead of a zero; int8 if in units of min_step [out, groups / n]. With one
    scale per channel, group == in.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    step: Tensor | None = None
    minimum: Tensor | None = None
    min_step: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """The number of adjacent inputs that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def steps(self) -> int | None:
        """The number of groups that share a step."""
        return None if self.step is None else self.scale.shape[1] // self.step.shape[1]

    @property
    def layout(self) -> Layout:
        """The layout that holds these codes. Zeros, and minima of 8-bit codes with their own steps, are not part of
        it: a PackedLinear adds them when they come."""
        minimum = self.minimum is not None and (self.min_step is None) == (self.step is None)
        return Layout(self.bits, self.group, self.steps, minimum, self.codes.dtype == torch.float8_e4m3fn)

    def rows(self, index: Tensor) -> Codes:
        """The rows of index [n], in that order."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return Codes(**{name: x[index] if isinstance(x, Tensor) else x for name, x in parts.items()})  # type: ignore

    def cut(self, dim: int, part: slice, name: str = "a weight") -> Codes:
        """Some rows (dim 0) or some columns, which must be whole groups and whole runs of groups that share a step."""
        if dim == 0:
            return self.rows(torch.arange(part.start, part.stop))
        if self.scale.shape[1] == 1:  # one scale per row, which every part of the row shares
            return replace(self, codes=self.codes[:, part].contiguous())
        unit = self.group * (self.steps or 1)
        if part.start % unit or part.stop % unit:
            n, ways = self.codes.shape[1] // unit, [m for m in range(1, 65) if self.codes.shape[1] % (m * unit) == 0]
            raise InputError(f"{name} has {n} groups of {unit} inputs, which the processes cannot share: start "
                             f"{', '.join(map(str, ways))}")  # fmt: skip

        def of(x: Tensor) -> Tensor:
            per = self.codes.shape[1] // x.shape[1]  # inputs that share a number
            return x[:, part.start // per : part.stop // per].contiguous()

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Codes(**{key: of(x) if isinstance(x, Tensor) else x for key, x in given.items()})  # type: ignore

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in], computed in fp32, then rounded to dtype."""
        groups = self.scale, self.step, self.zero, self.minimum, self.min_step
        return dequantize(self.codes, *groups, self.bits).to(dtype)


def grouped(source: str, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Codes | Tensor:
    """Codes made of unsigned codes and zeros, with checks; fp32 [out, in] if Codes are not exact (`asymmetric`).

    codes [out, in] uint8, 0..2^bits - 1; scale [out, in / group] in any float dtype; zero [out, in / group] uint8, or
    None: half the range. The message of an InputError begins with `source`.
    """
    check(source, codes, scale, zero)
    half = 1 << (bits - 1)
    if zero is not None and bool((zero == half).all()):
        zero = None
    scale = scale.float().contiguous()
    if bits == 4:
        return Codes(codes.contiguous(), scale, None if zero is None else zero.contiguous(), 4)
    signed = (codes ^ half).view(torch.int8).contiguous()  # flips the top bit: minus 128
    return Codes(signed, scale, None, 8) if zero is None else asymmetric(signed, scale, (zero ^ half).view(torch.int8))


def asymmetric(codes: Tensor, scale: Tensor, zero: Tensor) -> Codes | Tensor:
    """8-bit codes with zero points int8 [out, in / group], as codes with minimum -scale * zero. With scales that fp16
    cannot hold, the weight in fp32 [out, in]."""
    if exact_in_fp16(scale):
        return Codes(codes, scale, None, 8, minimum=zero.contiguous(), min_step=-scale)
    w = codes.short().unflatten(1, (scale.shape[1], -1)) - zero.short()[..., None]
    return (w.float() * scale[..., None]).flatten(1)


def floats(source: str, codes: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Codes | Tensor:
    """Codes float8_e4m3fn [out, in] with scales [out, groups], or of blocks of rows and inputs; fp32 [out, in] if the
    last block of a row has fewer inputs."""
    if not codes.float().isfinite().all():
        raise InputError(f"{source} holds NaN: download it again")
    scale = scale.float()
    if block is None:
        check(source, codes, scale)
        return Codes(codes, scale.contiguous(), None, 8)
    rows, cols = block
    out, n = codes.shape
    if list(scale.shape) != (blocks := [-(-out // rows), -(-n // cols)]):
        raise InputError(f"{source}: scales {list(scale.shape)} do not fit weights [{out}, {n}] in blocks of {rows} x "
                         f"{cols}: expected {blocks}")  # fmt: skip
    check_finite(source, scale)
    scale = scale.repeat_interleave(rows, 0)[:out]
    if n % cols == 0:
        return Codes(codes, scale.contiguous(), None, 8)
    return codes.float() * scale.repeat_interleave(cols, 1)[:, :n]


def exact_in_fp16(scale: Tensor) -> bool:
    """Whether fp16 holds these scales exactly."""
    return scale.dtype == torch.float16 or torch.equal(scale.half().double(), scale.double())


def check(source: str, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """Raises InputError unless the shapes fit each other and every scale is finite."""
    if codes.dim() != 2 or not codes.numel():
        raise InputError(f"{source} has shape {list(codes.shape)}, expected rows and columns: download it again")
    out, n = codes.shape
    if scale.dim() != 2 or scale.shape[0] != out or not scale.shape[1] or n % scale.shape[1]:
        raise InputError(f"{source}: scales {list(scale.shape)} do not fit weights [{out}, {n}]: rows of whole groups")
    if zero is not None and zero.shape != scale.shape:
        raise InputError(f"{source}: zero points {list(zero.shape)} do not fit scales {list(scale.shape)}")
    check_finite(source, scale)


def check_finite(source: str, scale: Tensor) -> None:
    """Raises InputError unless every scale is finite."""
    if not scale.float().isfinite().all():
        raise InputError(f"{source} has scales that are NaN or infinity: download it again")


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
