from __future__ import annotations

from typing import Any

from kernels.oja import NUM_WARPS, _sequential, blocks
from scripts.report.kernels import Aot
from scripts.report.kernels.lowrank import RANKS


def aot(n_head: int, n_kv_head: int, head_dim: int) -> list[Aot]:
    r = round(RANKS[0] * head_dim)
    sizes: dict[str, Any] = dict(D=head_dim, R=r) | blocks(head_dim, r)
    types = dict.fromkeys(_sequential.arg_names, "i32") | dict.fromkeys(("x", "basis", "out"), "*fp32")
    return [
        (
            f"oja r = {r}",
            _sequential,
            types | dict.fromkeys(sizes, "constexpr"),
            sizes,
            dict(num_warps=NUM_WARPS, num_stages=1),
        )
    ]
