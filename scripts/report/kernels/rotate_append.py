from __future__ import annotations

from typing import Any

from kernels.rotate_append import _config, _rotate_append
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """With the append, and alone."""
    constants, options = _config(n_head // n_kv_head, head_dim)
    out: list[Aot] = []
    for name, dtype, absent in (("append, bf16", "bf16", ()), ("rotation alone, fp32", "fp32", ("v", "v_out"))):
        types = dict.fromkeys(_rotate_append.arg_names, "i64:16") | dict(H="i32", pos="*i64", cos="*fp32", sin="*fp32")
        types |= dict.fromkeys(("q", "k", "v", "q_out", "k_out", "v_out"), f"*{dtype}")
        given: dict[str, Any] = constants | dict.fromkeys(absent)
        out.append((name, _rotate_append, types | dict.fromkeys(given, "constexpr"), given, options))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """q, k and v, read and written, and a position's angles."""
    size = batch * (2 * (n_head + 2 * n_kv_head) * head_dim * 2 + head_dim * 4)
    return [dict(op="rotate_append", bytes=size, launches=1)]
