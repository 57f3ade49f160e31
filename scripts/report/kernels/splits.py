from __future__ import annotations

from kernels.splits import COMBINE_D, MAX_SPLITS, _combine
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """The combine at its largest and at a usual number of parts."""
    pointers = dict(part="*fp32", lse="*fp32", out="*bf16", S="i32", D="constexpr", BLOCK_S="constexpr")
    return [
        (f"combine {S} parts", _combine, pointers | dict(BLOCK_D="constexpr"),
         dict(D=head_dim, BLOCK_S=S, BLOCK_D=COMBINE_D), dict(num_warps=2, num_stages=1))
        for S in (8, MAX_SPLITS)
    ]  # fmt: skip
