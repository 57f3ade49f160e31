from __future__ import annotations

from typing import Any

from kernels.channel_score import WARPS, _channel_score, block_of
from scripts.report.kernels import Aot


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """A quarter of the channels."""
    G = n_head // n_kv_head
    sizes = dict(G=G, R=head_dim // 4, **block_of(G))
    types = dict.fromkeys(("key_row", "key_head", "key_channel", "out_row", "out_head", "out_query"), "i64:16")
    types |= dict(channels="*i64", pos="*i64", out="*fp32", H="i32", T="i32:16") | dict.fromkeys(sizes, "constexpr")
    out: list[Aot] = []
    for dtype in ("bf16", "fp32"):
        signature = types | dict.fromkeys(("q", "keys"), f"*{dtype}")
        signature = {a: signature[a] for a in _channel_score.arg_names}
        out.append((f"channel score {dtype}", _channel_score, signature, sizes, dict(num_warps=WARPS, num_stages=3)))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """A quarter of the channels of every key read, a score of every query head written."""
    size = batch * length * (2 * n_kv_head * head_dim // 4 + 4 * n_head) + 2 * batch * n_head * head_dim // 4
    return [dict(op="channel_score, 1/4 of the channels", bytes=size, launches=1)]
