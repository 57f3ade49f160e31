from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.latent_score import DOT_T, MAX_R, NUM_STAGES, NUM_WARPS, TILE, _score_many, _score_one
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Half of the 25 and of the 12.5 % of all channels that SALS keeps, for one query and for one per head; labels."""
    one = ("q_row", "q_head", "x_row", "x_head", "x_slot", "out_row", "out_head")
    width, out = n_kv_head * head_dim, []
    for name, R, dtype in (("25%", width // 8, "bf16"), ("12.5%", width // 16, "bf16"), ("fp32", width // 8, "fp32")):
        block_r = min(MAX_R, triton.next_power_of_2(R))
        types = dict(q=f"*{dtype}", x=f"*{dtype}", pos="*i64", out="*fp32", H="i32", T="i32:16")
        sizes = dict(R=R, BLOCK_R=block_r, BLOCK_T=TILE // block_r)
        signature = types | dict.fromkeys(one, "i64:16") | dict.fromkeys(sizes, "constexpr")
        out.append((f"score of one query, {name}", _score_one, signature, sizes, dict(num_warps=4, num_stages=1)))
        sizes = dict(
            C=n_head,
            R=R,
            BLOCK_C=max(16, triton.next_power_of_2(n_head)),
            BLOCK_R=32 if dtype == "fp32" else 64,
            BLOCK_T=DOT_T,
        )
        signature = types | dict.fromkeys((*one, "q_query", "out_query"), "i64:16") | dict.fromkeys(sizes, "constexpr")
        out.append((f"score of all heads, {name}", _score_many, signature, sizes,
                    dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES)))  # fmt: skip
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of scoring `length` tokens in bf16: SALS at 25 and 12.5 %, one query; 25 %, all heads."""
    out = []
    for name, share, queries in (("25%", 8, 1), ("12.5%", 16, 1), ("25%, all heads", 8, n_head)):
        r = n_kv_head * head_dim // share
        size = batch * (length * (2 * r + 4 * queries) + 2 * queries * r)
        out.append(dict(op=f"latent_score {name}", bytes=size, launches=1))
    return out
