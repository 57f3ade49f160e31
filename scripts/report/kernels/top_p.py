from __future__ import annotations

from typing import Any

from kernels.top_p import BLOCK, WARPS, _top_p
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    types = dict(weights="*fp32", pos="*i64", count="*i64", row="i64:16", head="i64:16", H="i32", T="i32:16")
    types |= dict(sinks="i32", recent="i32", p="fp32", BLOCK="constexpr")
    signature = {a: types[a] for a in _top_p.arg_names}
    return [("top p", _top_p, signature, dict(BLOCK=BLOCK), dict(num_warps=WARPS, num_stages=1))]


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Weights read once from memory; the up to 32 further times are served by the second-level cache."""
    return [dict(op="top_p_count", bytes=batch * n_kv_head * (4 * length + 8), launches=1)]
