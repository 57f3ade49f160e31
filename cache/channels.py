"""Reads Double Sparsity's published channel files (JSON) as tensors of our calibration.

Such a file (github.com/andy-yang-1/DoubleSparse, config/) ranks channels: "model.layers.0.self_attn.qk_proj" and
"q_proj" hold a list for every query head, "k_proj" one for every KV head. They differ from what we measure: q and k are
taken before rotation, and the means of |q k| mix heads, because [1, H, S, D] became [S, H, D] without a transpose.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.statistic import Sizes, is_ranking
from runtime.errors import InputError, short

KINDS = ("qk", "q", "k")


def read_channels(path: str | Path, args: Sizes) -> dict[str, Tensor]:
    """`layers.{i}.channels.{kind}` int64 [Hkv, D] for every layer. Raises InputError if it does not fit the model.

    A group of query heads gets one ranking: channels by their mean rank in the lists of its heads (ours).
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} not found: give --import-channels a JSON file of channel lists") from None
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"cannot read {path} as JSON: {short(str(e))}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object of channel lists")
    out: dict[str, Tensor] = {}
    for i in range(args.n_layer):
        for kind in KINDS:
            name = f"model.layers.{i}.self_attn.{kind}_proj"
            if name not in data:
                raise InputError(f"{path} has no {name}: it is of another model, or holds no channel lists")
            heads = args.n_kv_head if kind == "k" else args.n_head
            lists = _lists(data[name], heads, args.head_dim, f"{path}: {name}")
            place = lists.argsort(-1).view(args.n_kv_head, -1, args.head_dim).double().mean(1)
            out[f"layers.{i}.channels.{kind}"] = place.sort(dim=-1, stable=True).indices
    if f"model.layers.{args.n_layer}.self_attn.k_proj" in data:
        raise InputError(f"{path} has more than the {args.n_layer} layers of this model: it belongs to another")
    return out


def _lists(value: Any, heads: int, channels: int, name: str) -> Tensor:
    wrong = InputError(f"{name} must rank {channels} channels for each of {heads} heads, found {short(value)}")
    if not isinstance(value, list) or len(value) != heads:
        raise wrong
    if not all(isinstance(x, list) and len(x) == channels and all(type(c) is int for c in x) for x in value):
        raise wrong
    try:
        out = torch.tensor(value)
    except (OverflowError, RuntimeError, ValueError):
        raise wrong from None
    if not is_ranking(out):
        raise wrong
    return out


def shared(tensors: dict[str, Tensor], kind: str) -> float | None:
    """The mean share of the best quarter of channels that two heads of a layer have in common; None with one head."""
    shares = []
    for name, t in tensors.items():
        if name.endswith(f".channels.{kind}"):
            best = [set(x[: max(1, len(x) // 4)].tolist()) for x in t]
            shares += [len(a & b) / len(a) for a, b in combinations(best, 2)]
    return sum(shares) / len(shares) if shares else None
