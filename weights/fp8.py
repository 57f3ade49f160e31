"""FP8 as Qwen and DeepSeek publish it (quant_method fp8): e4m3 codes with a scale per block of rows and inputs.

Per module: weight float8_e4m3fn [out, in] and weight_scale_inv (of AutoFP8: weight_scale), by which codes are
multiplied: [out / b, in / c] by weight_block_size [b, c], or one number without it. Modules that were not converted
have a plain weight. The published models round activations to 8 bits, too, which is not done here. Reference:
transformers, integrations/finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, float8_e4m3fn

from runtime.errors import InputError
from weights.codes import Codes, dtype_name, floats
from weights.settings import Settings, not_performed
from weights.shards import FLOATS, Layouts, Shards, layouts_of, with_suffix

SCALES = ("weight_scale_inv", "weight_scale")
PARTS = ("activation_scale", "input_scale", "k_scale", "v_scale")  # of activations and of the KV cache: not used


class FP8:
    def __init__(self, settings: Settings):
        s = settings
        s.one_of(("e4m3", "float8_e4m3fn"), "e4m3", "fmt")
        s.one_of((True,), True, "is_checkpoint_fp8_serialized")
        s.one_of(("dynamic", "static"), "dynamic", "activation_scheme")
        size = s.get("weight_block_size")
        if size is not None and not (
            isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        ):
            raise s.refuse("weight_block_size", "two positive numbers, or null")
        self.block = (size[0], size[1]) if size else None
        self.warning = not_performed(s, "8-bit activations")

    def read(self, shards: Shards) -> Iterator[tuple[str, Tensor | Codes]]:
        """Yields (name, tensor) for all tensors."""
        for name in shards:
            module, _, part = name.rpartition(".")
            if part in SCALES:
                if shards.dtype(f"{module}.weight") != "F8_E4M3":
                    raise InputError(f"{shards.source(name)} scales no weight in float8_e4m3fn: download it again")
            elif shards.dtype(name) == "F8_E4M3":
                scale = next((x for x in SCALES if f"{module}.{x}" in shards), SCALES[0])
                yield name, self.weight(shards, name, f"{module}.{scale}")
            elif part not in PARTS:
                yield name, shards.get(name, FLOATS)

    def weight(self, shards: Shards, name: str, scale: str) -> Codes | Tensor:
        source, w, by = shards.source(name), shards.get(name, (float8_e4m3fn,)), shards.get(scale, FLOATS, name)
        if w.dim() != 2 or not w.numel():
            raise InputError(f"{source} has shape {list(w.shape)}, expected a matrix in {dtype_name(w)}")
        if self.block is None:
            if by.numel() != 1:
                raise InputError(f"{source} has scales {list(by.shape)}, expected one without weight_block_size")
            by = by.reshape(1, 1).expand(len(w), 1)
        return floats(source, w, by, self.block)

    def layouts(self, shards: Shards) -> Layouts:
        """The layouts of the weights, from their shapes."""
        found = {}
        for scale in SCALES:
            for m in with_suffix(shards, f".{scale}"):
                if len(size := shards.shape(f"{m}.weight")) == 2:
                    found[f"{m}.weight"] = (f"{m}.{scale}", 8, self.block[1] if self.block else size[1])
        return layouts_of(shards, found)
