"""GPTQ as AutoGPTQ and GPTQModel write it: codes are packed along the input channels, zero points along the outputs.

Per module: qweight int32 [in / n, out], n = 32 / bits, lowest bits first; scales fp16 [in / g, out]; qzeros int32
[in / g, out / n]; g_idx int32 [in], the group of each input. w = scale * (code - zero). Version 1 (`checkpoint_format`
"gptq") stores zero - 1, version 2 ("gptq_v2") stores zero. Files of either are published under the other's label: where
`sym` says that every zero is 2^(bits - 1), the stored number tells which it is. Reference: GPTQModel 7.7,
nn_modules/qlinear and utils/model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.errors import InputError, short, warn_once
from weights.codes import Codes, grouped, unpack
from weights.settings import Settings
from weights.shards import FLOATS, Layouts, Shards, check_groups, layouts_of, packed_module, with_suffix

PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


class GPTQ:
    """Reads a folder's modules. Raises InputError for settings that cannot be read exactly."""

    def __init__(self, settings: Settings):
        s, self.source = settings, settings.source
        self.bits: int = s.one_of((4, 8), None, "bits")
        self.group = s.group_size("group_size")
        self.symmetric = s.one_of((True, False), True, "sym")
        s.one_of((False,), False, "desc_act")
        s.one_of(("int32",), "int32", "pack_dtype")
        s.one_of((False,), False, "is_marlin_format")
        labels = [s.one_of(("gptq", "gptq_v2"), "gptq", key) for key in ("checkpoint_format", "format") if s.get(key)]
        if len({*labels}) > 1:
            raise InputError(f"{s.source}: checkpoint_format is {labels[0]} and format is {labels[1]}: correct one")
        self.first = "gptq_v2" not in labels
        for pattern, change in (s.get("dynamic") or {}).items() if isinstance(s.get("dynamic"), dict) else ():
            if change:  # empty: such modules are not quantized, as their tensors show
                raise InputError(f"{s.source}: dynamic gives {short(pattern)} other settings, which is not supported")

    def read(self, shards: Shards) -> Iterator[tuple[str, Tensor | Codes]]:
        """Yields (name, tensor) for all tensors; AutoGPTQ writes biases of zeros for modules that have none."""
        modules = set(with_suffix(shards, ".qweight"))
        for name in shards:
            module, _, part = name.rpartition(".")
            if part == "qweight":
                yield f"{module}.weight", self.weight(shards, module)
            elif f".{part}" not in PARTS or module not in modules:
                yield name, shards.get(name, FLOATS)

    def layouts(self, shards: Shards) -> Layouts:
        """The layouts of the weights, from the shapes of codes and scales."""
        found = {}
        for m in with_suffix(shards, ".qweight"):
            inputs = shards.shape(f"{m}.qweight")[0] * 32 // self.bits
            found[f"{m}.weight"] = (f"{m}.scales", self.bits, self.group or inputs)
        return layouts_of(shards, found)

    def weight(self, shards: Shards, module: str) -> Codes | Tensor:
        """A module's weight [out, in]."""
        source, packed, scales, zeros = packed_module(shards, module)
        if packed.dim() != 2 or scales.dim() != 2 or zeros.dim() != 2 or not packed.numel():
            raise InputError(f"{source}: qweight, scales and qzeros must be matrices: download it again")
        n = 32 // self.bits
        inputs, out = packed.shape[0] * n, packed.shape[1]
        group = self.group or inputs
        check_groups(source, inputs, out, group, n, scales, zeros)
        if f"{module}.g_idx" in shards:
            order = shards.get(f"{module}.g_idx", (torch.int32, torch.int64))
            if order.numel() and not torch.equal(order.long(), torch.arange(inputs) // group):
                raise InputError(
                    f"{shards.source(f'{module}.g_idx')} puts inputs in another order (act-order), which is not "
                    f"supported: take a checkpoint quantized with desc_act=false"
                )
        codes = unpack(packed.t(), self.bits).flatten(1)  # [out, in / n] words -> [out, in]
        zero = unpack(self.zeros(zeros), self.bits).flatten(1).t()
        return grouped(source, codes, scales.t(), zero, self.bits)

    def zeros(self, words: Tensor) -> Tensor:
        """Version 1 -> 2: add one to each. As in GPTQModel, the addition is on whole words, which undoes the borrows of
        the subtraction on writing. If AutoGPTQ wrote a zero of 0, the file is damaged beyond repair."""
        first, stored = self.first, unpack(words, self.bits)
        for zero in (2 ** (self.bits - 1) - 1, 2 ** (self.bits - 1)) if self.symmetric else ():
            if (stored == zero).double().mean() > 0.9:  # one that is off is not another format
                first = zero % 2 == 1
        if first != self.first:
            said, found = ("gptq" if x else "gptq_v2" for x in (self.first, first))
            warn_once(f"{self.source} says checkpoint_format {said}; with sym = true, its zeros are those of {found}, "
                      "and are read so")  # fmt: skip
        if not first:
            return words
        ones = 0x11111111 if self.bits == 4 else 0x01010101
        total = (words.long() + ones) & 0xFFFFFFFF
        return torch.where(total >= 1 << 31, total - (1 << 32), total).int()
