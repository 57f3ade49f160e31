"""Products with the experts of a mixture: every row of x with the weight of an expert of its own.

The experts' weights [out, in] lie one after the other, dense or packed (linear.py), so that a step reads those of the
experts that it chose. C++ reads each of them once, for all rows that chose it; Triton once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.linear import ROWS, Weight, _packed_linear_kernel, _shapes, packed_linear, share_count, tile_of
from kernels.op import nbytes, operation, whole_vectors
from kernels.tuned import tuned


def _serves(x: Tensor, expert: Tensor, weight: Tensor, experts: int) -> bool:
    return whole_vectors(x) and x.dtype == weight.dtype and not torch.is_grad_enabled()


def _read(names: Sequence[str], x: Tensor, expert: Tensor, *rest: Any) -> dict[str, int]:
    """At most one expert per row."""
    experts = rest[-1]
    return {name: nbytes(w) * min(len(x), experts) // experts for name, w in zip(names, rest, strict=False)}


@operation(cpp=_serves, fake=lambda x, expert, weight, experts: x.new_empty(len(x), len(weight) // experts),
           reads=partial(_read, ["weight"]))  # fmt: skip
def dense_experts(x: Tensor, expert: Tensor, weight: Tensor, experts: int) -> Tensor:
    """x [N, in], expert [N] int64, weight [experts * out, in] -> [N, out]."""
    each = weight.view(experts, -1, x.shape[1])
    return torch.cat([F.linear(row, each[e][0]) for row, e in zip(x.split(1), expert.split(1), strict=True)])


@triton.jit
def _dense_experts_kernel(x, expert, weight, y, OUT, IN, R: tl.constexpr, C: tl.constexpr):
    """A program multiplies R rows of an expert's weight by a row of x, C inputs at a time: a step reads them once."""
    row, offs_n = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    p_w = weight + (tl.load(expert + row) * OUT + tl.minimum(offs_n, OUT - 1))[:, None] * IN
    acc = tl.zeros([R, C], tl.float32)
    for first in tl.range(0, IN, C, num_stages=4):
        offs_k = first + tl.arange(0, C)
        b_w = tl.load(p_w + offs_k, mask=(offs_k < IN)[None, :], other=0.0).to(tl.float32)
        acc += b_w * tl.load(x + row * IN + offs_k, mask=offs_k < IN, other=0.0).to(tl.float32)
    tl.store(y + row * OUT + offs_n, tl.sum(acc, 1).to(y.dtype.element_ty), mask=offs_n < OUT)


@dense_experts.triton
def _dense_in_triton(x: Tensor, expert: Tensor, weight: Tensor, experts: int) -> Tensor:
    (N, n), out = x.shape, len(weight) // experts
    y = x.new_empty(N, out)
    grid, tile = (triton.cdiv(out, 16), N), dict(R=16, C=256, num_warps=4)
    _dense_experts_kernel[grid](x.contiguous(), expert, weight, y, out, n, **tile)
    return y


def _as_rows(x: Tensor, expert: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(len(x), len(packed) // rest[-1] * ROWS)


@operation(cpp=whole_vectors, fake=_as_rows, reads=partial(_read, Weight._fields))
def packed_experts(
    x: Tensor, expert: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bits: int, experts: int,
) -> Tensor:  # fmt: skip
    """x [N, in] fp32 or bf16, expert [N] int64, the `Weight` of [experts * out, in] -> [N, out], sums in fp32."""
    w, blocks = Weight(packed, scale, step, zero, minimum, min_step), len(packed) // experts
    own = torch.arange(blocks, device=x.device)
    chosen = (w.blocks(e * blocks + own) for e in expert.split(1))
    return torch.cat([packed_linear(row, *part, None, bits) for row, part in zip(x.split(1), chosen, strict=True)])


@packed_experts.triton
def _in_triton(
    x: Tensor, expert: Tensor, packed: Tensor, scale: Tensor | None, step: Tensor | None, zero: Tensor | None,
    minimum: Tensor | None, min_step: Tensor | None, bits: int, experts: int,
) -> Tensor:  # fmt: skip
    w = Weight(packed.view(torch.int32), scale, step, zero, minimum, min_step)
    blocks, (N, n) = len(packed) // experts, x.shape
    tile = tile_of(1, bits, blocks, x.dtype, x.device)
    grid = triton.cdiv(blocks, tile["R"]), N
    shares = share_count(grid[0] * N, triton.cdiv(n * bits // 32, tile["C"]), x.device)
    y = x.new_empty(shares, N, blocks * ROWS, dtype=x.dtype if shares == 1 else torch.float32)
    given = (x.contiguous(), *w, None, expert, y, 2**bits - 1, N, blocks, n)
    tile |= tuned("_packed_linear_kernel", num_warps=tile["num_warps"])
    _packed_linear_kernel[(*grid, shares)](*given, **_shapes(w, n, bits), **tile)
    return y[0] if shares == 1 else y.sum(0).to(x.dtype)
