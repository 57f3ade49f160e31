"""Double Sparsity: a few calibrated channels of every key, the labels, choose the tokens that are attended exactly.

Full K and V stay, in the model's dtype. Beside them lies the label cache: the r channels of a KV head with the largest
mean |q_c k_c|, of every key, contiguous and in 4 bits (20 bytes a token and KV head at r = 32, on top of 512 at D = 128
in 16 bits). A step scores all labels, and reads K and V of the best 1/16 of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor

from cache.base import CacheShape, knob
from cache.selecting import Selecting
from cache.statistic import Statistic
from errors import InputError
from kernels.label_score import label_score, store_labels

PRESETS = {
    "double_sparsity-12.5": dict(budget=0.125),  # Table 2, 1/8
    "double_sparsity-3.1": dict(budget=0.03125),  # Table 2, 1/32
    "double_sparsity-q": dict(ranking="q"),  # Table 3, q outlier
    "double_sparsity-k": dict(ranking="k"),  # Table 3, k outlier
}


class Channels(Statistic):
    """The channels of a KV head by falling mean |q_c k_c| over tokens and the group, |q_c| and |k_c| (Sec. 4.1)."""

    name = "channels"

    def measure(self, t):
        qk, q = (x.abs().mean(2).sum(0) for x in (t.groups * t.k_rot[:, :, None], t.groups))
        return dict(qk=qk, q=q, k=t.k_rot.abs().sum(0))

    def finish(self, mean):
        return {kind: m.sort(dim=-1, descending=True, stable=True).indices for kind, m in mean.items()}


class LabelCache(nn.Module):
    """r channels of every key (Section 4.2): labels [B, Hkv, T, r * bits / 8], params [B, Hkv, T, 2] in fp16."""

    channels: Tensor
    labels: Tensor
    params: Tensor | None

    def __init__(self, args: Any, shape: CacheShape, layer: int, calib: Any):
        super().__init__()
        B, H, T, D = shape.kv
        self.bits = args.label_bits
        self.r = label_channels(args.channels, self.bits, D)
        self.constants = {"channels"}

        def buffer(name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, shape.zeros(size, dtype), persistent=False)

        buffer("channels", (H, self.r), torch.int64)
        if calib is not None and shape.device.type != "meta":
            self.channels.copy_(calib.get(layer, f"channels.{args.ranking}")[:, : self.r])
        if self.bits == 16:
            buffer("labels", (B, H, T, self.r), shape.dtype)
            self.params = None
            self.token_bytes = self.r * shape.dtype.itemsize
        else:
            buffer("labels", (B, H, T, self.r * self.bits // 8), torch.uint8)
            buffer("params", (B, H, T, 2), torch.float16)
            self.token_bytes = self.r * self.bits // 8 + 2 * 2  # of one token and KV head
        self.constant_bytes = 8 * H * self.r

    def put_prompt(self, k: Tensor) -> None:
        """k [B, Hkv, S, D] rotated."""
        store_labels(k, self.channels, None, self.labels, self.params, self.bits)

    def put(self, k: Tensor, pos: Tensor) -> None:
        """k [B, Hkv, D] rotated, one token per row, at pos [B]."""
        store_labels(k[:, :, None], self.channels, pos, self.labels, self.params, self.bits)

    def scores(self, q: Tensor, pos: Tensor) -> Tensor:
        """q [B, Hq, D] rotated -> fp32 [B, Hkv, T] of the tokens up to pos [B]; others score anything.

        The group's sum: sum over its q of q . k = (sum of q) . k.
        """
        B, H = len(q), len(self.channels)
        q = q.view(B, H, -1, q.shape[2]).float().sum(2).gather(2, self.channels.expand(B, -1, -1))
        return label_score(q, self.labels[:B], None if self.params is None else self.params[:B], self.bits, pos)


def label_channels(channels: int | float, bits: int, head_dim: int) -> int:
    """r: a number of channels as it is given, a share of head_dim rounded up to what fills whole bytes."""
    per = max(1, 8 // bits)
    r = max(1, -(-round(channels * head_dim) // per)) * per if isinstance(channels, float) else channels
    if r > head_dim:
        raise InputError(f"double sparsity: {r} label channels do not fit in a head_dim of {head_dim}: lower channels")
    if r % per:
        raise InputError(
            f"double sparsity: {r} label channels of {bits} bits fill no whole bytes: use a multiple of {per}"
        )
    return r


class DoubleSparsity(Selecting):
    paper = "Yang, Sheng et al. 2024, Post-Training Sparse Attention with Double Sparsity"
    stress = dict(budget=24, sinks=4, recent=16)
    skip_layers = (0, 1)
    statistics = (Channels(),)

    @dataclass
    class Args(Selecting.Args):
        budget: int | float = knob(0.0625, "tokens attended (Sec. 6.1: 1/16)")
        sinks: int = knob(0, "first tokens always attended; the paper forces none")
        recent: int = knob(1, "newest tokens always attended: 1 is the current one")
        channels: int | float = knob(0.25, "label channels, a number or a share of head_dim (Sec. 4.2: 1/4 x 4 bits)")
        ranking: Literal["qk", "q", "k"] = knob("qk", "channels by mean |q k|, |q| or |k| of the calibration (Table 3)")
        label_bits: Literal[2, 4, 16] = knob(4, "bits of a label; 16: as the keys (Sec. 4.2)")

        def __post_init__(self):
            super().__post_init__()
            if not (0 < self.channels <= 1 if isinstance(self.channels, float) else self.channels >= 1):
                raise InputError(f"channels {self.channels} is out of range: give a number >= 1, or a share in (0, 1]")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.label = LabelCache(args, shape, layer, calib)

    def compress(self, q, k, v, lengths):
        super().compress(q, k, v, lengths)
        self.label.put_prompt(k)

    def append(self, k, v, pos):
        super().append(k, v, pos)
        self.label.put(k, pos)

    def scores(self, q, pos):
        """Algorithm 1: approximate attention on the label channels."""
        return self.label.scores(q, pos)

    def score_bytes(self, pos):
        return (pos + 1) * self.label.token_bytes  # every label

    def card_nbytes(self):
        B, H, T, _ = self.shape.kv
        return B * H * T * (self.token_bytes() + self.label.token_bytes) + self.label.constant_bytes

    def traffic(self, pos):
        return super().traffic(pos) + self.label.constant_bytes
