"""Keys and values turned by a Hadamard matrix, then quantized token by token (QuaRot's cache).

The matrix is orthogonal and its entries are of one size: a large channel is spread over all channels of its head, and
one scale for a whole head loses little. Keys are turned after the rotation by position, and queries with them, so that
their products do not change; the output is turned back. The newest tokens stay in the cache's dtype, and with `sinks`
the first ones. At D = 128: 136 of 512 bytes per token and KV head in 4 bits, 104 in 3, 72 in 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import knob
from cache.packed import check_groups
from cache.quantized import QuantizedStore, Turned, center, check_bits, skip
from kernels.hadamard import hadamard_matrix, has_hadamard
from kernels.quantize import GROUP
from runtime.errors import InputError

PRESETS = {  # none is a row of the five papers; bits of keys and values as in QuaRot
    "hadamard-8": dict(bits=8),
    "hadamard-4": dict(bits=4),
    "hadamard-3": dict(bits=3),
    "hadamard-2": dict(bits=2),
    "hadamard-quarot": dict(bits=4, recent=1),  # only the current token is not quantized
}


class Hadamard(Turned):
    paper = "Ashkboos, Mohtashami et al. 2024, QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs"
    lossless = dict(bits=16)
    stress = dict(bits=2, recent=5, sinks=3)

    @dataclass
    class Args:
        bits: Literal[2, 3, 4, 8, 16] = knob(4, "bits of keys and values (QuaRot: 4; 3 and 2 in its ablation)")
        k_bits: int | None = knob(None, "bits of keys; None: `bits` (published code: k_bits)")
        v_bits: int | None = knob(None, "bits of values; None: `bits` (published code: v_bits)")
        group: int | None = knob(None, "channels that share a scale; None: all of a head (QuaRot: 128)", GROUP)
        clip: float = knob(0.95, "share of the range that has codes (QuaRot: 0.95)", 0.01, 1)
        recent: int = knob(128, "newest tokens in the cache's dtype (ours, as KIVI's; QuaRot: 1)", 1)
        sinks: int = knob(0, "first tokens in the cache's dtype (ours)", 0)
        center: bool | None = center()
        skip: float = skip()

        def __post_init__(self):
            check_bits("hadamard", self.k_bits, self.v_bits)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        D, group = shape.head_dim, args.group or shape.head_dim
        check_groups("hadamard", D)
        if group != D and (D % group or group % GROUP):
            raise InputError(f"hadamard: group={group} must divide head_dim {D} and be a multiple of {GROUP}")
        if not has_hadamard(D):
            raise InputError(f"hadamard: no Hadamard matrix of {D} channels is known, use turboquant or kivi")
        self.matrix = self.constant("h", (D, D), hadamard_matrix(D), torch.float32)
        sinks, ring = (min(n, shape.max_seq_len) for n in (args.sinks, args.recent))
        self.keys, self.values = (
            QuantizedStore(shape, bits or args.bits, sinks, ring, group, args.clip)
            for bits in (args.k_bits, args.v_bits)
        )
