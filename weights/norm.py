"""The model's norms: RMSNorm, and the two kinds that differ from it."""

from __future__ import annotations

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from runtime.parallel import Ranks


class CenteredNorm(nn.RMSNorm):
    """Its weight is stored as its distance from one (Gemma), which 16 bits round less."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class HeadsNorm(nn.Module):
    """One norm over all heads of all ranks (OLMo 2): x [..., H, D]."""

    def __init__(self, n_head: int, head_dim: int, eps: float, ranks: Ranks):
        super().__init__()
        self.weight = nn.RMSNorm(n_head * head_dim).weight
        self.eps, self.ranks = eps, ranks

    def forward(self, x: Tensor) -> Tensor:
        square = self.ranks.sum(x.float().square().mean((-2, -1), keepdim=True)) / self.ranks.size
        return (x.float() * (square + self.eps).rsqrt() * self.weight.view(x.shape[-2:])).to(x.dtype)
