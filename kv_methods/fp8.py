"""Keys and values in 8-bit floats (e4m3), one scale for each KV head and 32 tokens: what serving engines offer first.

A block's scale maps its largest number to 448, the largest of e4m3: nothing overflows, and no calibration is
needed. Every token is kept. The newest tokens stay in the cache's dtype until their block is full. At D = 128: 256.125
of 512 bytes a token and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.base import knob
from cache.packed import check_groups
from cache.quantized import Quantized, QuantizedStore, center, skip
from kernels.quantize import GROUP
from runtime.errors import InputError


class FP8(Quantized):
    paper = "Micikevicius, Stosic et al. 2022, FP8 Formats for Deep Learning"
    lossless = dict(residual=32 * 10**6)
    stress = dict(residual=32)

    @dataclass
    class Args:
        residual: int = knob(
            32, "newest tokens, at most, in the cache's dtype: blocks are coded when so many are full (ours)", GROUP
        )
        center: bool | None = center()
        skip: float = skip()

        def __post_init__(self):
            if self.residual % GROUP:
                raise InputError(f"fp8: residual={self.residual} must be a multiple of the block of {GROUP} tokens")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        check_groups("fp8", shape.head_dim)
        # a block is coded before the token that fills it attends, as in engines, which code every token at once; if the
        # ring holds the whole context, nothing is coded
        ring = min(args.residual, (shape.max_seq_len // GROUP + 1) * GROUP)
        self.keys, self.values = (QuantizedStore(shape, 8, 0, ring, block=ring, codebook=True) for _ in "kv")
