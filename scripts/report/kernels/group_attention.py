from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.group_attention import (
    BLOCK_N,
    BLOCK_R,
    CHUNK,
    NUM_STAGES,
    NUM_WARPS,
    VALUES_N,
    _group_logits,
    _group_values,
    _value_block,
)
from kernels.splits import blocks_of, split_count
from scripts.report.kernels import Aot

SHARED, RANK, MULTIPLE = 4, 0.7, 32  # heads of a group, share of its channels (palu-30)
INTEGERS = {2: "*i16", 3: "*i16", 4: "*i32", 8: "*i64"}


def _rank(width: int) -> int:
    return round(RANK * width / MULTIPLE) * MULTIPLE


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """palu-30 with whole and with packed coordinates."""
    G, R, options = n_head // n_kv_head, _rank(SHARED * head_dim), dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES)
    out: list[Aot] = []
    for bits, dtype in ((16, "bf16"), (3, "bf16"), (4, "bf16"), (2, "bf16"), (8, "bf16"), (16, "fp32"), (3, "fp32")):
        absent = (("third",) if bits != 3 else ()) + (("params",) if bits == 16 else ())
        stored = dict(x=INTEGERS.get(bits, f"*{dtype}"), third="*u8")
        for part, fn in (("k", _group_logits), ("v", _group_values)):
            types = dict.fromkeys(fn.arg_names, "i32")
            types |= {part: stored["x"], f"{part}_third": "*u8", f"{part}_params": "*i32"} | dict(pos="*i64")
            constexprs: dict[str, Any] = dict(R=R, BITS=bits) | {f"{part}_{name}": None for name in absent}
            if part == "k":
                types |= dict.fromkeys(("q", "basis"), f"*{dtype}")
                types |= dict.fromkeys(("bias", "cos", "sin", "logits"), "*fp32")
                types |= dict.fromkeys(("q_row", "q_head", "table_row"), "i64:16") | dict(rank="i32:16")
                constexprs |= blocks_of(G, 1, head_dim) | dict(H=n_kv_head, HEADS=SHARED, BLOCK_R=BLOCK_R)
                constexprs |= dict(BLOCK_N=BLOCK_N // 2 if dtype == "fp32" else BLOCK_N)
            else:
                types |= dict.fromkeys(("logits", "part", "lse"), "*fp32") | dict(q=f"*{dtype}")
                constexprs |= dict(N=n_kv_head // SHARED, G=SHARED * G, BLOCK_N=VALUES_N, CHUNK=CHUNK)
                constexprs |= _value_block(SHARED * G)
            types |= dict.fromkeys(constexprs, "constexpr")
            name = f"{'logits' if part == 'k' else 'values'}, {bits} bits, {dtype}"
            out.append((name, fn, types, constexprs, options))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """palu-30 in 16 bits. Heads of a group find its coordinates in L2; logits and parts are written and read."""
    R, groups = _rank(SHARED * head_dim), n_kv_head // SHARED
    splits = split_count(batch * groups * triton.cdiv(R, CHUNK), length, VALUES_N, torch.device("cpu"))
    coordinates, logits = batch * groups * length * R * 2, batch * n_head * length * 4
    basis, parts = groups * SHARED * head_dim * (R * 2 + 4), batch * n_head * splits * (R + 1) * 4
    flops = 2 * batch * n_kv_head * length * R * head_dim
    angles, read = length * head_dim * 4, logits * triton.cdiv(R, CHUNK)
    return [
        dict(op="logits of group_attention", bytes=coordinates + basis + logits + angles, launches=1, flops=flops),
        dict(op="values of group_attention", bytes=coordinates + read + parts, launches=1),
        dict(op="combine of group_attention", bytes=parts + basis, launches=4),
    ]
