from __future__ import annotations

from typing import Any

from kernels.quantize import BLOCK, GROUP, NUM_WARPS, _quantize
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Values at each number of bits; keys and their centring; keys of the ring, which are centred."""
    entries: list[Aot] = []
    for name, bits, dtype, mean, alpha in (
        ("values", 2, "bf16", False, False), ("values", 4, "bf16", False, False), ("values", 8, "bf16", False, False),
        ("values", 2, "fp32", False, False), ("keys", 2, "bf16", True, True), ("flushed keys", 2, "bf16", False, True),
    ):  # fmt: skip
        types = dict(x=f"*{dtype}", mean="*fp32", alpha="*fp32", packed="*i32", pairs="*i32", n="i32:16")
        types |= dict(heads="i32", tokens="i32") | dict.fromkeys(("x_row", "x_head", "x_token"), "i64:16")
        constexprs: dict[str, Any] = dict(D=head_dim, BITS=bits, MAGNITUDE=alpha, BLOCK=BLOCK)
        constexprs |= {x: None for x, given in (("mean", mean), ("alpha", alpha)) if not given}
        types |= dict.fromkeys(constexprs, "constexpr")
        options = dict(num_warps=NUM_WARPS)
        entries.append((f"{name}, {bits} bits of {dtype}", _quantize, types, constexprs, options))
    return entries


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of compressing a prompt's keys and values in bf16 to 2 bits, one layer."""
    groups = batch * n_kv_head * length * head_dim // GROUP
    return [
        dict(op=f"quantize {x}", bytes=groups * (2 * GROUP + 2 * GROUP // 8 + 4), launches=1)
        for x in ("keys", "values")
    ]
