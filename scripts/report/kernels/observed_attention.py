from __future__ import annotations

from typing import Any

import torch

from kernels.observed_attention import JOIN_OPTIONS, _join, _observed_attention_parts, join_config, parts_options
from kernels.splits import block_size, blocks_of, split_count
from scripts.report.kernels import Aot

SLOTS = 4096  # of a cache that evicts: an eighth of 32K


def sizes_of(n_head: int, n_kv_head: int, head_dim: int, batch: int, slots: int, itemsize: int) -> tuple[int, int]:
    """Tokens of a block, and parts of a head's slots."""
    groups, device = batch * n_kv_head, torch.device("cpu")
    width = blocks_of(n_head, n_kv_head, head_dim)["BLOCK_D"]
    block = block_size(groups, slots, width * itemsize, device)
    return block, split_count(groups, slots, block, device)


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    shape, entries = (n_head, n_kv_head, head_dim), list[Aot]()
    tile = blocks_of(*shape)
    for name, dtype, batch in (("", "bf16", 8), (", batch 1", "bf16", 1), (" fp32", "fp32", 8)):
        itemsize = 4 if dtype == "fp32" else 2
        block, splits = sizes_of(*shape, batch, SLOTS, itemsize)
        types = dict.fromkeys(("q", "k", "v", "y"), f"*{dtype}") | dict(stop="*i64", width="i32:16")
        types |= dict.fromkeys(("logits", "part", "lse", "weights"), "*fp32") | dict.fromkeys(("H", "S", "N"), "i32")
        types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "k_slot", "v_row", "v_head", "v_slot"), "i64:16")
        for what, fn, sizes, options in (
            ("parts", _observed_attention_parts, tile | dict(BLOCK_N=block), parts_options(tile, itemsize)),
            ("join", _join, join_config(n_head // n_kv_head, head_dim, splits), JOIN_OPTIONS),
        ):
            signature = types | dict.fromkeys(sizes, "constexpr")
            entries.append((f"{what}{name}", fn, {a: signature[a] for a in fn.arg_names}, sizes, options))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer that keeps one token in eight; logits and parts are written and read."""
    slots, groups, heads = length // 8, batch * n_kv_head, batch * n_head
    _, splits = sizes_of(n_head, n_kv_head, head_dim, batch, slots, 2)
    between = 2 * 4 * heads * (slots + splits * (head_dim + 1))
    size = groups * slots * (2 * head_dim * 2 + 4) + between + 2 * heads * head_dim * 2
    return [dict(op="observed_attention, 1/8 of the tokens", bytes=size, launches=2)]
