from __future__ import annotations

from typing import Any

from kernels.select import (
    CHUNK,
    CHUNK_WARPS,
    LISTED,
    ROW,
    SLACK,
    SPAN,
    _bracket,
    _candidates,
    _finish,
    _select_row,
    _warps,
)
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Contexts of 4K and 16K, and of 128K in chunks; chosen from up to the position, and under a mask."""
    options = dict(num_stages=1)
    types = dict(scores="*fp32") | dict.fromkeys(("wanted", "idx", "count"), "*i64")
    types |= dict.fromkeys(("bounds", "found", "words", "listed"), "*i32")
    types |= dict.fromkeys(("row_stride", "head_stride", "mask_row", "mask_head"), "i64:16")
    types |= dict(wanted_row="i64", wanted_head="i64", H="i32", T="i32:16", width="i32:16", K="i32")
    types |= dict(sinks="i32", recent="i32", S="i32")
    chunks = dict(CHUNK=CHUNK, SPAN=SPAN)
    out: list[Aot] = []
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", dict(pos="*i64", mask=None)),
        (", mask", dict(pos=None, mask="*u8")),
    )
    for by, where in forms:
        for name, fn, sizes in (
            ("select of 4K", _select_row, dict(ROW=4096)),
            ("select of 16K", _select_row, dict(ROW=ROW)),
            ("bracket", _bracket, chunks | dict(SLACK=SLACK)),
            ("candidates of 128K", _candidates, chunks | dict(BLOCK_S=131072 // CHUNK)),
            ("finish of 128K", _finish, chunks | dict(BLOCK_S=131072 // CHUNK, LISTED=LISTED)),
        ):
            absent = {a: None for a, t in where.items() if t is None}
            signature = types | where | dict.fromkeys((*sizes, *absent), "constexpr")
            signature = {a: signature[a] for a in fn.arg_names}
            warps = dict(num_warps=_warps(sizes["ROW"]) if fn is _select_row else CHUNK_WARPS)
            out.append((name + by, fn, signature, sizes | absent, options | warps))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes moved and launches of one selection of 1/16 of `length` tokens a KV head, in a buffer just that long."""
    rows, k = batch * n_kv_head, -(-length // 16)
    chosen = 8 * k + 8  # idx and count
    if length <= ROW:
        # scores are read, the flags written and read
        return [dict(op="select", bytes=rows * (4 * length + 2 * length // 8 + chosen), launches=1)]
    # three times the scores; flags of candidates and of what is chosen; the few candidates
    return [dict(op="select", bytes=rows * (12 * length + 4 * length // 8 + chosen), launches=3)]
