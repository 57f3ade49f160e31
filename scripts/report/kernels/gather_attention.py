from __future__ import annotations

from typing import Any

import torch

from kernels.gather_attention import _gather_attention, options_of
from kernels.splits import block_size, blocks_of, split_count
from scripts.report.kernels import Aot

CHOSEN = 160  # the list of Self-Indexing KVCache


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    names = _gather_attention.arg_names
    tile = blocks_of(n_head, n_kv_head, head_dim)
    entries: list[Aot] = []
    for name, dtype, batch in (("gather", "bf16", 64), ("gather, batch 1", "bf16", 1), ("gather fp32", "fp32", 64)):
        itemsize = 4 if dtype == "fp32" else 2
        block = block_size(batch * n_kv_head, CHOSEN, tile["BLOCK_D"] * itemsize, torch.device("cpu"))
        constexprs: dict[str, Any] = tile | dict(BLOCK_N=block)
        types = dict.fromkeys(names, "i64:16") | dict.fromkeys(("q", "k", "v"), f"*{dtype}")
        types |= dict.fromkeys(("idx", "count"), "*i64") | dict.fromkeys(("part", "lse"), "*fp32")
        types |= dict.fromkeys(("count_row", "count_head", "H", "K", "S"), "i32")
        types |= dict.fromkeys(constexprs, "constexpr")
        entries.append((name, _gather_attention, types, constexprs, options_of(tile, itemsize)))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer that chooses one token in eight: bytes read and written in bf16, launches."""
    chosen, groups, device = length // 8, batch * n_kv_head, torch.device("cpu")
    block = block_size(groups, chosen, blocks_of(n_head, n_kv_head, head_dim)["BLOCK_D"] * 2, device)
    splits = split_count(groups, chosen, block, device)
    parts = 2 * 4 * batch * n_head * splits * (head_dim + 1) if splits > 1 else 0  # written, and read to combine them
    size = groups * chosen * (2 * head_dim * 2 + 8) + parts + 2 * batch * n_head * head_dim * 2
    return [dict(op="gather_attention, 1/8 of the tokens", bytes=size, launches=1 + (splits > 1))]
