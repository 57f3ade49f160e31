from __future__ import annotations

from typing import Any

from kernels.linear import _packed_linear
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """The output projection: a row of x and up to 16, of 4 bits with zeros or minima, 8 bits and bf16, groups of 32."""
    n = n_head * head_dim
    types = dict(x="*bf16", packed="*i32", scale="*fp16", step=None, zero="*u8", minimum=None, min_step=None, y="*bf16")
    types |= dict(x_row="i32:16", y_row="i32:16", M="i32", blocks="i32", IN="i32:16")
    out: list[Aot] = []
    steps = dict(scale="*i8", step="*fp16", zero=None, minimum="*i8", min_step="*fp16")  # as of GGUF's Q4_K
    for bits, change in ((4, {}), (4, steps), (8, dict(zero=None)), (16, dict(scale=None, zero=None))):
        for rows, one in (("a row", True), ("16 rows", False)):
            # what is None is a constant
            given = {k: t for k, t in (types | change).items() if t is not None}
            absent = {k: None for k, t in (types | change | dict(bias=None)).items() if t is None}
            of = 8 if change is steps else 1
            sizes = dict(BITS=bits, G=32 if bits < 16 else n, S=of, MS=of, R=4, K=128, ONE=one) | absent
            signature = given | dict.fromkeys(sizes, "constexpr")
            options = dict(num_warps=4, num_stages=3)
            out.append(
                (f"product of {bits} bits{' in steps' * (of > 1)}, {rows}", _packed_linear, signature, sizes, options)
            )
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes of the output projection's weights, scales and zeros, and of its rows."""
    n = n_head * head_dim
    return [
        dict(op=f"packed_linear, {bits} bits", bytes=int(n * n * per) + 4 * batch * n, launches=1)
        for bits, per in ((4, 0.5 + 2.5 / 32), (8, 1 + 2 / 32), (16, 2))
    ]
