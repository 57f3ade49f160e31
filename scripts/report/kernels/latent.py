from __future__ import annotations

from typing import Any

from kernels.latent import APPEND_WARPS, BLOCK_K, NUM_STAGES, NUM_WARPS, PART, _append, _project, tiles_of
from kernels.quantize import GROUP
from scripts.report.kernels import Aot

PRESETS = (("sals-25", 4, 4), ("sals-12.5", 8, 2), ("16 bits", 4, 16))  # name, n*D / r, bits of values


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    width, out = n_kv_head * head_dim, []
    entries: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for name, share, bits in PRESETS:
        ranks = dict(LEAD=width // share // 2, REST=width // share // 2)
        types = dict.fromkeys(_append.arg_names, "*bf16") | dict(pos="*i64", value_row="i64:16", R="i32:16", T="i32:16")
        types |= dict.fromkeys(() if bits == 16 else ("ring_v", "ring_pairs", "v", "pairs"), "*i32")
        sizes: dict[str, Any] = ranks | dict(RING_RANK=width // 2, WIDTH=width, BITS=bits, PART=PART)
        sizes |= dict.fromkeys(("ring_pairs", "pairs") if bits == 16 else ())
        entries.append((f"append, {name}", _append, types, sizes, dict(num_warps=APPEND_WARPS, num_stages=1)))
    for name, share, dtype in (("sals-25", 4, "bf16"), ("sals-12.5", 8, "bf16"), ("sals-25 fp32", 4, "fp32")):
        types = dict.fromkeys(_project.arg_names, "i64:16") | dict(S="i32", tiles="i32", lengths="*i64")
        types |= dict.fromkeys(("x", "basis", "lead", "rest"), f"*{dtype}")
        block_k = BLOCK_K // 2 if dtype == "fp32" else BLOCK_K
        block_t, block_r = tiles_of(4 if dtype == "fp32" else 2)
        sizes = dict(WIDTH=width, LEAD=width // share // 2, REST=width // share // 2, BLOCK_T=block_t, BLOCK_R=block_r)
        sizes |= dict(BLOCK_K=block_k)
        options = dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES)
        entries.append((f"project, {name}", _project, types, sizes, options))
    for name, fn, types, sizes, options in entries:
        out.append((name, fn, types | dict.fromkeys(sizes, "constexpr"), sizes, options))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one call in bf16: a token appended to each row, and the projection of prompts of `length` tokens."""
    width, out = n_kv_head * head_dim, []
    for name, share, bits in PRESETS[:2]:
        rank, ring_rank, params = width // share, width // 2, width // GROUP * 4
        ring, stored, new = (
            ring_rank * 2 + width + params,
            rank * 2 + width * bits // 8 + params,
            (ring_rank + width) * 2,
        )
        moved = 2 * ring - (ring_rank - rank) * 2 + stored + new  # of the one that leaves, r coordinates are read
        out.append(dict(op=f"append {name}", bytes=batch * moved, flops=0, launches=1))
        read = batch * length * (width + rank) * 2 + rank * width * 2
        out.append(dict(op=f"project {name}", bytes=read, flops=2 * batch * length * width * rank, launches=1))
    return out
