from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.dense_attention import PROGRAMS, _combine_config, _combine_shares, _config, _split_attention
from kernels.splits import ASSUMED_SMS
from scripts.report.kernels import Aot

BATCH = 8  # rows: only the tile of lengths depends on them


def split_aot(
    name: str, n_head: int, n_kv_head: int, head_dim: int, dtype: str = "bf16", absent: tuple[str, ...] = ()
) -> Aot:
    """An entry of `aot`: the kernel with some of its pointers absent."""
    strides = ("q_row", "q_head", "k_row", "k_head", "k_slot", "v_row", "v_head", "v_slot")
    constants, options = _config(n_head // n_kv_head, head_dim, 4 if dtype == "fp32" else 2, BATCH)
    types = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | dict.fromkeys(("start", "stop", "count"), "*i64")
    types |= dict.fromkeys(("mean_k", "mean_v", "part", "lse"), "*fp32") | dict.fromkeys(strides, "i64:16")
    types |= dict(B="i32", H="i32") | dict.fromkeys((*constants, *absent), "constexpr")
    signature = {a: types[a] for a in _split_attention.arg_names}
    return name, _split_attention, signature, constants | dict.fromkeys(absent), options


def _combine_aot(name: str, n_head: int, n_kv_head: int, head_dim: int, batch: int) -> Aot:
    tile, _ = _config(n_head // n_kv_head, head_dim, 2, batch)
    constants, options = _combine_config(tile, batch * n_kv_head, PROGRAMS * ASSUMED_SMS)
    types = dict.fromkeys(("part", "lse"), "*fp32") | dict.fromkeys(("start", "stop"), "*i64") | dict(out="*bf16")
    types |= dict.fromkeys(("P", "B", "H"), "i32") | dict.fromkeys(constants, "constexpr")
    return name, _combine_shares, {a: types[a] for a in _combine_shares.arg_names}, constants, options


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    shape, extra = (n_head, n_kv_head, head_dim), ("mean_k", "mean_v", "count")
    return [
        split_aot("decode", *shape, absent=extra),
        split_aot("decode fp32", *shape, dtype="fp32", absent=extra),
        _combine_aot("combine shares", *shape, batch=BATCH),
        _combine_aot("combine shares, batch 1", *shape, batch=1),
    ]


def split_bytes(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int, itemsize: int = 2) -> int:
    """Bytes that both kernels read and write: K and V once, the queries, the parts twice, the result."""
    constants, _ = _config(n_head // n_kv_head, head_dim, itemsize, batch)
    groups = batch * n_kv_head
    programs = min(PROGRAMS * ASSUMED_SMS, groups * triton.cdiv(length, constants["BLOCK_N"]))
    parts = (programs + groups - 1) * constants["G"] * (head_dim + 1) * 4
    return 2 * groups * length * head_dim * itemsize + 2 * parts + 2 * batch * n_head * head_dim * itemsize


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one decode step of a layer: the operation, bytes read and written in bf16, launches."""
    shape = (n_head, n_kv_head, head_dim, batch, length)
    return [dict(op="decode_attention", bytes=split_bytes(*shape), launches=2)]
