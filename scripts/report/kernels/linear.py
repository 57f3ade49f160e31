from __future__ import annotations

from typing import Any

import torch

from kernels.linear import _packed_linear, _unpack_rows, tile_of
from kernels.splits import multiprocessors
from scripts.report.kernels import Aot

STEPS = dict(scale="*i8", step="*fp16", zero=None, minimum="*i8", min_step="*fp16")  # as of GGUF's Q4_K
FORMATS: tuple[tuple[str, int, dict[str, str | None]], ...] = (
    ("4 bits", 4, {}), ("4 bits in steps", 4, STEPS), ("8 bits", 8, dict(zero=None)),
    ("16 bits", 16, dict(scale=None, zero=None)),
)  # fmt: skip
WEIGHT = dict(packed="*i32", scale="*fp16", step=None, zero="*u8", minimum=None, min_step=None)


def product(
    form: str, bits: int, change: dict[str, str | None], tile: dict[str, int], n: int, dtype: torch.dtype
) -> Aot:
    """The kernel of a tile, for groups of 32 of n inputs and x in a dtype."""
    rows, R = tile["ROWS_X"], tile["R"]
    name = f"product of {form}, {rows} row{'s' * (rows > 1)}, {R} block{'s' * (R > 1)}"
    x = "*fp32" if dtype == torch.float32 else "*bf16"
    name += ", fp32" * (x == "*fp32")
    types = dict(x=x) | WEIGHT | change | dict(bias=None, y=x, mask="i32", M="i32", blocks="i32")
    return _entry(name, _packed_linear, types | dict(IN="i32:16"), _shapes(bits, change, n) | tile)


def _shapes(bits: int, change: dict[str, str | None], n: int) -> dict[str, int]:
    of = 8 if change is STEPS else 1
    return dict(BITS=bits, G=32 if bits < 16 else n, S=of, MS=of)


def _entry(name: str, fn: Any, types: dict[str, str | None], sizes: dict[str, int]) -> Aot:
    absent = {k: None for k, t in types.items() if t is None}  # what is None is a constant
    constants: dict[str, Any] = {k: v for k, v in sizes.items() if k != "num_warps"} | absent
    signature = {k: t for k, t in types.items() if t is not None} | dict.fromkeys(constants, "constexpr")
    return name, fn, signature, constants, dict(num_warps=sizes["num_warps"])


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """The output projection: a row of x, 16 and 64 (or 32), in bf16 and fp32, by weights of 4 bits with zeros or
    minima, of 8 and 16, groups of 32; a row also by two and four blocks a program, as of wider outputs; and W unpacked.
    """
    n = n_head * head_dim
    out: list[Aot] = []
    here = torch.device("cpu")
    launches = [(rows, n // 16, dtype) for dtype in (torch.bfloat16, torch.float32) for rows in (1, 16, 64)]
    launches += [(1, 8 * multiprocessors(here), torch.bfloat16), (1, 16 * multiprocessors(here), torch.bfloat16)]
    for form, bits, change in FORMATS:
        for rows, blocks, dtype in launches:
            out.append(product(form, bits, change, tile_of(rows, bits, blocks, dtype, here), n, dtype))
        types = WEIGHT | change | dict(w="*bf16", mask="i32", IN="i32:16")
        out.append(
            _entry(f"unpack {form}", _unpack_rows, types, _shapes(bits, change, n) | dict(C=4 * bits, num_warps=4))
        )
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes of the output projection's weights, scales and zeros, and of its rows."""
    n = n_head * head_dim
    return [
        dict(op=f"packed_linear, {bits} bits", bytes=int(n * n * per) + 4 * batch * n, launches=1)
        for bits, per in ((4, 0.5 + 2.5 / 32), (8, 1 + 2 / 32), (16, 2))
    ]
