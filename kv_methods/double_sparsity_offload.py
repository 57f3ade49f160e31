"""Double Sparsity-Offload: K and V in host memory, labels on the device, the next layer's tokens fetched ahead of time.

The device holds the label cache (20 bytes per token and KV head against 512 of K and V at D = 128), the newest tokens
in a ring, and two buffers of gathered tokens that all layers share in turns. While layer l - 1 computes, the query of
layer l is predicted from the input of layer l - 1, and the tokens that it chooses cross the bus (Section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.base import Attended, CacheShape, KVMethod, Storage, knob, rows
from cache.budget import Selection, TopP
from cache.labels import LabelCache
from kernels.offload import await_rows, fetch_rows, fetched_attention, host_buffer
from kernels.ring import ring_positions
from kernels.rotate_append import append_token
from kernels.select import budget_select
from kv_methods.double_sparsity import DoubleSparsity
from runtime.errors import InputError

PRESETS = {
    "double_sparsity_offload-sync": dict(predict=False),  # the true query: what prediction costs in accuracy
    "flexgen": dict(fetch="all"),  # Fig. 6 (c)(d), the baseline: every token crosses the bus
}


class Half(Storage):
    """One half of the double buffer: idx [B, Hkv, K], the tokens that a layer asked for (-1: none), and their k and v
    [B, Hkv, K, D]. A stream beside the compute stream writes them: read them after `await_rows`."""

    k: Tensor
    v: Tensor
    idx: Tensor
    layout = Storage.first_slots

    def __init__(self, shape: CacheShape, n: int):
        super().__init__(shape)
        size = (shape.max_batch, shape.n_kv_head, n, shape.head_dim)
        self.buffer("k", size), self.buffer("v", size)
        self.buffer("idx", size[:3], torch.int64).fill_(-1)


class DoubleSparsityOffload(KVMethod):
    paper = DoubleSparsity.paper + ", Section 5"
    lossless = dict(budget=1.0)
    stress = dict(budget=24, sinks=4, recent=16)
    skip_layers = DoubleSparsity.skip_layers
    statistics = DoubleSparsity.statistics
    units = "k"
    reads_queries = False

    host_k: Tensor  # [B, Hkv, T, D] in host memory
    host_v: Tensor
    ring_k: Tensor  # [B, Hkv, recent, D]
    ring_v: Tensor
    label: LabelCache | None
    fetched: Half
    layout = KVMethod.first_slots

    @dataclass
    class Args(DoubleSparsity.Args):
        recent: int = knob(16, "newest tokens, always attended: kept on the device", low=1)
        predict: bool = knob(True, "fetch ahead with a predicted query (Sec. 5.1); False: wait for the true one")
        fetch: Literal["selected", "all"] = knob(
            "selected", "all: every token is fetched and attended, as in FlexGen (Sec. 6.2)"
        )

        def __post_init__(self):
            super().__post_init__()
            if isinstance(self.budget, TopP):
                raise InputError("double_sparsity_offload fetches lists of one size: its budget is a number or a share")
            if self.heads != "group":
                raise InputError("double_sparsity_offload fetches by the sum over a group: use heads=group")

    @classmethod
    def needs(cls, args):
        return cls.statistics if args.fetch == "selected" else ()

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        for name in ("host_k", "host_v"):
            self.register_buffer(name, host_buffer(shape.kv, shape.dtype, shape.device), persistent=False)
        self.recent = min(args.recent, T)
        self.buffer("ring_k", (B, H, self.recent, D)), self.buffer("ring_v", (B, H, self.recent, D))
        self.label = LabelCache(args, shape, layer, calib) if args.fetch == "selected" else None
        # The input of the first layers and of the last is too unlike that of the layer before for a prediction (Sec.
        # 5.2). In a small model layer 0 alone fetches synchronously, as there is no layer before it.
        n_layer = shape.n_layer
        synchronous = (0, 1, n_layer - 1) if n_layer >= 16 else (0,)
        self.predicts = args.predict and layer not in synchronous  # differs between layers
        self.selection = Selection(args.budget, args.sinks, self.recent, min_tokens=args.min_tokens)
        cap = T if args.fetch == "all" else self.selection.of(T)
        self.n_fetch = max(1, cap - self.recent)

    def connect(self, layers):
        """A layer's tokens are fetched while the layer before attends: even layers use one half of the double buffer,
        odd layers the other."""

        def use(m):
            return m.layer % 2, m.n_fetch, m.shape

        mates = [m for m in layers if isinstance(m, DoubleSparsityOffload) and use(m) == use(self)]
        self.shared_part("fetched", mates, lambda: Half(self.shape, self.n_fetch))

    # ---- storage ----

    def compress(self, q, k, v, lengths):
        B, _, S, _ = k.shape
        self.host_k[:B, :, :S], self.host_v[:B, :, :S] = k, v
        at = ring_positions(lengths - 1, self.recent).clamp(0, S - 1)[:, None, :, None].expand_as(self.ring_k[:B])
        self.ring_k[:B], self.ring_v[:B] = k.gather(2, at), v.gather(2, at)
        if self.label is not None:
            self.label.put_prompt(k)

    def append(self, k, v, pos):
        append_token(k, v, pos, self.host_k, self.host_v)
        append_token(k, v, self.once_a_step(pos, "slot", lambda: pos % self.recent), self.ring_k, self.ring_v)
        if self.label is not None:
            self.label.put(k, pos)

    # ---- selection ----

    def choose(self, q, pos):
        """The tokens to fetch: q [B, Hq, D] rotated -> idx [B, Hkv, K], -1 past the budget.

        They are double_sparsity's choice of those that the ring does not hold. The token at `pos` may not be stored
        yet: it is not read.
        """
        oldest = self.once_a_step(pos, "oldest", lambda: pos - self.recent)
        nth = self.once_a_step(pos, "nth", lambda: torch.arange(self.n_fetch, device=pos.device))
        if self.label is None:
            return torch.where(nth <= oldest[:, None], nth, -1)[:, None].expand(-1, self.shape.n_kv_head, -1)
        wanted = self.once_a_step(pos, "wanted", lambda: (self.selection.at(pos + 1) - self.recent).clamp(min=0))
        idx, count = budget_select(self.label.scores(q, oldest), oldest, wanted, self.n_fetch, self.args.sinks)
        return torch.where(nth < count[..., None], idx, -1)

    def fetch(self, q, pos):
        half = self.fetched
        fetch_rows(self.host_k, self.host_v, self.choose(q, pos), q, half.idx, half.k, half.v)

    def prefetch(self, q_hat, pos):
        self.fetch(self.query_in_units(self.rope.rotate(q_hat, pos)), pos)

    def select(self, q, pos):
        """The tokens that were fetched ahead, or that are fetched now with the true query."""
        if not self.predicts:
            self.fetch(q, pos)
        half = self.fetched
        await_rows(half.idx, half.k, half.v)
        idx = rows(half.idx, len(pos))
        return idx, (idx >= 0).sum(-1)

    def attend(self, q, idx, count, pos):
        """Exact attention over the fetched tokens and the ring, which holds the current one."""
        half = self.fetched
        return fetched_attention(q, half.k, half.v, idx, count, self.ring_k, self.ring_v, pos)

    def attended(self, q, idx, count, pos):
        B, H, half, at = len(pos), self.shape.n_kv_head, self.fetched, ring_positions(pos, self.recent)
        ring = torch.where(at >= 0, at, -2)[:, None].expand(B, H, -1)
        at = torch.cat((torch.where(idx >= 0, idx, -2), ring), -1)
        k, v = (torch.cat((x[:B], y[:B]), 2) for x, y in ((half.k, self.ring_k), (half.v, self.ring_v)))
        return Attended(at, q, k, v)

    # ---- accounting ----

    def traffic(self, pos):
        """Every label, the fetched tokens and the ring on the device; the fetched tokens once more over the bus."""
        B, H, _, D = self.shape.kv
        recent = min(pos + 1, self.recent)
        n, labels, constant = pos + 1, 0, 0
        if self.label is not None:
            n = self.selection.of(pos + 1)
            labels, constant = (pos + 1) * self.label.token_bytes, self.label.constant_bytes
        return B * H * (labels + (n + n - recent) * 2 * D * self.shape.dtype.itemsize) + constant
