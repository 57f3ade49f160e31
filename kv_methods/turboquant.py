"""Keys and values turned at random, then each coordinate coded by itself in 2 to 4 bits, with a fixed codebook.

Any vector, turned at random, is a random point on the sphere of its length: every coordinate has the same density,
close to a normal one, for which Lloyd-Max codes lose least. No calibration and no zeros are needed, only one number
beside the codes: the length. Keys are turned after the rotation by position, and queries with them; the output is
turned back. At D = 128: 132 of 512 bytes per token and KV head in 4 bits, 100 in 3, 68 in 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cache.base import knob
from cache.packed import check_groups
from cache.quantized import QuantizedStore, Turned, center, skip
from runtime.errors import InputError

PRESETS = {  # the bytes of TurboQuant's runs, which instead give 32 of 128 channels one bit more
    "turboquant-3.5": dict(k_bits=4, v_bits=3),
    "turboquant-2.5": dict(k_bits=3, v_bits=2),
}


class TurboQuant(Turned):
    paper = "Zandieh, Daliri et al. 2025, TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate"
    lossless = dict(bits=16)
    stress = dict(bits=2, recent=5, sinks=3)

    @dataclass
    class Args:
        bits: Literal[2, 3, 4, 16] = knob(4, "bits of a coordinate of keys and values (2 to 4: TurboQuant; 16: as is)")
        k_bits: int | None = knob(None, "bits of keys; None: `bits`")
        v_bits: int | None = knob(None, "bits of values; None: `bits`")
        recent: int = knob(1, "newest tokens in the cache's dtype: 1 is the current one (ours)", 1)
        sinks: int = knob(0, "first tokens in the cache's dtype (ours)", 0)
        seed: int = knob(0, "of the rotation, which every layer has of its own (ours)", 0)
        center: bool | None = center()
        skip: float = skip()

        def __post_init__(self):
            for bits in (self.k_bits, self.v_bits):
                if bits not in (None, 2, 3, 4, 16):
                    raise InputError(f"turboquant: no codebook of {bits} bits, use one of 2, 3, 4, 16")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        check_groups("turboquant", shape.head_dim)
        D, T = shape.head_dim, shape.max_seq_len
        self.matrix = self.constant("rotation", (D, D), random_rotation(D, (args.seed << 16) + layer), torch.float32)
        sinks, ring = min(args.sinks, T), min(args.recent, T)
        self.keys, self.values = (
            QuantizedStore(shape, bits or args.bits, sinks, ring, codebook=True) for bits in (args.k_bits, args.v_bits)
        )


def random_rotation(n: int, seed: int):
    """A uniformly random orthogonal matrix, fp32 [n, n]: Q of the QR of normal numbers, with R's diagonal positive."""
    drawn = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(drawn)
    return (q * r.diagonal().sign()).float()
