"""Two buffers of fetched tokens that all layers of a cache share by turns (Double Sparsity-Offload, Section 5.1)."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cache.base import CacheShape, Storage
from kernels.rope import Rope


class Half(Storage):
    """One half of the double buffer: the tokens that a layer asked for, idx [B, Hkv, K] (-1: none), and what came, k
    and v [B, Hkv, K, D]. They are written beside the compute stream: read them after `await_rows`."""

    k: Tensor
    v: Tensor
    idx: Tensor

    def __init__(self, shape: CacheShape, n: int):
        super().__init__(shape)
        size = (shape.max_batch, shape.n_kv_head, n, shape.head_dim)
        self.buffer("k", size), self.buffer("v", size)
        self.buffer("idx", size[:3], torch.int64).fill_(-1)


# The halves of every cache, found by the rotary table that its layers share, then by parity of layer and by size.
_HALVES: WeakKeyDictionary[Rope, dict[Any, Half]] = WeakKeyDictionary()


def half_of(rope: Rope, shape: CacheShape, layer: int, n: int) -> tuple[Half, bool]:
    """The half for n tokens that this layer uses, and whether it is new: it counts as memory of the layer that came
    first. A layer is fetched while the one before attends, so even layers use one half and odd layers the other."""
    halves, key = _HALVES.setdefault(rope, {}), (layer % 2, n, shape)
    new = key not in halves
    return halves.setdefault(key, Half(shape, n) if new else halves[key]), new
