from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.window_append import _window_append_kernel
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    entries: list[Aot] = []
    for name, dtype, absent in (("bf16", "bf16", ()), ("fp32, no means", "fp32", ("mean_k", "mean_v"))):
        constants: dict[str, Any] = dict(D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim))
        types = dict.fromkeys(("k_cache", "v_cache", "k", "v"), f"*{dtype}") | dict(slot_of="*i32")
        types |= dict.fromkeys(("mean_k", "mean_v"), "*fp32") | dict.fromkeys(("place", "fresh", "dropped"), "*i64")
        types |= dict.fromkeys(("k_row", "k_head", "v_row", "v_head"), "i64:16") | dict.fromkeys("HC", "i32")
        types |= dict(ring="i32") | dict.fromkeys((*constants, *absent), "constexpr")
        signature = {a: types[a] for a in _window_append_kernel.arg_names}
        entries.append((name, _window_append_kernel, signature, constants | dict.fromkeys(absent), dict(num_warps=1)))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer, all of whose heads drop a token: its slot and the means, read and written."""
    size = batch * n_kv_head * head_dim * 2 * (2 + 2 + 2 + 4 + 4)
    return [dict(op="window_append", bytes=size, launches=1)]
