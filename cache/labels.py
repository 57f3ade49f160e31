"""The label cache of Double Sparsity: a few channels of every key, contiguous and quantized, which score all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache.base import CacheShape, Storage, rows
from kernels.label_score import label_queries, label_score, store_labels
from runtime.errors import InputError


class LabelCache(Storage):
    """r channels of every key (Section 4.2): labels [B, Hkv, T, r * bits / 8], params [B, Hkv, T, 2] in fp16."""

    channels: Tensor
    labels: Tensor
    params: Tensor | None
    layout = Storage.first_slots

    def __init__(self, args: Any, shape: CacheShape, layer: int, calib: Any):
        super().__init__(shape)
        B, H, T, D = shape.kv
        self.bits = args.label_bits
        self.r = label_channels(args.channels, self.bits, D)
        ranked = calib.get(layer, f"channels.{args.ranking}")[:, : self.r] if calib is not None else None
        self.constant("channels", (H, self.r), ranked, torch.int64)
        if self.bits == 16:
            self.buffer("labels", (B, H, T, self.r))
            self.params = None
            self.token_bytes = self.r * shape.dtype.itemsize
        else:
            self.buffer("labels", (B, H, T, self.r * self.bits // 8), torch.uint8)
            self.buffer("params", (B, H, T, 2), torch.float16)
            self.token_bytes = self.r * self.bits // 8 + 2 * 2  # bytes of one token and KV head
        self.constant_bytes = 8 * H * self.r

    def put_prompt(self, k: Tensor) -> None:
        """Store prompts: k [B, Hkv, S, D] rotated."""
        store_labels(k, self.channels, None, self.labels, self.params, self.bits)

    def put(self, k: Tensor, pos: Tensor) -> None:
        """Store one token per row at pos [B]: k [B, Hkv, D] rotated."""
        store_labels(k[:, :, None], self.channels, pos, self.labels, self.params, self.bits)

    def scores(self, q: Tensor, pos: Tensor, heads: str = "group") -> Tensor:
        """q [B, Hq, D] rotated -> fp32 [B, Hkv, T], scores of the tokens up to pos [B]; later ones score anything.

        heads="group": the sum over a group's q of q . k, which is (sum of q) . k. heads="query": for every query head,
        [B, Hq, T].
        """
        B, H = len(q), len(self.channels)
        labels, params = rows(self.labels, B), None if self.params is None else rows(self.params, B)
        if heads == "group":
            return label_score(label_queries(q, self.channels), labels, params, self.bits, pos)
        groups, at = q.view(B, H, -1, q.shape[2]).float(), self.channels.expand(B, -1, -1)
        each = [label_score(q.gather(2, at), labels, params, self.bits, pos) for q in groups.unbind(2)]
        return torch.stack(each, 2).flatten(1, 2)

    def scores_by_head(self, q: Tensor, last: Tensor) -> Tensor:
        """The group's sum, for each head's tokens up to its own last [B, Hkv], -1: none -> fp32 [B * Hkv, 1, T]."""
        groups = label_queries(q, self.channels).view(-1, 1, self.r)
        labels = rows(self.labels, len(q)).view(-1, 1, *self.labels.shape[2:])
        params = None if self.params is None else rows(self.params, len(q)).view(-1, 1, *self.params.shape[2:])
        return label_score(groups, labels, params, self.bits, last.view(-1))


def label_channels(channels: int | float, bits: int, head_dim: int) -> int:
    """r: a number of channels as given; a share of head_dim is rounded up to whole bytes."""
    per = max(1, 8 // bits)
    r = max(1, -(-round(channels * head_dim) // per)) * per if isinstance(channels, float) else channels
    if r > head_dim:
        raise InputError(f"double sparsity: {r} label channels do not fit in a head_dim of {head_dim}: lower channels")
    if r % per:
        raise InputError(
            f"double sparsity: {r} label channels of {bits} bits do not fill whole bytes: use a multiple of {per}"
        )
    return r
