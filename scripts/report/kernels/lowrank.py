from __future__ import annotations

from typing import Any

import torch

from kernels.lowrank import (
    EXPAND_D,
    FOLD_R,
    NUM_STAGES,
    NUM_WARPS,
    _attend,
    _expand,
    _fold,
    block_size,
    expand_warps,
    rank_block,
    split_counts,
)
from kernels.splits import blocks_of
from scripts.report.kernels import Aot

RANKS = (0.6, 0.8)  # of D: ojakv's presets
HELD = 96  # full-rank tokens of ojakv: 32 first, 32 last, 32 decoded


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """At ojakv's ranks, by the layout of its cache; the expansion at its largest and at a usual number of parts."""
    shape, entries = blocks_of(n_head, n_kv_head, head_dim), []

    def entry(name: str, fn: Any, types: dict[str, str], sizes: dict[str, Any], warps: int, stages: int) -> None:
        types = dict.fromkeys(fn.arg_names, "i32") | types | dict.fromkeys(sizes, "constexpr")
        entries.append((name, fn, types, sizes, dict(num_warps=warps, num_stages=stages)))

    for rank, dtype, itemsize in ((RANKS[0], "bf16", 2), (RANKS[1], "bf16", 2), (RANKS[0], "fp32", 4)):
        r = round(rank * head_dim)
        R, name = rank_block(r), f"r = {r} {dtype}"
        stored = dict.fromkeys(("q", "q_lat", "k_lat", "v_lat", "k_full", "v_full", "out"), f"*{dtype}")
        stored |= dict.fromkeys(("part_lat", "part_full", "lse", "basis"), "*fp32")
        stored |= dict(stored="*i64", filled="*i1", q_row="i64:16", q_head="i64:16", C="i32:16")
        stored |= dict.fromkeys(("k_row", "k_head", "v_row", "v_head", "lat_chan"), "i64:16")

        def of(fn: Any, types: dict[str, str] = stored) -> dict[str, str]:
            return {k: t for k, t in types.items() if k in fn.arg_names}

        sizes = shape | dict(R_K=r, R_V=r, BLOCK_K=R, BLOCK_V=R, BLOCK_N=block_size(head_dim, r, itemsize), lat_slot=1)
        entry(f"attend {name}", _attend, of(_attend), sizes, NUM_WARPS, NUM_STAGES)
        entry(f"fold {name}", _fold, of(_fold), shape | dict(R=r, BLOCK_C=FOLD_R), 4, 1)
        for parts in (8, 64):
            sizes = dict(D=head_dim, R=r, BLOCK_S=parts, BLOCK_F=4, BLOCK_R=R, BLOCK_D=EXPAND_D)
            entry(f"expand {name}, {parts} parts", _expand, of(_expand), sizes, expand_warps(parts), 1)
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes that one call reads and writes with `length` tokens in each row of ojakv-0.6 in bf16, and its launches."""
    groups, heads, r = batch * n_kv_head, batch * n_head, round(RANKS[0] * head_dim)
    held = min(length, HELD)
    block, device = block_size(head_dim, r, 2), torch.device("cpu")
    s_lat, s_full = split_counts(groups, length, r, HELD, head_dim, block, device)
    parts = 4 * heads * (s_lat * (r + 1) + s_full * (head_dim + 1))
    tokens = 2 * 2 * groups * ((length - held) * r + held * head_dim)
    basis, q, q_lat = 4 * groups * head_dim * r, 2 * heads * head_dim, 2 * heads * r
    return [
        dict(op="lowrank: fold", bytes=basis + q + q_lat, launches=1),
        dict(op="lowrank: attend", bytes=tokens + q + q_lat + parts, launches=1),
        dict(op="lowrank: expand", bytes=basis + parts + q, launches=1),
    ]
