"""PyramidKV: SnapKV with budgets that fall from layer to layer, since attention narrows towards the last one.

Beside the observation window, the first layer keeps about twice the mean budget and the last one 1 / beta of it, with
an arithmetic sequence between; all layers together hold what SnapKV would. If a prompt is shorter than twice what is
kept of it beside the window, every layer keeps as much as SnapKV does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.base import knob
from cache.budget import budget_tokens
from kv_methods.snapkv import SnapKV


class PyramidKV(SnapKV):
    paper = "Cai, Zhang et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"

    @dataclass
    class Args(SnapKV.Args):
        budget: int | float = knob(
            2048, "tokens kept of a prompt, mean over the layers, or their share (PyramidKV: 64 to 2048)"
        )
        recent: int = knob(
            8, "observation window: last tokens, which choose and are kept (alpha; published code)", 1, 4096
        )
        beta: float = knob(20.0, "ratio of the mean budget to that of the last layer (published code)", 1, 10**6)

    def num_kept(self, length):
        """The pyramid: beside the window k_l falls from k_0 = 2 k - k_last to k_last = k / beta; k is the mean."""
        a, last, window = self.args, self.shape.n_layer - 1, self.recent(length)
        k = budget_tokens(a.budget, length, a.min_tokens) - window
        # no layer gets more than there is; the others get what it leaves (published code)
        first = ((length - window) / k.clamp(min=1)).clamp(1, 2 - 1 / a.beta)
        first = torch.where(length < 2 * k, 1.0, first)  # too short for a pyramid: layers are alike (published code)
        share = first - 2 * (first - 1) * self.layer / last if last else first
        return (window + (k.clamp(min=0) * share).round().long()).minimum(length)
