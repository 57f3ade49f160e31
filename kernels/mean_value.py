"""The mean value of SparQ Attention, to which goes the attention that the chosen tokens do not have."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import nbytes, operation


@operation(cpp=True, mutates=("mean",), reads=lambda x, mean, pos: dict(mean=nbytes(mean[: len(x)])))
def join_mean(x: Tensor, mean: Tensor, pos: Tensor) -> None:
    """In place, one token a row: x [B, H, D] at pos [B] joins the mean of the pos tokens before it, fp32 [>= B, H, D],
    which may be anything if there are none."""
    old = torch.where(pos[:, None, None] > 0, mean[: len(pos)], 0)
    mean[: len(pos)] = old + (x.float() - old) / (pos + 1)[:, None, None]


@operation(cpp=lambda logits, *_: logits.dtype == torch.float32, mutates=("share",))
def attended_share(logits: Tensor, idx: Tensor, count: Tensor, pos: Tensor, share: Tensor) -> None:
    """Alpha, the share of a query's softmax over slots up to pos [B] that the first count [B, H] of the slots idx
    [B, H, K] have: logits fp32 [B, H, G, T], of which later slots may be anything -> share fp32 [>= B, H * G]."""
    filled = torch.arange(logits.shape[3], device=pos.device) <= pos[:, None]
    total = torch.where(filled[:, None, None], logits, float("-inf")).logsumexp(-1)
    chosen = torch.arange(idx.shape[2], device=pos.device) < count[..., None]
    taken = logits.gather(3, idx[:, :, None].expand(-1, -1, logits.shape[2], -1))
    taken = torch.where(chosen[:, :, None], taken, float("-inf")).logsumexp(-1)
    share[: len(pos)] = (taken - total).exp().clamp(max=1).flatten(1)


@operation(cpp=True)
def with_mean(y: Tensor, share: Tensor, mean: Tensor) -> Tensor:
    """share [>= B, Hq] of the attention's output y [B, Hq, D], and of the mean value [>= B, H, D] what is left."""
    share, mean = share[: len(y), :, None], mean[: len(y)].repeat_interleave(y.shape[1] // mean.shape[1], 1)
    return (share * y + (1 - share) * mean).to(y.dtype)
