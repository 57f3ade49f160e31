"""AWQ in AutoAWQ's "gemm" version: codes and zero points are packed along the output channels, interleaved.

Per module: qweight int32 [in, out / 8]; scales fp16 [in / g, out]; qzeros int32 [in / g, out / 8]. The eight 4-bit
numbers of a word, lowest bits first, are its channels 0, 2, 4, 6, 1, 3, 5, 7. w = scale * (code - zero). Reference:
AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from runtime.errors import InputError
from weights.codes import Codes, grouped, nibbles
from weights.settings import Settings
from weights.shards import FLOATS, Layouts, Shards, check_groups, layouts_of, packed_module, with_suffix

PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # places of channels 0 to 7 in a word


class AWQ:
    """Reads a folder's modules. Raises InputError for settings that cannot be read exactly."""

    def __init__(self, settings: Settings):
        s = settings
        s.one_of((4,), 4, "bits", "w_bit")
        s.one_of((True,), True, "zero_point")
        s.one_of(("gemm",), "gemm", "version", "format", "checkpoint_format")
        if s.get("backend") == "llm-awq":
            raise s.refuse("backend", "a checkpoint of AutoAWQ's gemm version")
        self.group = s.group_size("group_size", "q_group_size")

    def read(self, shards: Shards) -> Iterator[tuple[str, Tensor | Codes]]:
        """Yields (name, tensor) for all tensors; modules that were not converted have a plain weight."""
        modules = set(with_suffix(shards, ".qweight"))
        for name in shards:
            module, _, part = name.rpartition(".")
            if part == "qweight":
                yield f"{module}.weight", self.weight(shards, module)
            elif part not in ("qzeros", "scales") or module not in modules:
                yield name, shards.get(name, FLOATS)

    def layouts(self, shards: Shards) -> Layouts:
        """The layouts of the weights, from the shapes of codes and scales."""
        found = {}
        for m in with_suffix(shards, ".qweight"):
            found[f"{m}.weight"] = (f"{m}.scales", 4, self.group or shards.shape(f"{m}.qweight")[0])
        return layouts_of(shards, found)

    def weight(self, shards: Shards, module: str) -> Codes | Tensor:
        """A module's weight [out, in]."""
        source, packed, scales, zeros = packed_module(shards, module)
        if packed.dim() != 2 or not packed.numel():
            raise InputError(f"{source} has shape {list(packed.shape)}, expected a matrix: download it again")
        inputs, words = packed.shape
        check_groups(source, inputs, 8 * words, self.group or inputs, 8, scales, zeros)
        codes, zero = (nibbles(t)[..., PLACE].flatten(1).t() for t in (packed, zeros))
        return grouped(source, codes, scales.t(), zero, 4)
