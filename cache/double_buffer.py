"""Two buffers of fetched tokens that all layers of a cache share by turns (Double Sparsity-Offload, Section 5.1)."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor

from cache.base import CacheShape
from kernels.rope import Rope


class Half(nn.Module):
    """One half of the double buffer: a layer's fetched tokens, idx [B, Hkv, K] (-1: none), k and v [B, Hkv, K, D]."""

    k: Tensor
    v: Tensor
    idx: Tensor

    def __init__(self, shape: CacheShape, n: int):
        super().__init__()
        size = (shape.max_batch, shape.n_kv_head, n, shape.head_dim)
        for name in ("k", "v"):
            self.register_buffer(name, shape.zeros(size), persistent=False)
        idx = torch.full(size[:3], -1, dtype=torch.int64, device=shape.device)
        self.register_buffer("idx", idx, persistent=False)


# The halves of every cache, found by the rotary table that its layers share, then by parity of layer and by size.
_HALVES: WeakKeyDictionary[Rope, dict[Any, Half]] = WeakKeyDictionary()


def half_of(rope: Rope, shape: CacheShape, layer: int, n: int) -> tuple[Half, bool]:
    """The half for n tokens that this layer uses, and whether it is new: it counts as memory of the layer that came
    first. A layer is fetched while the one before attends, so even layers use one half and odd layers the other."""
    halves, key = _HALVES.setdefault(rope, {}), (layer % 2, n, shape)
    new = key not in halves
    return halves.setdefault(key, Half(shape, n) if new else halves[key]), new
