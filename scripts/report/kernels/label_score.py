from __future__ import annotations

from typing import Any

from kernels.backend import triton
from kernels.label_score import SCORED, STORED, WARPS, _label_score, _store_labels
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """Scores from a quarter of the channels; labels of a prompt and of one token."""
    R, score = head_dim // 4, ("label_row", "label_head", "pair_row", "pair_head", "out_row", "out_head")
    types = dict(q="*fp32", labels="*i32", pairs="*i32", pos="*i64", out="*fp32", H="i32", T="i32:16")
    types |= dict.fromkeys(score, "i64:16")
    out: list[Aot] = []
    for bits in (4, 2):
        W = R * bits // 32
        sizes = dict(R=R, BITS=bits, W=W, BLOCK_W=triton.next_power_of_2(W), BLOCK_T=SCORED)
        signature = types | dict.fromkeys(sizes, "constexpr")
        out.append((f"label score, {bits} bits", _label_score, signature, sizes, dict(num_warps=WARPS, num_stages=1)))
    types = dict(k="*bf16", channels="*i64", start="*i64", labels="*u8", pairs="*fp16", H="i32", S="i32")
    types |= dict.fromkeys(("k_row", "k_head", "k_slot", "label_row", "label_head", "pair_row", "pair_head"), "i64:16")
    for name, block in (("prompt", STORED), ("token", 1)):
        sizes = dict(R=R, BITS=4, BLOCK_W=triton.next_power_of_2(R // 2), BLOCK_S=block)
        signature = types | dict.fromkeys(sizes, "constexpr")
        out.append((f"labels of a {name}", _store_labels, signature, sizes, dict(num_warps=1, num_stages=1)))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Bytes and launches of scoring `length` tokens by a quarter of the channels, of storing a token and a prompt."""
    rows, r, out = batch * n_kv_head, head_dim // 4, []
    for bits in (4, 2):
        label = r * bits // 8 + 4  # of a token, with scale and zero
        out.append(dict(op=f"label_score, {bits} bits", bytes=rows * (length * (label + 4) + 4 * r), launches=1))
    label = r // 2 + 4
    # of a key that has left the L2 whole lines are read, and channels are spread over all of them
    out.append(dict(op="store_labels, token", bytes=rows * (2 * head_dim + label) + 8 * n_kv_head * r, launches=1))
    size = rows * length * (2 * head_dim + label) + 8 * n_kv_head * r
    return [*out, dict(op="store_labels, prompt", bytes=size, launches=1)]
