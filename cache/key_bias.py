"""Warns of models whose key bias costs low-bit codes much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cache.base import KVMethod
from cache.spec import method_name
from runtime.errors import warn_once

# A key bias warned of, in lengths of a key without it (ours). Codes that share one scale for all channels of a head
# lose in proportion to the key's length, bias included. Random model of 4 layers, 100 + 60 tokens, bias in 4 slow
# channels of the first and last layer: mean KL to full at 0, 1.6, 3.2, 6.4 and 16 lengths:
# hadamard-4 .0019, .0024, .0032, .0091, .050;  turboquant .0024, .0031, .0047, .0098, .051;
# fp8 .00010, .00020, .00039, .0011, .0092;  kivi, whose scales are of channels: .0019, .0019, .0020, .0021, .0021
KEY_BIAS = 4.0


@torch.no_grad()
def key_bias(block: Any) -> float:
    """The length of a layer's key bias over that of keys without it, of the KV head in which it is largest. The keys
    are of random inputs."""
    a = block.attention
    if a.wqkv.bias is None or hasattr(a.k_norm, "weight"):
        return 0.0
    norm = block.attention_norm
    x = torch.randn(8, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    keys = a.qkv(norm(x.to(norm.weight)))[1].float()  # [8, Hkv, D]
    heads = slice(a.n_head * a.head_dim, (a.n_head + a.n_kv_head) * a.head_dim)
    bias = a.wqkv.bias[heads].float().view(-1, a.head_dim)
    return float((bias.norm(dim=-1) / (keys - bias).square().sum(-1).mean(0).sqrt()).max())


def warn_of_key_bias(blocks: Iterable[Any], cache: Iterable[Any]) -> None:
    """Name the layers whose key bias costs their method's codes more than KEY_BIAS allows."""
    found: dict[str, dict[int, float]] = {}
    for i, (block, layer) in enumerate(zip(blocks, cache, strict=True)):
        for part in layer.modules():
            if not isinstance(part, KVMethod) or not part.shares_key_scale or part.shape.device.type == "meta":
                continue
            if (ratio := key_bias(block)) > KEY_BIAS:
                found.setdefault(method_name(type(part)), {})[i] = ratio
    for method, layers in found.items():
        warn_once(f"{method} rounds keys with one scale for all channels, and the key bias of layers "
                  f"{', '.join(map(str, layers))} is up to {max(layers.values()):.0f} times as long as a key without "
                  "it: more is lost than of other models. Use kivi, self_index, sals or palu")  # fmt: skip
