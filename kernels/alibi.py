"""How far a head of an ALiBi model can look (RazorAttention, Section 3.1). No model of this engine uses ALiBi."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import InputError


def alibi_scope(
    wq: Tensor,
    wk: Tensor,
    gamma: Tensor,
    bias: Tensor | None,
    slope: Tensor,
    epsilon: float,
    head_dim: int,
    scale: float = 1.0,
    bound: Literal["paper", "sound"] = "paper",
) -> Tensor:
    """L_h of every head of an ALiBi layer: tokens further back get less than `epsilon` attention (Sec. 3.1, Theorem 1).

    wq [Hq * head_dim, d], wk [Hkv * head_dim, d] as Linear holds them; gamma and bias [d] of the norm before attention
    (None: RMSNorm); slope [Hq] -> fp32 [Hq]. Eq. 1 has no `scale`: give head_dim ** -0.5 where the model divides.
    The projections have no biases.

    bound="paper" is Eq. 2, which is no bound. Eq. 7 takes |gamma * x|^2 <= |gamma|^2 for a normalized x, as if no
    channel of it exceeded 1; but all of |x|^2 = d may lie in the channel of the largest gamma. The appendix also drops
    the query's own logit from the denominator, though it can be as negative as the other one is positive. bound="sound"
    takes d * max(gamma)^2 for |gamma|^2 and the logit twice, and so is longer, for most heads beyond any context.
    """
    if not 0 < epsilon < 1 or slope.min() <= 0:
        raise InputError(f"alibi_scope needs 0 < epsilon < 1 and positive slopes, got {epsilon} and {slope.tolist()}")
    # |W_Q^T W_K|_2 [d, d] is that of R_Q R_K^T [head_dim, head_dim], from the QR of both: orthogonal factors drop out
    rq, rk = (torch.linalg.qr(w.float().unflatten(0, (-1, head_dim)).mT).R for w in (wq, wk))
    rk = rk.repeat_interleave(len(rq) // len(rk), 0)
    norm = scale * torch.linalg.matrix_norm(rq @ rk.mT, 2)  # [Hq]
    offset = bias.float().square().sum() if bias is not None else 0.0
    if bound == "paper":
        logit = 2 * norm * (gamma.float().square().sum() + offset)
    else:
        logit = 2 * 2 * norm * (len(gamma) * gamma.float().abs().max() ** 2 + offset)
    return (logit - math.log(epsilon)) / slope.float()
