"""Rings: a token's slot is its place modulo the number of slots, so that a new token replaces the oldest."""

from __future__ import annotations

import torch
from torch import Tensor


def ring_positions(newest: Tensor, size: int) -> Tensor:
    """The place of the token that each slot of a ring holds; newest [B] was written last -> [B, size].

    Places count from 0, in the text or after a prompt; negative: no token yet.
    """
    newest = newest[:, None]
    return newest - (newest - torch.arange(size, device=newest.device)) % size
