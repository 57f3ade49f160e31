"""Double Sparsity: a few calibrated channels of every key, the labels, choose the tokens that are attended exactly.

Full K and V stay, in the model's dtype. Beside them lies the label cache: the r channels of a KV head with the largest
mean |q_c k_c|, of every key, contiguous and in 4 bits (20 bytes a token and KV head at r = 32, on top of 512 at D = 128
in 16 bits). A step scores all labels, and reads K and V of the best 1/16 of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor

from errors import InputError
from kernels.gather_attention import gather_attention
from kernels.label_score import label_score, store_labels
from kernels.select import budget_select
from kv_methods.base import (
    CacheShape,
    KVMethod,
    budget_tokens,
    check_budget,
    check_forced,
    selection_cap,
    selection_size,
)

PRESETS = {
    "double_sparsity-12.5": dict(budget=0.125),  # Table 2, 1/8
    "double_sparsity-3.1": dict(budget=0.03125),  # Table 2, 1/32
    "double_sparsity-q": dict(ranking="q"),  # Table 3, q outlier
    "double_sparsity-k": dict(ranking="k"),  # Table 3, k outlier
}


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


class DoubleSparsity(KVMethod):
    paper = "Yang, Sheng et al. 2024, Post-Training Sparse Attention with Double Sparsity"
    lossless = dict(budget=1.0)
    skip_layers = (0, 1)
    calibrated = True

    @dataclass
    class Args:
        channels: int | float = field(
            default=0.25, metadata=dict(help="label channels, a number or a share of head_dim (Sec. 4.2: 1/4 x 4 bits)")
        )
        ranking: Literal["qk", "q", "k"] = field(
            default="qk", metadata=dict(help="channels by mean |q k|, |q| or |k| of the calibration (Table 3)")
        )
        label_bits: Literal[2, 4, 16] = field(
            default=4, metadata=dict(help="bits of a label; 16: as the keys (Sec. 4.2)")
        )
        budget: int | float = field(default=0.0625, metadata=dict(help="tokens attended (Sec. 6.1: 1/16)"))
        sinks: int = field(default=0, metadata=dict(help="first tokens always attended; the paper forces none"))
        recent: int = field(default=1, metadata=dict(help="newest tokens always attended: 1 is the current one"))

        def __post_init__(self):
            check_budget(self.budget)
            check_forced("double sparsity", self.budget, self.sinks, self.recent)
            if not (0 < self.channels <= 1 if isinstance(self.channels, float) else self.channels >= 1):
                raise InputError(f"channels {self.channels} is out of range: give a number >= 1, or a share in (0, 1]")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        self.k, self.v = self.buffer("k", shape.kv), self.buffer("v", shape.kv)
        self.label = LabelCache(args, shape, layer, calib)
        self.k_static = selection_cap(args.budget, shape.max_seq_len, args.sinks + args.recent)

    def compress(self, q, k, v, lengths):
        B, _, S, _ = k.shape
        self.k[:B, :, :S], self.v[:B, :, :S] = k, v
        self.label.put_prompt(k)

    def append(self, k, v, pos):
        row = torch.arange(len(pos), device=pos.device)
        self.k[row, :, pos], self.v[row, :, pos] = k, v
        self.label.put(k, pos)

    def select(self, q, pos):
        """Algorithm 1: approximate attention on the label channels, top-k per KV head."""
        wanted = budget_tokens(self.args.budget, pos + 1)
        return budget_select(self.label.scores(q, pos), pos, wanted, self.k_static, self.args.sinks, self.args.recent)

    def attend(self, q, idx, count, pos):
        return gather_attention(q, self.k, self.v, idx, count)

    def card_nbytes(self):
        B, H, T, D = self.shape.kv
        return B * H * T * (2 * D * self.shape.dtype.itemsize + self.label.token_bytes) + self.label.constant_bytes

    def traffic(self, pos):
        """Every label, and the keys and values of the chosen tokens (Section 5.3)."""
        B, H, _, D = self.shape.kv
        n = selection_size(self.args.budget, pos, self.args.sinks + self.args.recent)
        read = (pos + 1) * self.label.token_bytes + n * 2 * D * self.shape.dtype.itemsize
        return B * H * read + self.label.constant_bytes
