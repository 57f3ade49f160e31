"""Attention over keys and values that groups of KV heads share as coordinates (Palu).

A token of a group of s KV heads is r coordinates of its keys, before rotation, and r of its values. The rotation keeps
the query from being folded into the keys' basis, so that keys are rebuilt and rotated; values are summed up as
coordinates and expanded once, behind the softmax. Rebuilding costs 2 r D operations a token and KV head, r of the whole
group, which is what bounds it wherever multiplying is not free: on a CPU it is many times what dense attention costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import dequantize
from kernels.rope import apply_rope


def group_attention(
    q: Tensor,
    k: tuple[Tensor, ...],
    v: tuple[Tensor, ...],
    bits: int,
    k_basis: Tensor,
    v_basis: Tensor,
    k_bias: Tensor,
    v_bias: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Softmax attention over slots 0..pos [B], slot = position -> [B, Hq, D]. Scale 1/sqrt(D), computed in fp32.

    q [B, Hq, D] rotated; k and v the coordinates of N groups, as stored in `bits`: [>= B, N, T, r] and, below 16 bits,
    packed with fp16 params [>= B, N, T, 1, 2]; bases [N, s * D, r], biases [N, s * D]; cos and sin [1 or >= B, T, D/2].
    """
    params = (None, None) if bits == 16 else (k[1], v[1])
    return torch.ops.kv_fast.group_attention(
        q, k[0], params[0], v[0], params[1], k_basis, v_basis, k_bias, v_bias, pos, cos, sin, bits
    )


def coordinates(data: Tensor, params: Tensor | None, bits: int) -> Tensor:
    """As stored -> fp32 [..., r]."""
    return data.float() if params is None else dequantize(data, params, bits)


def rebuild(x: Tensor, basis: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """Coordinates [B, N, n, r] -> tokens of all KV heads, fp32 [B, N * s, n, D]."""
    out = x @ basis.float().mT + bias.float()[:, None]
    return out.unflatten(3, (-1, head_dim)).transpose(2, 3).flatten(1, 2)


def _group_attention(
    q: Tensor, k: Tensor, k_params: Tensor | None, v: Tensor, v_params: Tensor | None, k_basis: Tensor, v_basis: Tensor,
    k_bias: Tensor, v_bias: Tensor, pos: Tensor, cos: Tensor, sin: Tensor, bits: int,
) -> Tensor:  # fmt: skip
    (B, Hq, D), (N, width, _), T = q.shape, k_basis.shape, k.shape[2]
    n = int(pos.max()) + 1 if pos.device.type == "cpu" else T  # on a GPU no length may reach the host
    there = torch.arange(n, device=pos.device) <= pos[:, None]
    k, v = k[:B, :, :n], v[:B, :, :n]
    k_params, v_params = (None if x is None else x[:B, :, :n] for x in (k_params, v_params))
    rows = cos if len(cos) == 1 else cos[:B], sin if len(sin) == 1 else sin[:B]
    keys = rebuild(coordinates(k, k_params, bits), k_basis, k_bias, D)
    keys = apply_rope(keys, *(x[:, None, :n] for x in rows))
    logits = q.float().view(B, keys.shape[1], -1, D) @ keys.mT * D**-0.5
    p = logits.masked_fill(~there[:, None, None], float("-inf")).softmax(-1).view(B, N, -1, n)
    # 0 * NaN is NaN
    held = coordinates(v, v_params, bits).masked_fill(~there[:, None, :, None], 0)
    y = (p @ held).unflatten(2, (width // D, -1))  # [B, N, s, g, r]
    y = y @ v_basis.float().view(N, -1, D, v_basis.shape[2]).mT + v_bias.float().view(N, -1, 1, D)  # weights sum to 1
    return y.to(q.dtype).view(B, Hq, D)


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define(
    "group_attention(Tensor q, Tensor k, Tensor? k_params, Tensor v, Tensor? v_params, Tensor k_basis, Tensor v_basis, "
    "Tensor k_bias, Tensor v_bias, Tensor pos, Tensor cos, Tensor sin, int bits) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _lib.impl("group_attention", _group_attention, _device)
torch.library.register_fake("kv_fast::group_attention", lambda q, *rest: q.new_empty(q.shape), lib=_lib)
