"""Double Sparsity: a few calibrated channels of every key, the labels, choose the tokens that are attended exactly.

All of K and V is kept, in the model's dtype. The label cache beside it holds r channels of every key, those of the
KV head with the largest mean |q_c k_c|, contiguous and in 4 bits (20 bytes per token and KV head at r = 32, on top of
512 at D = 128 in 16 bits). A step scores all labels, and reads K and V of the best 1/16 of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache.base import knob
from cache.budget import TopP, check_part
from cache.labels import LabelCache
from cache.selecting import Heads, Selecting
from cache.statistic import Statistic

PRESETS = {
    "double_sparsity-12.5": dict(budget=0.125),  # Table 2, 1/8
    "double_sparsity-3.1": dict(budget=0.03125),  # Table 2, 1/32
    "double_sparsity-q": dict(ranking="q"),  # Table 3, q outlier
    "double_sparsity-k": dict(ranking="k"),  # Table 3, k outlier
    "double_sparsity-4k": dict(budget=512, sinks=16, recent=64),  # SALS, Table 4
    # Self-Indexing KVCache, Tables 1 and 2, with skip_layers=none: 16 channels, "a 2-bit index per parameter"
    "double_sparsity-160": dict(budget=160, channels=16, label_bits=16),
    "double_sparsity-7.5": dict(budget=0.075, channels=16, label_bits=16),
}


class Channels(Statistic):
    """Channels of each KV head by falling mean |q_c k_c|, |q_c| and |k_c|, over tokens and the group (Sec. 4.1)."""

    name = "channels"

    def measure(self, t):
        qk, q = (x.abs().mean(2).sum(0) for x in (t.groups * t.k_rot[:, :, None], t.groups))
        return dict(qk=qk, q=q, k=t.k_rot.abs().sum(0))

    def finish(self, mean):
        return {kind: m.sort(dim=-1, descending=True, stable=True).indices for kind, m in mean.items()}


class DoubleSparsity(Selecting):
    paper = "Yang, Sheng et al. 2024, Post-Training Sparse Attention with Double Sparsity"
    stress = dict(budget=24, sinks=4, recent=16)
    skip_layers = (0, 1)
    units = "k"
    statistics = (Channels(),)

    @dataclass
    class Args(Selecting.Args):
        budget: int | float | TopP = knob(0.0625, "tokens attended (Sec. 6.1: 1/16)")
        sinks: int = knob(0, "first tokens always attended; the paper forces none", low=0)
        recent: int = knob(1, "newest tokens always attended: 1 is the current one", low=1)
        channels: int | float = knob(
            0.25, "label channels, a number or a share of head_dim (Sec. 4.2: 1/4 x 4 bits)", 0, 10**6
        )
        ranking: Literal["qk", "q", "k"] = knob("qk", "channels by mean |q k|, |q| or |k| of the calibration (Table 3)")
        label_bits: Literal[2, 4, 16] = knob(4, "bits of a label; 16: as the keys (Sec. 4.2)")
        heads: Heads = knob(
            "group",
            "a list per KV head by its group's sum, softmax or max (ours), or per query head (published code)",
        )

        def __post_init__(self):
            super().__post_init__()
            check_part("channels", self.channels)

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
        return self.label.scores(q, pos, "query" if self.by_query else "group")

    def logits(self, q, pos):
        """Logits estimated from the labels: channels without a label count as 0."""
        return self.label.scores(q, pos, "query") * q.shape[2] ** -0.5

    def score_bytes(self, pos):
        """Every label is read once, or once per query head."""
        return (pos + 1) * self.label.token_bytes * self.scorings()

    def card_nbytes(self):
        B, H, T, _ = self.shape.kv
        fixed = self.label.constant_bytes + self.unit_nbytes + (16 * B if self.p is not None else 0)
        return B * H * T * (self.token_bytes() + self.label.token_bytes) + fixed

    def traffic(self, pos):
        return super().traffic(pos) + self.label.constant_bytes
