"""Slots of tokens of all KV heads together: keys as coordinates in a basis that they share, values in a few bits."""

from __future__ import annotations

from torch import Tensor

from cache.base import CacheShape, Storage
from cache.packed import PackedVectors
from kernels.latent import LatentTokens


class LatentStore(Storage):
    """`ranks`: how many coordinates lie in each buffer, so that a pass over the first ones reads nothing else."""

    def __init__(self, shape: CacheShape, slots: int, ranks: tuple[int, ...], bits: int):
        super().__init__(shape)
        where = (shape.max_batch, slots)
        self.slots, self.rank = slots, sum(ranks)
        self.parts = [f"k{i}" for i in range(len(ranks))]
        for part, r in zip(self.parts, ranks, strict=True):
            self.buffer(part, (*where, r))
        self.values = PackedVectors(shape, where, shape.n_kv_head * shape.head_dim, bits)
        self.token_bytes = self.rank * shape.dtype.itemsize + self.values.vector_bytes  # of all KV heads

    @property
    def lead(self) -> Tensor:
        """The first coordinates of all slots, [B, slots, ranks[0]]."""
        return self.get_buffer(self.parts[0])

    @property
    def tokens(self) -> LatentTokens:
        """As the kernels take them."""
        return LatentTokens(tuple(self.get_buffer(x) for x in self.parts), self.values.parts(), self.values.bits)
