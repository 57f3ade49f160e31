from __future__ import annotations

from typing import Any

from scripts.report.kernels import Aot
from scripts.report.kernels.dense_attention import split_aot, split_bytes


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    shape, extra = (n_head, n_kv_head, head_dim), ("mean_k", "mean_v", "count")
    return [
        split_aot("packed with extra token", *shape, absent=("start",)),
        split_aot("packed", *shape, absent=("start", *extra)),
    ]


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer, all of whose heads keep a fifth: bytes read and written in bf16, launches."""
    size = split_bytes(n_head, n_kv_head, head_dim, batch, length // 5) + 2 * batch * n_kv_head * head_dim * 4
    return [dict(op="packed_attention, 1/5 of the tokens", bytes=size, launches=2)]
