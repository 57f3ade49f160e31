"""The model's linear layers: weights in the compute dtype, or packed in bf16, 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kernels.layer import Matrix
from kernels.linear import (
    ROWS,
    WORD,
    Weight,
    dense_linear,
    dequantize,
    interleave,
    pack_bits,
    pack_zeros,
    packed_linear,
    separate_all,
    unpack_bits,
)
from kernels.native import in_huge_pages
from runtime.errors import InputError
from weights.codes import Codes, Layout
from weights.quantization import quantize

PART = 1 << 18  # numbers that are quantized at a time, in whole blocks of rows: the copies that it takes stay small
RANDOM_BLOCK = 1 << 24  # the most random numbers that are drawn for a weight


def fill_normal(flat: Tensor, std: float, gen: torch.Generator) -> None:
    """Fill flat [n] with normal numbers. Only the first RANDOM_BLOCK are drawn, and larger tensors repeat them."""
    flat[:RANDOM_BLOCK].normal_(0, std, generator=gen)
    for part in flat.split(RANDOM_BLOCK)[1:]:
        part.copy_(flat[: len(part)])


class Linear(nn.Linear):
    """A linear layer with weights in the compute dtype."""

    def __init__(self, n: int, out: int | list[int], bias: bool = True, **factory: Any):
        """out: the number of outputs, or a list of them for the parts of a fused layer."""
        self.sizes = [out] if isinstance(out, int) else out
        super().__init__(n, sum(self.sizes), bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        weight_and_bias: Any = self._parameters.values()  # by its name, each would take a call of nn.Module's
        return dense_linear(x, *weight_and_bias)

    @property
    def matrix(self) -> Matrix:
        weight_and_bias: Any = self._parameters.values()
        return Matrix.dense(*weight_and_bias)


class ExpertsLinear(Linear):
    """The layers of several experts, one behind the other: packed in one format, or not."""


class PackedLinear(nn.Module):
    """A linear layer with packed weights (kernels/linear.py), which `put` fills some rows at a time.

    Zeros, and minima of 8-bit codes, are allocated when `put` first gets some: in groups of 32, symmetric codes, as of
    GGUF's Q4_0, take 4.5 bits per weight, others 4.625.
    """

    packed: Tensor
    scale: Tensor | None
    step: Tensor | None
    zero: Tensor | None
    minimum: Tensor | None
    min_step: Tensor | None
    bias: Tensor | None

    def __init__(self, n: int, out: int, bias: bool, layout: Layout, device: torch.device | str = "cpu"):
        super().__init__()
        self.in_features, self.out_features, self.bits = n, out, layout.bits
        self.group, self.layout = layout.group or n, layout
        for name in (*Weight._fields, "bias"):  # in the order in which `forward` passes them
            self.register_buffer(name, None)
        self.groups = 0 if self.bits == 16 else n // self.group
        codes = torch.float8_e4m3fn if layout.e4m3 else torch.uint8
        self._allocate("packed", (n * self.bits // 8 // WORD, ROWS, WORD), codes, device)
        scales = torch.int8 if layout.steps else torch.float32 if layout.e4m3 else torch.float16
        for name, step in (("scale", "step"), ("minimum", "min_step"))[: bool(self.groups) + layout.minimum]:
            self._allocate(name, (self.groups, ROWS), scales, device)
            if layout.steps:
                self._allocate(step, (self.groups // layout.steps, ROWS), torch.float16, device)
        if bias:
            self.bias = in_huge_pages(torch.empty(self.blocks * ROWS, device=device))

    @property
    def blocks(self) -> int:
        """The number of blocks of 16 rows."""
        return -(-self.out_features // ROWS)

    @property
    def weight(self) -> Weight:
        return Weight(*(getattr(self, name) for name in Weight._fields))

    def _allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        setattr(self, name, in_huge_pages(torch.empty((self.blocks, *size), dtype=dtype, device=device)))
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        y = packed_linear(x, *self.matrix)
        return y if y.shape[-1] == self.out_features else y[..., : self.out_features]

    @property
    def matrix(self) -> Matrix:
        given: Any = (*self._buffers.values(), self.bits)
        return Matrix(*given)

    def first(self, x: Tensor, n: int) -> Tensor:
        """Only the first n outputs, n a multiple of 16."""
        bias = None if self.bias is None else self.bias[:n]
        return packed_linear(x, *self.weight.blocks(slice(n // ROWS)), bias, self.bits)

    def takes(self, c: Codes) -> bool:
        """Whether this layer can store codes as they are."""
        same = (c.bits, c.group, c.steps) == (self.bits, self.group, self.layout.steps)
        same = same and c.layout.e4m3 == self.layout.e4m3
        return same and (self.bits == 8 or (c.minimum is not None) == self.layout.minimum)

    def put(self, first: int, value: Tensor | Codes) -> None:
        """Rows of the weight from `first` on, [rows, in]: quantized here, unless they are codes in our layout."""
        if isinstance(value, Codes) and not self.takes(value):
            value = value.dequantize()
        rows = max(1, PART // (ROWS * self.in_features)) * ROWS
        if isinstance(value, Tensor) and len(value) > rows:  # some rows at a time: quantizing takes several copies
            for i, part in enumerate(value.split(rows)):
                self.put(first + i * rows, part)
            return
        if self.bits == 16:
            assert isinstance(value, Tensor)
            c = None
            codes = value.to(torch.bfloat16)
        else:
            made = not (self.layout.steps or self.layout.minimum or self.layout.e4m3)
            assert isinstance(value, Codes) or made, "these are not made here"
            c = value if isinstance(value, Codes) else quantize(value, self.bits, self.group)
            codes = c.codes
        out = len(codes)
        if first % ROWS or (out % ROWS and first + out != self.out_features):
            raise InputError(f"packed weights lie in blocks of {ROWS} rows, and this model has a part of {out} from "
                             f"row {first} on: use --weights fp32")  # fmt: skip
        blocks, pad = slice(first // ROWS, -(-(first + out) // ROWS)), -out % ROWS
        self.packed[blocks] = interleave(F.pad(pack_bits(codes, self.bits), (0, 0, 0, pad))).view(self.packed.dtype)
        if c is None:
            return

        def by_groups(t: Tensor) -> Tensor:  # [rows, groups] -> [blocks, groups, 16]
            return F.pad(t, (0, 0, 0, pad)).view(-1, ROWS, t.shape[1]).transpose(1, 2)

        self._allocate_zeros(c)
        for name in ("scale", "step", "minimum", "min_step"):
            buffer, given = getattr(self, name), getattr(c, name)
            if buffer is not None:
                buffer[blocks] = 0 if given is None else by_groups(given.to(buffer.dtype))
        if self.zero is not None:
            zero = torch.full_like(c.codes[:, : self.groups], 8) if c.zero is None else c.zero
            self.zero[blocks] = pack_zeros(by_groups(zero))

    def _allocate_zeros(self, c: Codes) -> None:
        """Allocate zeros, or minima of 8-bit codes, when the first come, filled with the values of rows without any."""
        device = self.packed.device
        if self.zero is None and c.zero is not None and bool((c.zero != 8).any()):
            self._allocate("zero", (self.groups, ROWS // 2), torch.uint8, device).fill_(8 | 8 << 4)
        if self.minimum is None and c.minimum is not None:
            dtype = torch.float16 if c.min_step is None else torch.int8
            self._allocate("minimum", (self.groups, ROWS), dtype, device).zero_()
            if c.min_step is not None:
                self._allocate("min_step", (c.min_step.shape[1], ROWS), torch.float16, device).zero_()

    def dense(self, first: int, n: int) -> Tensor:
        """`rows` in fp32 or bf16."""
        rows = self.rows(first, n)
        return rows.dequantize() if isinstance(rows, Codes) else rows

    def numbers(self) -> list[Tensor]:
        """The float buffers, which contain NaN or infinity if a weight does."""
        if self.bits == 16:
            return [self.packed.view(torch.bfloat16)]
        return [x for x in self.weight[1:] if x is not None and x.is_floating_point()]

    def fill_random(self, std: float, gen: torch.Generator) -> None:
        """Random weights with mean 0 and this standard deviation, for throughput runs."""
        if self.bits == 16:
            fill_normal(self.packed.view(-1).view(torch.bfloat16), std, gen)
        else:
            self.packed.view(-1).view(torch.int64).random_(generator=gen)
        if self.scale is not None:
            self.scale.fill_(std / (4.61 if self.bits == 4 else 74.0))  # std of uniformly distributed codes
        if self.bias is not None:
            self.bias.zero_()

    def rows(self, first: int, n: int) -> Codes | Tensor:
        """n rows from `first` on, as stored by `put`: codes, or bf16."""
        blocks, take = slice(first // ROWS, -(-(first + n) // ROWS)), slice(first % ROWS, first % ROWS + n)
        w = separate_all(self.weight.blocks(blocks), self.bits).blocks(take)
        return w.packed if w.scale is None else Codes(w.packed, w.scale, w.zero, self.bits, *w[2:3], *w[4:])


class Joined(nn.Module):
    """A fused linear layer whose parts have different formats."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def bias(self) -> Tensor | None:
        """The bias [out], if there is one."""
        if self.parts[0].bias is None:
            return None
        return torch.cat([part.bias[: part.out_features] for part in self.parts])  # type: ignore[index, misc]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


class PackedEmbedding(nn.Module):
    """An embedding by rows of a packed matrix: tokens [...] -> [..., dim]."""

    def __init__(self, rows: PackedLinear, dtype: torch.dtype, tied: bool):
        """tied: the matrix is also the output head, which counts its bytes."""
        super().__init__()
        if tied:
            object.__setattr__(self, "matrix", rows)  # not as a submodule
        else:
            self.matrix = rows
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        w = self.matrix.weight
        block, row = tokens.flatten() // ROWS, tokens.flatten() % ROWS
        codes = unpack_bits(w.packed[block, :, row].flatten(1), self.matrix.bits)  # [N, dim]
        scale, step, minimum, min_step = (None if t is None else t[block, :, row] for t in (*w[1:3], *w[4:]))
        zero = None if w.zero is None else w.zero[block, :, row % 8] >> (row // 8 * 4)[:, None] & 15
        rows = dequantize(codes, scale, step, zero, minimum, min_step, self.matrix.bits)
        return rows.to(self.dtype).unflatten(0, tokens.shape)


def first_outputs(linear: nn.Module, x: Tensor, n: int) -> Tensor:
    """The first n outputs of any of these linear layers: x [..., in] -> [..., n]."""
    if isinstance(linear, PackedLinear):
        return linear.first(x, n)
    if isinstance(linear, Joined):
        out: list[Tensor] = []
        for part in linear.parts:
            if n > 0:
                rows = int(part.out_features)  # type: ignore[arg-type]
                out.append(part(x) if rows <= n else first_outputs(part, x, n))
                n -= rows
        return out[0] if len(out) == 1 else torch.cat(out, -1)
    bias = linear.bias
    return dense_linear(x, linear.weight[:n], None if bias is None else bias[:n])  # type: ignore[index]


# (a linear layer's name in the model, the index of its part, its number of inputs) -> layout; None: the compute dtype
Choose = Callable[[str, int, int], Layout | None]


def pack(model: nn.Module, choose: Choose, device: torch.device) -> None:
    """Replace linear layers of a model on the meta device by packed ones."""
    for name, linear in [(name, m) for name, m in model.named_modules() if isinstance(m, Linear)]:
        runs: list[tuple[int, Layout | None]] = []  # adjacent parts that share a layout form one piece
        for i, rows in enumerate(linear.sizes):
            layout = choose(name, i, linear.in_features)
            if runs and runs[-1][1] == layout and (layout is None or runs[-1][0] % ROWS == 0):
                rows += runs.pop()[0]
            runs.append((rows, layout))
        if isinstance(linear, ExpertsLinear) and len(runs) > 1 or runs == [(linear.out_features, None)]:
            continue
        n, bias, dtype = linear.in_features, linear.bias is not None, linear.weight.dtype
        parts = [
            Linear(n, rows, bias, device=device, dtype=dtype) if layout is None
            else PackedLinear(n, rows, bias, layout, device) for rows, layout in runs
        ]  # fmt: skip
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, parts[0] if len(parts) == 1 else Joined(parts))
