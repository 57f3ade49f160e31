from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.offload import _fetch, rows_of
from kernels.splits import block_size, split_count
from scripts.report.kernels import Aot

BUS, RING = 64e9, 16  # bytes a second of PCIe 5 x16, and double_sparsity_offload's newest tokens


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    entries: list[Aot] = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        types = dict.fromkeys(("host_k", "host_v", "out_k", "out_v"), f"*{dtype}") | dict(idx="*i64")
        sizes = dict(D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROWS=rows_of(head_dim, itemsize))
        types = types | dict.fromkeys(("n", "K", "T"), "i32") | dict.fromkeys(sizes, "constexpr")
        entries.append((f"fetch {dtype}", _fetch, types, sizes, dict(num_warps=4, num_stages=1)))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes that one call moves on the device with `length` tokens in each row, 1/16 of them chosen, K and V in bf16.

    What a fetch reads comes over the bus, while the layer before computes.
    """
    groups, heads, device = batch * n_kv_head, batch * n_head, torch.device("cpu")
    n, width = max(1, -(-length // 16) - RING), 2 * 2 * head_dim
    rows, listed = groups * n * width, 8 * groups * n
    splits = split_count(groups, n + RING, block_size(groups, n + RING, width // 2, device), device)
    whole = 2 * 2 * heads * head_dim + groups * RING * width + 2 * 4 * heads * splits * (head_dim + 1)
    return [
        dict(op="fetch_rows over the bus", bytes=rows + listed, launches=1, bandwidth=BUS),
        dict(op="fetched_attention", bytes=rows + listed + whole, launches=2),
    ]
