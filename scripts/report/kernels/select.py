from __future__ import annotations

from typing import Any

from kernels.select import (
    ALONE,
    CHUNK,
    LISTED,
    ROW,
    SLACK,
    TILE,
    WARPS,
    WORDS,
    _list_chunk,
    _listed,
    _sample,
    _select_alone,
    _select_row,
    _take_chunk,
    _warps,
    limit,
)
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Contexts of 4K and 16K, and of 128K in chunks; chosen from up to the position, and under a mask."""
    options = dict(num_stages=1)
    types = dict(scores="*fp32") | dict.fromkeys(("wanted", "idx", "count"), "*i64")
    types |= dict.fromkeys(("found", "floors", "words", "listed"), "*i32")
    types |= dict.fromkeys(("row_stride", "head_stride", "mask_row", "mask_head"), "i64:16")
    types |= dict(wanted_row="i64", wanted_head="i64", H="i32", T="i32:16", width="i32:16", K="i32")
    types |= dict(sinks="i32", recent="i32", size="i32:16", S="i32")

    def reading(T: int) -> dict[str, Any]:
        return dict(SAMPLE=_sample(T), SLACK=SLACK, TILE=TILE, WORDS=WORDS)

    def taking(T: int) -> dict[str, Any]:
        return dict(TILE=TILE, LISTED=_listed(T, T // 16))

    out: list[Aot] = []
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", dict(pos="*i64", mask=None)),
        (", mask", dict(pos=None, mask="*u8")),
    )
    for by, where in forms:
        for name, fn, sizes in (
            ("select of 4K", _select_row, dict(ROW=ROW)),
            ("select of 16K", _select_alone, reading(ALONE) | taking(ALONE)),
            ("select of 16K, half of it", _select_alone, reading(ALONE) | dict(TILE=TILE, LISTED=LISTED)),
            ("list of 32K", _list_chunk, reading(32768)),
            ("take of 32K", _take_chunk, taking(32768) | dict(BLOCK_S=4)),
            ("take of 128K", _take_chunk, taking(131072) | dict(BLOCK_S=131072 // CHUNK)),
        ):
            absent = {a: None for a, t in where.items() if t is None}
            signature = types | where | dict.fromkeys((*sizes, *absent), "constexpr")
            signature = {a: signature[a] for a in fn.arg_names}
            warps = dict(num_warps=_warps(sizes["ROW"]) if fn is _select_row else WARPS)
            registers = limit(sizes["LISTED"]) if fn is _select_alone else {}
            out.append((name + by, fn, signature, sizes | absent, options | warps | registers))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes moved and launches of one selection of 1/16 of `length` tokens a KV head, in a buffer just that long."""
    rows, k = batch * n_kv_head, -(-length // 16)
    chosen = 8 * k + 8  # idx and count
    if length <= ROW:
        # scores are read, the flags written and read
        return [dict(op="select", bytes=rows * (4 * length + 2 * length // 8 + chosen), launches=1)]
    # the scores and a sample of them, flags, the list; a tenth of the slots and their scores
    listed = 4 * length // 10
    return [
        dict(
            op="select",
            bytes=rows * (4 * length + 2 * length // 8 + 4 * listed + chosen),
            launches=1 + (length > ALONE),
        )
    ]
