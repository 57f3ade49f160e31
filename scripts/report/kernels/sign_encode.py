from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.sign_codes import SUB
from kernels.sign_encode import BLOCK_G, BLOCK_T, NUM_STAGES, NUM_WARPS, RANGE_T, _encode_keys, _key_range
from kernels.splits import split_count
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    types = dict(k="*bf16", mean="*fp32", lengths="*i64", packed="*u8", part="*fp32", H="i32", S="i32:16", parts="i32")
    types |= dict.fromkeys(("k_row", "k_head", "k_token"), "i64:16") | dict(G="i32:16")
    options, out = dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES), []
    for name, fn, sizes in (
        ("range of channels", _key_range,
         dict(D=head_dim, BLOCK_T=RANGE_T, BLOCK_D=triton.next_power_of_2(head_dim))),
        ("sign codes and codebook", _encode_keys,
         dict(BLOCK_T=BLOCK_T, BLOCK_G=min(BLOCK_G, triton.next_power_of_2(head_dim // SUB)))),
    ):  # fmt: skip
        signature = types | dict.fromkeys(sizes, "constexpr")
        out.append((name, fn, {a: signature[a] for a in fn.arg_names}, sizes, options))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of a prompt in bf16, one layer. The reductions of parts are launches of torch."""
    rows, keys = batch * n_kv_head, batch * n_kv_head * length * head_dim
    cells = 2 * 4 * 5 * head_dim // SUB * 16 * split_count(rows, length, BLOCK_T, torch.device("cpu"))
    ends = 2 * 4 * 3 * head_dim * split_count(rows, length, RANGE_T, torch.device("cpu"))
    return [
        dict(op="key_range", bytes=2 * keys + rows * ends, launches=10),
        dict(op="encode_keys", bytes=2 * keys + keys // 8 + rows * cells, launches=12),
    ]
