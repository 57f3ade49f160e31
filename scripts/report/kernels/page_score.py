from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.page_score import NUM_WARPS, TILE, _page_score
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    width = triton.next_power_of_2(head_dim)
    sizes = dict(G=n_head // n_kv_head, D=head_dim, BLOCK_D=width, BLOCK_P=TILE // width)
    types = dict.fromkeys(("q_row", "q_head", "row", "head", "out_row", "out_head"), "i64:16")
    types |= dict(last="*i64", out="*fp32", H="i32", P="i32:16") | dict.fromkeys(sizes, "constexpr")
    out: list[Aot] = []
    for dtype in ("bf16", "fp32"):
        signature = types | dict.fromkeys(("q", "low", "high"), f"*{dtype}")
        signature = {a: signature[a] for a in _page_score.arg_names}
        out.append((f"page score {dtype}", _page_score, signature, sizes, dict(num_warps=NUM_WARPS, num_stages=1)))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Pages of 16 tokens: both bounds read, a score written."""
    pages = batch * n_kv_head * -(-length // 16)
    size = pages * (2 * 2 * head_dim + 4) + 2 * batch * n_head * head_dim
    return [dict(op="page_score, pages of 16", bytes=size, launches=1)]
