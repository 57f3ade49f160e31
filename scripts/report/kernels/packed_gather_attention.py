from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.packed_gather_attention import NUM_STAGES, NUM_WARPS, UNPACKED, _packed_gather_attention
from kernels.splits import block_size, blocks_of, split_count
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    names = _packed_gather_attention.arg_names
    entries: list[Aot] = []
    for bits, signed, dtype, block in (
        (2, True, "bf16", UNPACKED), (2, True, "bf16", 16), (2, False, "bf16", UNPACKED), (4, True, "bf16", UNPACKED),
        (8, True, "bf16", UNPACKED), (16, False, "bf16", 64), (2, True, "fp32", UNPACKED),
    ):  # fmt: skip
        stored = f"*{dtype}" if bits == 16 else f"*i{8 * bits}"
        constexprs: dict[str, Any] = blocks_of(n_head, n_kv_head, head_dim) | dict(BITS=bits, BLOCK_N=block)
        types = dict.fromkeys(names, "i32") | dict.fromkeys(("q", "sink_k", "sink_v", "tail_k", "tail_v"), f"*{dtype}")
        types |= dict.fromkeys(("idx", "count", "pos", "prompt_len", "flushed"), "*i64")
        types |= dict(k=stored, v=stored, k_params="*i32", v_params="*i32", alpha="*fp32", codes="*u8")
        types |= dict.fromkeys(("part", "lse"), "*fp32") | dict.fromkeys(("q_row", "q_head"), "i64:16")
        absent = ("k_params", "v_params", "alpha", "codes") if bits == 16 else () if signed else ("codes",)
        constexprs |= dict.fromkeys(absent)
        types |= dict.fromkeys(constexprs, "constexpr")
        name = f"{bits} bits{' signed' if signed else ''} {dtype}, blocks of {block}"
        entries.append(
            (name, _packed_gather_attention, types, constexprs, dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES))
        )
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of one layer and step at 2 bits: 7.5 % of the tokens, 64 of them sinks; nothing decoded yet.

    Each decoded token in the ring adds 4 * head_dim bytes a KV head. The list is of int64. Parts are written and read.
    """
    chosen, rows, D = max(0, int(0.075 * length) - 64), batch * n_kv_head, head_dim
    each = D // 8 + 2 * (D // 4 + D // 32 * 4) + 8
    block = min(UNPACKED, block_size(rows, chosen + 64, triton.next_power_of_2(D) * 2, torch.device("cpu")))
    parts = split_count(rows, chosen + 64, block, torch.device("cpu")) * batch * n_head * (D + 1) * 4
    fixed = 64 * 2 * D * 2 + 4 * D  # sinks and alpha
    read = rows * (chosen * each + fixed) + 2 * batch * n_head * D * 2
    return [dict(op="packed_gather_attention", bytes=read + parts, launches=1),
            dict(op="combine of packed_gather_attention", bytes=parts, launches=1)]  # fmt: skip
