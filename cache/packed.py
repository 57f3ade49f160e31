"""Slots for vectors in 2 to 16 bits with a scale and a zero per group of channels, for the quantizing methods.

kernels/quantize.py defines the packing; attention kernels read the parts as stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache.base import CacheShape, Storage
from kernels.quantize import GROUP, groups_of, quantize
from runtime.errors import InputError


class PackedVectors(Storage):
    """uint8 data [*slots, width * bits / 8] and fp16 params [*slots, groups, 2]; at 16 bits only the vectors."""

    data: Tensor  # at 16 bits [*slots, width] in the dtype of keys and values
    params: Tensor | None
    layout = Storage.first_slots

    def __init__(
        self, shape: CacheShape, slots: tuple[int, ...], width: int, bits: int, group: int = GROUP, clip: float = 1.0
    ):
        super().__init__(shape)
        self.bits, self.group, self.clip = bits, group, clip
        if bits == 16:
            self.buffer("data", (*slots, width))
            self.params, self.vector_bytes = None, width * shape.dtype.itemsize
        else:
            self.buffer("data", (*slots, width * bits // 8), torch.uint8)
            self.buffer("params", (*slots, groups_of(width, group), 2), torch.float16)
            self.vector_bytes = width * bits // 8 + groups_of(width, group) * 2 * 2

    def put(
        self, slots: Any, x: Tensor, mean: Tensor | None = None, alpha: Tensor | None = None, magnitude: bool = False
    ) -> None:
        """Store vectors x [..., width] at an index of the slots; mean, alpha and magnitude are those of `quantize`.

        At 16 bits only the mean is subtracted: alpha and magnitude do not apply.
        """
        if self.params is not None:
            self.data[slots], self.params[slots] = quantize(x, self.bits, mean, alpha, magnitude, self.group, self.clip)
        else:
            self.data[slots] = x if mean is None else (x.float() - mean[:, :, None]).to(x.dtype)

    def parts(self) -> tuple[Tensor, ...]:
        """data and params; at 16 bits only data."""
        return tuple(self._buffers.values())  # type: ignore[arg-type]


def check_groups(what: str, head_dim: int, instead: str = "") -> None:
    """Raises InputError if the codes of a head's channels do not fill whole bytes; instead: what to do then."""
    if head_dim % 8:
        raise InputError(f"{what} needs a head_dim divisible by 8, this model has {head_dim}{instead}")
