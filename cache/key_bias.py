"""Gives quantizing methods the key bias of their layer, where they are to store keys without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cache.quantized import KEY_BIAS, Quantized
from cache.spec import method_name
from runtime.errors import InputError, warn_once


def key_bias(attention: Any) -> Tensor | None:
    """A layer's key bias [Hkv, D]; None: it has none, or a norm follows it."""
    a = attention
    if a.wqkv.bias is None or hasattr(a.k_norm, "weight"):
        return None
    heads = slice(a.n_head * a.head_dim, (a.n_head + a.n_kv_head) * a.head_dim)
    return a.wqkv.bias[heads].detach().view(-1, a.head_dim)


@torch.no_grad()
def relative_length(block: Any, bias: Tensor) -> float:
    """The length of a layer's key bias over that of keys without it, of the KV head in which it is largest. The keys
    are of random inputs."""
    norm = block.attention_norm
    x = torch.randn(8, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    keys = block.attention.qkv(norm(x.to(norm.weight)))[1].float() - bias.float()  # [8, Hkv, D]
    return float((bias.float().norm(dim=-1) / keys.square().sum(-1).mean(0).sqrt()).max())


def center_keys(blocks: Iterable[Any], cache: Iterable[Any]) -> None:
    """Set `key_bias` of the methods that ask for it (`center`). Names the layers whose bias costs codes more than
    KEY_BIAS allows where a method is told not to. Raises InputError if it is told to and no layer has a bias."""
    asked, found, lost = dict[str, bool](), False, dict[str, dict[int, float]]()
    for i, (block, layer) in enumerate(zip(blocks, cache, strict=True)):
        for part in layer.modules():  # a method may contain others
            if not isinstance(part, Quantized) or part.shape.device.type == "meta":
                continue
            bias, center, name = key_bias(block.attention), part.args.center, method_name(type(part))
            asked[name] = asked.get(name, False) or bool(center)
            if bias is None:
                continue
            found = True
            ratio = relative_length(block, bias) if part.keys.bits < 16 and not center else 0.0
            if center or (center is None and ratio > KEY_BIAS):
                part.key_bias = bias if part.heads is None else bias[part.heads]
            elif ratio > KEY_BIAS:
                lost.setdefault(name, {})[i] = ratio
    if not found and (names := [name for name, center in asked.items() if center]):
        raise InputError(f"{names[0]}: center=True subtracts the bias of keys before rotation, and this model's keys "
                         "have none that can be subtracted: leave it out")  # fmt: skip
    for name, layers in lost.items():
        warn_once(f"{name} with center=False rounds keys and their bias together, which in layers "
                  f"{', '.join(map(str, layers))} is up to {max(layers.values()):.0f} times as long as a key without "
                  "it: much is lost. Leave it out")  # fmt: skip
