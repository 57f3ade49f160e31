"""compressed-tensors, as llm-compressor writes it: pack-quantized, int-quantized, float-quantized, naive-quantized.

Per module: weight_packed int32 [out, in * bits / 32] with weight_shape, or weight int8 or float8_e4m3fn [out, in];
weight_scale [out, in / g] (group), [out, 1] (channel), [1] (tensor) or [out / b, in / c] (block, FP8 alone);
weight_zero_point like the scales, packed along the outputs beside weight_packed, signed. w = scale * (code - zero).
The tensors show which modules are quantized, so `ignore` and `targets` are not read. Reference:
compressed-tensors 0.20, compressors/pack_quantized, compressors/naive_quantized and quantization/lifecycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import InputError, short
from weights.codes import Codes, asymmetric, check, dtype_name, floats, grouped, unpack
from weights.settings import Settings, not_performed
from weights.shards import FLOATS, Layouts, Shards, layouts_of, with_suffix

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
PARTS = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale")


class CompressedTensors:
    """Reads a folder's modules; `warning` names what the configuration asks for and this engine does not do."""

    def __init__(self, settings: Settings):
        s = settings
        s.one_of(("compressed", "frozen"), "compressed", "quantization_status")
        if s.get("format") != "mixed-precision":
            s.one_of(FORMATS, None, "format")
        sparsity = s.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise s.refuse("sparsity_config", "none or format dense")
        if s.get("transform_config"):
            raise s.refuse("transform_config", "none: its rotations change what the layers compute")
        groups = s.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise s.refuse("config_groups", "a group of quantized layers")
        self.blocks: set[tuple[int, int]] = set()
        self.bits: set[int] = set()
        self.symmetric: set[bool] = set()
        acts = [self._read_group(s, name, group) for name, group in groups.items()]
        bits, self.has_cache_scales = next((a for a in acts if a), None), bool(s.get("kv_cache_scheme"))
        self.warning = not_performed(s, f"{bits}-bit activations" if bits else "")

    def _read_group(self, s: Settings, name: str, group: Any) -> int | None:
        """Check and record a scheme -> the bits of activations it asks for."""
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise InputError(f"{s.source}: config_groups.{name} = {short(group)}, expected one with weights")
        own, w = Settings(group, f"{s.source}: {name}"), Settings(group["weights"], f"{s.source}: {name}: weights")
        own.one_of(FORMATS, "dense", "format")
        number_type = w.one_of(("int", "float"), "int", "type")
        self.bits.add(w.one_of((4, 8) if number_type == "int" else (8,), 8, "num_bits"))
        self.symmetric.add(w.one_of((True, False), True, "symmetric"))
        w.one_of(("weight", "static", False), False, "actorder")
        strategy = w.one_of(("tensor", "channel", "group", "block"), "tensor", "strategy")
        if strategy == "block":
            shape = w.get("block_structure")
            if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
                raise w.refuse("block_structure", "two positive numbers")
            self.blocks.add((shape[0], shape[1]))
        acts = own.get("input_activations", "output_activations")
        return acts.get("num_bits", 8) if isinstance(acts, dict) else 8 if acts else None

    def read(self, shards: Shards) -> Iterator[tuple[str, Tensor | Codes]]:
        """Yields (name, tensor) for all tensors; modules that were ignored have a plain weight."""
        packed = set(with_suffix(shards, ".weight_packed"))
        modules = packed | set(with_suffix(shards, ".weight_scale"))
        for name in shards:
            module, _, part = name.rpartition(".")
            if part == "weight_packed":
                yield f"{module}.weight", self.packed(shards, module)
            elif part == "weight" and module in modules:
                if module in packed:
                    raise InputError(f"{shards.source(name)} is there packed too: remove one")
                yield name, self.plain(shards, module)
            elif part == "weight_g_idx":
                raise InputError(f"{shards.source(name)}: activation ordering by group is not supported")
            elif not (part in PARTS and module in modules or self.has_cache_scales and part in CACHE_SCALES):
                yield name, shards.get(name, FLOATS)

    def layouts(self, shards: Shards) -> Layouts:
        """The layouts of the weights, from the shapes of codes and scales."""
        found = {}
        for m in with_suffix(shards, ".weight_scale"):
            words, codes, scale = (shards.shape(f"{m}.{x}") for x in ("weight_packed", "weight", "weight_scale"))
            size = shards.get(f"{m}.weight_shape").tolist() if f"{m}.weight_shape" in shards else codes
            if len(size) != 2:
                continue
            block = self.block_of(codes, scale) if shards.dtype(f"{m}.weight") == "F8_E4M3" else None
            n, groups = size[1], scale[1] if len(scale) == 2 else 1
            bits = next((b for b in sorted(self.bits) if words and words[1] == -(-n * b // 32)), 8)
            found[f"{m}.weight"] = (f"{m}.weight_scale", bits, block[1] if block else n // max(groups, 1))
        return layouts_of(shards, found)

    def packed(self, shards: Shards, module: str) -> Codes | Tensor:
        """A weight [out, in] of 4- or 8-bit codes in words, each stored plus half the range."""
        by = f"{module}.weight_packed"
        source, words = shards.source(by), shards.get(by, (torch.int32,))
        scale = shards.get(f"{module}.weight_scale", FLOATS, by)
        size = shards.get(f"{module}.weight_shape", (torch.int64, torch.int32), by).tolist()
        if not isinstance(size, list) or len(size) != 2 or words.dim() != 2 or not all(0 < n < 1 << 31 for n in size):
            raise InputError(f"{source} has shape {list(words.shape)} and weight_shape {size}, expected matrices")
        out, n = size
        fits = [b for b in sorted(self.bits) if list(words.shape) == [out, -(-n * b // 32)]]
        if not fits:
            raise InputError(f"{source} has shape {list(words.shape)}, which holds no [{out}, {n}] of "
                             f"{' or '.join(map(str, sorted(self.bits)))} bits")  # fmt: skip
        bits, zero = fits[0], None
        scale = self.scales(scale, out)
        if (z := self.zeros(shards, module, torch.int32)) is not None:
            if list(z.shape) != [-(-out * bits // 32), scale.shape[1]]:
                raise InputError(f"{source}: zero points {list(z.shape)} do not fit scales {list(scale.shape)}")
            zero = unpack(z.t(), bits).flatten(1)[:, :out].t()
        return grouped(source, unpack(words, bits).flatten(1)[:, :n], scale, zero, bits)

    def plain(self, shards: Shards, module: str) -> Codes | Tensor:
        """int8 or float8_e4m3fn -> Codes, or fp32."""
        by = f"{module}.weight"
        source, w = shards.source(by), shards.get(by)
        scale = shards.get(f"{module}.weight_scale", FLOATS, by)
        if w.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise InputError(f"{source} is {dtype_name(w)} beside a weight_scale, expected int8 or float8_e4m3fn")
        if w.dim() != 2 or not w.numel():
            raise InputError(f"{source} has shape {list(w.shape)}, expected a matrix")
        if w.dtype == torch.float8_e4m3fn:
            block = self.block_of(w.shape, scale.shape)
            return floats(source, w, scale if block else self.scales(scale, len(w)), block)
        scale = self.scales(scale, len(w))
        check(source, w, scale)
        scale = scale.float().contiguous()
        if (zero := self.zeros(shards, module, torch.int8)) is None or not zero.any():
            return Codes(w, scale, None, 8)
        check(source, w, scale, zero := self.scales(zero, len(w)))
        return asymmetric(w, scale, zero)

    def zeros(self, shards: Shards, module: str, dtype: torch.dtype) -> Tensor | None:
        """A module's zero points. Raises InputError if they are missing although every scheme has them."""
        name = f"{module}.weight_zero_point"
        if name in shards or True not in self.symmetric:
            return shards.get(name, (dtype,), f"{module}.weight")
        return None

    def block_of(self, size: Sequence[int], scales: Sequence[int]) -> tuple[int, int] | None:
        """The rows and inputs of a block, if these are scales of blocks of a weight of that size."""
        fits = (b for b in self.blocks if [*scales] == [-(-n // m) for n, m in zip(size, b, strict=True)])
        return next(fits, None)

    def scales(self, scale: Tensor, out: int) -> Tensor:
        """Scales or zeros per tensor [], [1] or [1, 1], per channel [out] or [out, 1], or per group -> [out, n]."""
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(out, 1).contiguous()
        return scale[:, None] if scale.dim() == 1 else scale
