from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.sign_codes import LUT_BLOCK, _lut_score
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    W = head_dim // 8
    sizes = dict(GROUP=n_head // n_kv_head, W=W, BLOCK_W=triton.next_power_of_2(W), BLOCK_T=LUT_BLOCK, BLOCK_S=64)
    types = dict(q="*bf16", book="*fp32", codes="*u8", pos="*i64", skip="*i64", out="*fp32", H="i32", n_skip="i32:16")
    types |= dict.fromkeys(("T", "part"), "i32:16")
    types |= dict.fromkeys(("code_row", "code_head", "out_row", "out_head"), "i64:16")
    signature = types | dict.fromkeys(sizes, "constexpr")
    return [("look-up score", _lut_score, signature, sizes, dict(num_warps=4, num_stages=1))]


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of scoring `length` tokens, one layer and step; the codebook is read once per head."""
    heads = batch * n_kv_head
    each = length * (head_dim // 8 + 4) + 16 * head_dim * 4 + 64 * 8
    return [dict(op="lut_score", bytes=heads * each + batch * n_head * head_dim * 2, launches=1)]
