from __future__ import annotations

from typing import Any

import torch

from kernels.backend import triton
from kernels.latent_attention import MAX_BLOCK, _config, _latent_attention, block_size
from kernels.quantize import GROUP
from kernels.splits import split_count
from scripts.report.kernels import Aot

PRESETS = (("sals-25", 4, 4), ("sals-12.5", 8, 2))  # name, n*D / r, bits of values
RECENT, BUDGET = 64, 8  # tokens of the ring; of 8 tokens one is attended to


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    """The presets, chosen tokens and all; smaller tiles as small batches take them; whole values; fp32."""
    width, names = n_kv_head * head_dim, _latent_attention.arg_names
    out: list[Aot] = []
    for name, share, bits, dtype, block, listed in (
        *((name, share, bits, "bf16", MAX_BLOCK, True) for name, share, bits in PRESETS),
        ("sals-25 dense", 4, 4, "bf16", MAX_BLOCK, False), ("sals-25", 4, 4, "bf16", 64, True),
        ("sals-25", 4, 4, "bf16", 32, True), ("8 bits", 4, 8, "bf16", MAX_BLOCK, True),
        ("16 bits", 4, 16, "bf16", 64, True), ("sals-25 fp32", 4, 4, "fp32", 64, True),
    ):  # fmt: skip
        constants, options = _config(
            n_head // n_kv_head, head_dim, width // share // 2, block, 4 if dtype == "fp32" else 2, bits
        )
        constexprs: dict[str, Any] = constants | dict(H=n_kv_head, RING_RANK=width // 2, LEAD=width // share // 2)
        constexprs |= dict(REST=width // share // 2, RING_BITS=max(8, bits), BITS=bits)
        types = dict.fromkeys(names, "i32") | dict.fromkeys(("q", "basis", "ring_k", "lead", "rest"), f"*{dtype}")
        types |= dict.fromkeys(("pos", "idx", "count"), "*i64") | dict.fromkeys(("cos", "sin", "part", "lse"), "*fp32")
        types |= dict.fromkeys(("ring_rank", "lead_rank", "rest_rank"), "i32:16")
        types |= dict(ring_pairs="*i32", pairs="*i32", v=f"*{dtype}" if bits == 16 else f"*i{8 * bits}")
        types |= dict(
            ring_v=f"*{dtype}" if bits == 16 else "*i64",
            idx_row="i64:16",
            q_row="i64:16",
            q_head="i64:16",
            table_row="i64:16",
        )
        absent = (() if listed else ("idx", "count")) + (("ring_pairs", "pairs") if bits == 16 else ())
        constexprs |= dict.fromkeys(absent)
        types |= dict.fromkeys(constexprs, "constexpr")
        out.append((f"{name}, tiles of {block}", _latent_attention, types, constexprs, options))
    return out


def account(n_head: int, n_kv_head: int, head_dim: int, batch: int, length: int) -> list[dict[str, Any]]:
    """Of one call in bf16, for an eighth of the tokens and for all; in `bytes`, latents are read once a row.

    `l2_bytes` is what programs read in all: latents and angles once a head, the basis once a tile of tokens.
    """
    width, device = n_kv_head * head_dim, torch.device("cpu")
    out: list[dict[str, Any]] = []
    for name, share, bits in PRESETS:
        for what, attended in (("an eighth", length // BUDGET), ("all", length)):
            rank, ring_rank, recent = width // share, width // 2, min(RECENT, attended)
            chosen, r_bytes = attended - recent, width * 2 // GROUP * 2
            block = block_size(batch * n_kv_head, chosen, head_dim, 2, bits, device)
            splits = split_count(batch * n_kv_head, chosen + recent * (ring_rank // rank), block, device)
            partial = 0 if splits == 1 else batch * n_head * splits * (head_dim + 1) * 4
            tokens = chosen * (rank * 2 + width * bits // 8 + r_bytes) + recent * (ring_rank * 2 + width + r_bytes)
            listed = chosen * 8 if attended < length else 0
            angles, coordinates = attended * head_dim * 4, chosen * rank + recent * ring_rank
            small = ring_rank * width * 2 + batch * n_head * head_dim * 4 + 2 * partial
            tiles = triton.cdiv(chosen, block) * rank + triton.cdiv(recent, block) * ring_rank
            l2 = batch * (n_kv_head * (coordinates * 2 + angles + listed + tiles * head_dim * 2) + tokens)
            flops = 2 * batch * (coordinates * width + 2 * attended * n_head * head_dim)
            out.append(dict(op=f"latent attention {name}, {what}", bytes=batch * (tokens + listed) + angles + small,
                            flops=flops, launches=1 + (splits > 1), l2_bytes=l2))  # fmt: skip
    return out
