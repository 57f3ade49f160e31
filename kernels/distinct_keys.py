"""How distinctive each key of a cache is among the keys that are held (KeyDiff)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.op import operation, whole_vectors


@operation(
    cpp=whole_vectors, fake=lambda k, filled: k.new_empty(len(filled), *k.shape[1:3], dtype=torch.float32)
)  # fmt: skip
def distinct_keys(k: Tensor, filled: Tensor) -> Tensor:
    """Minus the cosine of each key with the anchor, the mean of the keys' directions: fp32 [B, H, N].

    k [>= B, H, N, D], of which the first filled [B] slots of a row count; the others get 0.
    """
    there = torch.arange(k.shape[2], device=k.device) < filled[:, None]
    directions = F.normalize(k[: len(filled)].float().masked_fill(~there[:, None, :, None], 0), dim=-1)
    return -(directions @ F.normalize(directions.sum(2), dim=-1)[..., None])[..., 0]
