"""The model's forward pass without a cache, written out: the reference for methods shares no code with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.statistic import Tokens


def forward(model: Any, tokens: Tensor, on_layer: Callable[[Tokens], None] | None = None) -> Tensor:
    """Teacher forcing by the weights of a Transformer with the default rope: tokens [B, S] -> logits [B, S, V].

    on_layer: called with what each layer's statistics measure, if B is 1.
    """
    a, S = model.args, tokens.shape[1]
    t = torch.arange(S, device=tokens.device)
    angle = t[:, None] * a.rope.theta ** (-torch.arange(0, a.head_dim, 2, device=t.device) / a.head_dim)
    turn = torch.polar(torch.ones_like(angle), angle)  # channels i and i + D / 2 rotate as a pair

    def rotate(x: Tensor) -> Tensor:
        z = torch.complex(*(half.contiguous() for half in x.float().chunk(2, -1))) * turn
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        return (y * (y.square().mean(-1, keepdim=True) + a.norm_eps).rsqrt()).to(x.dtype) * weight

    x, heads = model.tok_embeddings.weight[tokens], (a.n_head, a.n_kv_head, a.n_kv_head)
    for i, block in enumerate(model.layers):
        into = norm(x, block.attention_norm.weight)
        q, k, v = (into @ block.attention.wqkv.weight.T).unflatten(-1, (sum(heads), -1)).split(heads, -2)
        if on_layer is not None:
            on_layer(Tokens(i, into[0], q[0], k[0], v[0], angle.cos()[:, None], angle.sin()[:, None]))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [B, H, S, D]
        g = a.n_head // a.n_kv_head
        q, k, v = rotate(q), rotate(k).repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        seen = t <= t[:, None]
        if window := a.window(i):
            seen = seen & (t > t[:, None] - window)
        weights = (q @ k.mT * a.head_dim**-0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2) @ block.attention.wo.weight.T
        gate, up = (norm(x, block.ffn_norm.weight) @ block.feed_forward.w13.weight.T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ block.feed_forward.w2.weight.T
    return norm(x, model.norm.weight) @ model.output.weight.T
