"""KIVI: keys quantized per channel, values per token, in 2 or 4 bits; the newest tokens stay in the cache's dtype.

Some channels of a key are large at every token: quantized together with others, they would cost these their precision.
So 32 tokens of one channel share a scale and a zero. Values have no such channels and are quantized token by token, 32
channels together. Nothing is calibrated and nothing selected. At D = 128: 160 of 512 bytes per token and KV head in 4
bits, 96 in 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache.base import knob
from cache.packed import check_groups
from cache.quantized import Quantized, QuantizedStore, center, check_bits, skip
from kernels.quantize import GROUP
from runtime.errors import InputError

PRESETS = {
    "kivi-4": dict(bits=4),  # KIVI-4 of SALS, Tables 2 and 3
    "kivi-2": dict(bits=2),  # KIVI-2 of SALS, Tables 2 and 3; KIVI of Self-Indexing KVCache, Figure 5
}


class Kivi(Quantized):
    paper = "Liu, Yuan et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    lossless = dict(bits=16)
    stress = dict(bits=2, residual=32)

    @dataclass
    class Args:
        bits: Literal[2, 3, 4, 8, 16] = knob(2, "bits of keys and values (KIVI-2, KIVI-4; 3, 8 and 16: ours)")
        k_bits: int | None = knob(None, "bits of keys; None: `bits` (published code: k_bits)")
        v_bits: int | None = knob(None, "bits of values; None: `bits` (published code: v_bits)")
        residual: int = knob(128, "newest tokens in the cache's dtype, R (published code: 128)", GROUP)
        packed: Literal["after", "before"] = knob(
            "after", "tokens are packed after the step that fills the residual, or before it attends (Algorithm 1)"
        )
        center: bool | None = center()
        skip: float = skip()

        def __post_init__(self):
            check_bits("kivi", self.k_bits, self.v_bits)
            if self.residual % GROUP:
                raise InputError(f"kivi: residual={self.residual} must be a multiple of the group of {GROUP} tokens")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        check_groups("kivi", shape.head_dim)
        # keys leave the ring R at a time, so that groups of tokens are whole; values leave one by one, so that the
        # newest R are always there. If they leave after a step (published code), it sees R keys, or R + 1 values
        block = min(args.residual, -(-shape.max_seq_len // GROUP) * GROUP)  # no longer than the context
        ring = block + (args.packed == "after")
        self.keys = QuantizedStore(shape, args.k_bits or args.bits, 0, ring, block=block)
        self.values = QuantizedStore(shape, args.v_bits or args.bits, 0, ring)
