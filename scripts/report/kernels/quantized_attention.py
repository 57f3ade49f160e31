from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.quantized_attention import BLOCK_N, GROUP, NUM_STAGES, NUM_WARPS, _quantized_attention
from kernels.splits import blocks_of, split_count
from scripts.report.kernels import Aot

INTEGERS = {2: "*i16", 3: "*i16", 4: "*i32", 8: "*i64"}


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """KIVI's keys per channel, then tokens by themselves in groups of a whole head."""
    entries: list[Aot] = []
    for channels, bits, group, dtype in (
        (True, 2, GROUP, "bf16"), (True, 4, GROUP, "bf16"), (False, 4, head_dim, "bf16"), (False, 3, head_dim, "bf16"),
        (False, 2, head_dim, "bf16"), (False, 8, head_dim, "bf16"), (False, 16, GROUP, "bf16"),
        (True, 3, GROUP, "bf16"), (True, 8, GROUP, "bf16"), (True, 16, GROUP, "bf16"),
        (True, 2, GROUP, "fp32"), (False, 4, GROUP, "fp32"),
    ):  # fmt: skip
        constexprs: dict[str, Any] = blocks_of(n_head, n_kv_head, head_dim) | dict(BLOCK_N=BLOCK_N, CHANNELS=channels)
        constexprs |= dict(K_BITS=bits, V_BITS=bits, K_GROUP=group, V_GROUP=group)
        types = dict.fromkeys(_quantized_attention.arg_names, "i32")
        types |= dict.fromkeys(("q", "k_whole", "v_whole"), f"*{dtype}") | dict.fromkeys(("part", "lse"), "*fp32")
        types |= dict.fromkeys(("k", "v"), INTEGERS.get(bits, f"*{dtype}"))
        types |= dict.fromkeys(("k_third", "v_third"), "*u8") | dict.fromkeys(("k_params", "v_params"), "*i32")
        types |= dict.fromkeys(("pos", "k_stop", "v_stop"), "*i64") | dict.fromkeys(("q_row", "q_head"), "i64:16")
        absent = (() if bits == 3 else ("k_third", "v_third")) + (() if bits < 16 else ("k_params", "v_params"))
        constexprs |= dict.fromkeys(absent)
        types |= dict.fromkeys(constexprs, "constexpr")
        name = f"{'channels' if channels else f'groups of {group}'}, {bits} bits, {dtype}"
        entries.append(
            (name, _quantized_attention, types, constexprs, dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES))
        )
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of one layer and step of kivi-2 at its residual of 128 tokens. Parts are written and read."""
    rows, D, whole = batch * n_kv_head, head_dim, min(128, length)
    S = split_count(rows, length + whole, 2 * BLOCK_N, torch.device("cpu"))
    share = round(S * length / (length + whole))
    S = max(1, min(share, triton.cdiv(length, BLOCK_N))) + max(1, S - share)
    parts = S * batch * n_head * (D + 1) * 4
    read = rows * ((length - whole) * 2 * (D // 4 + D // 32 * 4) + whole * 4 * D) + 2 * batch * n_head * D * 2
    return [dict(op="quantized_attention", bytes=read + parts, launches=1),
            dict(op="combine of quantized_attention", bytes=parts, launches=1)]  # fmt: skip
