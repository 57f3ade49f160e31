"""What the model multiplies with: weights as they are, or packed in bf16, 8 or 4 bits, whatever the compute dtype is.

    --weights int4          8- and 4-bit codes share a scale in groups of 32 inputs
    --weights int4:128      or of 64 or 128; int8:channel, one scale a row

The output head, and the embedding where it is the same matrix, are in 8 bits with 4-bit weights (`head`, as given).
Quantization is by rounding: 8 bits symmetric by the largest |w| of a group, 4 bits between its least and largest w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from errors import InputError
from formats.codes import Codes
from kernels.linear import (
    ROWS,
    WORD,
    dense_linear,
    dequantize,
    interleave,
    pack_bits,
    pack_zeros,
    packed_linear,
    separate,
    unpack_bits,
    unpack_zeros,
)
from kernels.native import in_huge_pages

BITS = {"bf16": 16, "int8": 8, "int4": 4}
GROUPS = ("32", "64", "128", "channel")
PART = 256  # rows that are quantized at a time, a multiple of 16: the copies that it takes stay small
RANDOM_BLOCK = 1 << 24  # numbers that are drawn for random weights
DENSE = 32  # "bits" of what is not packed, but held in the compute dtype


def quantize(w: Tensor, bits: int, group: int) -> Codes:
    """w [out, in] -> codes of 8 or 4 bits, with fp16 scales, by rounding to nearest."""
    x = w.float().unflatten(1, (-1, group))
    if bits == 8:
        scale = (x.abs().amax(-1) / 127).clamp(6e-8, 65504).half()
        codes = (x / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return Codes(codes.flatten(1), scale, None, 8)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(6e-8, 65504).half()
    step = scale.float()
    zero = (-low / step).round().clamp(0, 15)
    codes = (x / step[..., None] + zero[..., None]).round().clamp(0, 15)
    return Codes(codes.to(torch.uint8).flatten(1), scale, zero.to(torch.uint8), 4)


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of a model are held: bits, inputs that share a scale (None: all of a row), bits of the head."""

    bits: int
    group: int | None = None
    head_bits: int = 8

    @classmethod
    def parse(cls, text: str | None, head: str | None = None) -> WeightFormat | None:
        """`int4`, `int8:channel`, `bf16`; `fp32`: not packed; None: as the checkpoint is. InputError if none."""
        if text is None or text == "fp32":
            if head not in (None, "fp32"):
                raise InputError(f"--head {head} needs --weights bf16, int8 or int4")
            return cls(DENSE) if text else None
        kind, colon, group = text.partition(":")
        if kind not in BITS or (colon and (kind == "bf16" or group not in GROUPS)):
            raise InputError(f"--weights {text}: use fp32, bf16, int8 or int4, these also with a group: int4:64, "
                             "int8:channel (32, 64, 128 or channel inputs share a scale)")  # fmt: skip
        if head is not None and head not in BITS:
            raise InputError(f"--head {head}: use bf16, int8 or int4")
        size = None if group == "channel" else int(group or 32)
        return cls(BITS[kind], size, BITS[head] if head else max(8, BITS[kind]))

    def group_of(self, n: int, bits: int) -> int:
        """For a row of n inputs. InputError if they do not divide."""
        group = n if self.group is None or bits == 16 else self.group
        if n % group or group % ROWS:
            raise InputError(f"weights of {n} inputs have no groups of {group}: use --weights int8:channel, "
                             "or another group")  # fmt: skip
        return group


def fill_normal(flat: Tensor, std: float, gen: torch.Generator) -> None:
    """Normal numbers into flat [n], of which the first RANDOM_BLOCK are drawn and larger tensors repeat them."""
    flat[:RANDOM_BLOCK].normal_(0, std, generator=gen)
    for part in flat.split(RANDOM_BLOCK)[1:]:
        part.copy_(flat[: len(part)])


# ---- modules ----


class Linear(nn.Linear):
    """A linear layer of weights in the compute dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return dense_linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear layer of packed weights (kernels/linear.py); `put` fills it, some rows at a time.

    Zeros are held once `put` is given some: symmetric codes, as of GGUF's Q4_0, are 4.5 bits a weight in groups of 32,
    others 4.625.
    """

    packed: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None

    def __init__(self, n: int, out: int, bias: bool, bits: int, group: int, device: torch.device | str = "cpu"):
        super().__init__()
        self.in_features, self.out_features, self.bits, self.group = n, out, bits, group
        blocks, size = -(-out // ROWS), n * bits // 8
        for name in ("packed", "scale", "zero", "bias"):
            self.register_buffer(name, None)
        self._hold("packed", torch.empty((blocks, size // WORD, ROWS, WORD), dtype=torch.uint8, device=device))
        if bits < 16:
            self._hold("scale", torch.empty((blocks, n // group, ROWS), dtype=torch.float16, device=device))
        if bias:
            self._hold("bias", torch.empty(blocks * ROWS, device=device))

    def _hold(self, name: str, value: Tensor) -> Tensor:
        setattr(self, name, in_huge_pages(value))
        return value

    def forward(self, x: Tensor) -> Tensor:
        y = packed_linear(x, self.packed, self.scale, self.zero, self.bias, self.bits)
        return y[..., : self.out_features]

    def first(self, x: Tensor, n: int) -> Tensor:
        """The first n outputs alone, n a multiple of 16."""
        blocks = n // ROWS
        scale, zero = (None if t is None else t[:blocks] for t in (self.scale, self.zero))
        bias = None if self.bias is None else self.bias[:n]
        return packed_linear(x, self.packed[:blocks], scale, zero, bias, self.bits)

    def put(self, first: int, value: Tensor | Codes) -> None:
        """Rows of the weight from `first` on, [rows, in]: quantized here, unless they are codes in our format."""
        if isinstance(value, Codes):
            ours = (value.bits, value.group) == (self.bits, self.group) and (self.bits == 4 or value.zero is None)
            value = value if ours else value.dequantize()
        if isinstance(value, Tensor) and len(value) > PART:  # some rows at a time: quantizing takes several copies
            for i, part in enumerate(value.split(PART)):
                self.put(first + i * PART, part)
            return
        scale, zero = None, None
        if self.bits == 16:
            assert isinstance(value, Tensor)
            codes = value.to(torch.bfloat16)
        else:
            c = value if isinstance(value, Codes) else quantize(value, self.bits, self.group)
            codes, scale, zero = c.codes, c.scale, c.zero
            if self.zero is None and zero is not None and bool((zero != 8).any()):  # all before were 8
                assert self.scale is not None
                blocks, groups, _ = self.scale.shape
                self._hold("zero", self.packed.new_empty(blocks, groups, ROWS // 2)).fill_(8 | 8 << 4)
            elif zero is None and self.zero is not None:
                zero = torch.full_like(scale, 8, dtype=torch.uint8)
        out = len(codes)
        if first % ROWS or (out % ROWS and first + out != self.out_features):
            raise InputError(f"packed weights lie in blocks of {ROWS} rows, and this model has a part of {out} from "
                             f"row {first} on: use --weights fp32")  # fmt: skip
        at, pad = slice(first // ROWS, -(-(first + out) // ROWS)), -out % ROWS
        self.packed[at] = interleave(F.pad(pack_bits(codes, self.bits), (0, 0, 0, pad)))

        def by_groups(t: Tensor) -> Tensor:  # [rows, groups] -> [blocks, groups, 16]
            return F.pad(t, (0, 0, 0, pad)).view(-1, ROWS, t.shape[1]).transpose(1, 2)

        if self.scale is not None and scale is not None:
            self.scale[at] = by_groups(scale.half())
        if self.zero is not None and zero is not None:
            self.zero[at] = pack_zeros(by_groups(zero))

    def dense(self, first: int, n: int) -> Tensor:
        """The same in fp32 or bf16."""
        rows = self.rows(first, n)
        return rows.dequantize() if isinstance(rows, Codes) else rows

    def finite(self) -> Tensor:
        """What is NaN or infinite if any weight is."""
        return self.packed.view(torch.bfloat16) if self.scale is None else self.scale

    def fill_random(self, std: float, gen: torch.Generator) -> None:
        """Weights of this standard deviation around 0, for throughput runs."""
        if self.bits == 16:
            fill_normal(self.packed.view(-1).view(torch.bfloat16), std, gen)
        else:
            self.packed.view(-1).view(torch.int64).random_(generator=gen)
        if self.scale is not None:
            self.scale.fill_(std / (4.61 if self.bits == 4 else 74.0))  # of codes that are spread evenly
        if self.bias is not None:
            self.bias.zero_()

    def put_bias(self, first: int, value: Tensor) -> None:
        assert self.bias is not None
        self.bias[first : first + len(value)] = value

    def rows(self, first: int, n: int) -> Codes | Tensor:
        """What `put` was given, as codes, or in bf16."""
        at, take = slice(first // ROWS, -(-(first + n) // ROWS)), slice(first % ROWS, first % ROWS + n)
        codes = unpack_bits(separate(self.packed[at]), self.bits)[take]
        if self.scale is None:
            return codes
        zero = None if self.zero is None else unpack_zeros(self.zero[at]).transpose(1, 2).flatten(0, 1)[take]
        return Codes(codes, self.scale[at].transpose(1, 2).flatten(0, 1)[take], zero, self.bits)


class PackedEmbedding(nn.Module):
    """Rows of a packed matrix, often the output head's: tokens [...] -> [..., dim]."""

    def __init__(self, weight: PackedLinear, dtype: torch.dtype):
        super().__init__()
        object.__setattr__(self, "weight_of", weight)  # no submodule: counted once, where it is multiplied
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        w: PackedLinear = self.weight_of  # type: ignore[assignment]
        at, row = tokens.flatten() // ROWS, tokens.flatten() % ROWS
        codes = unpack_bits(w.packed[at, :, row].flatten(1), w.bits)  # [N, dim]
        scale = None if w.scale is None else w.scale[at, :, row]
        zero = None if w.zero is None else w.zero[at, :, row % 8] >> (row // 8 * 4)[:, None] & 15
        return dequantize(codes, scale, zero, w.bits).to(self.dtype).unflatten(0, tokens.shape)


def first_outputs(linear: nn.Module, x: Tensor, n: int) -> Tensor:
    """The first n outputs of a linear layer of any kind: x [..., in] -> [..., n]."""
    if isinstance(linear, PackedLinear):
        return linear.first(x, n)
    bias = linear.bias
    return dense_linear(x, linear.weight[:n], None if bias is None else bias[:n])  # type: ignore[index]


def pack(model: nn.Module, how: WeightFormat, device: torch.device) -> None:
    """Put packed layers in place of the linear ones of a model on the meta device; the head is called `output`."""
    for name, linear in list(_linears(model)):
        bits = how.head_bits if name == "output" else how.bits
        group = how.group_of(linear.in_features, bits)
        parent, _, own = name.rpartition(".")
        packed = PackedLinear(linear.in_features, linear.out_features, linear.bias is not None, bits, group, device)
        setattr(model.get_submodule(parent), own, packed)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    yield from ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
