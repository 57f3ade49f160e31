"""RocketKV: a prompt is cut once as SnapKV does, then every step attends to a few pages of what is left.

Eviction does a part of the compression: of L tokens, at a ratio of c = L / budget, it keeps L / c^a. Hybrid selection
does the rest: the minimum and the maximum of each channel over every page of slots are stored channel by channel, so
that a step reads only the few channels in which its query is largest, and of each only the bound that the query's sign
needs. The best pages are attended to exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.budget import budget_cap, budget_tokens, check_budget, check_part, part_of
from kernels.channel_score import channel_score, largest_channels
from kernels.gather_attention import gather_rows
from kernels.page_score import join_page, page_bounds, page_select
from kernels.top_p import group_weights
from kv_methods.snapkv import SnapKV
from runtime.errors import InputError

PRESETS = {f"rocket-{budget}": dict(budget=budget) for budget in (256, 512, 2048)}  # of no seed paper


class Rocket(SnapKV):
    paper = (
        "Behnam, Fu et al. 2025, RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression"
    )
    lossless = dict(budget=1.0, attended=1.0)
    stress = dict(budget=12, recent=4, page=2, kernel=7)

    bounds: Tensor  # [B, Hkv, 2 D, P]: the minimum of every channel over each page's keys, then the maximum

    @dataclass
    class Args(SnapKV.Args):
        budget: int | float = knob(
            1024,
            "tokens that a step may read, or their share, scoring included: it says how many are kept and attended",
        )
        attended: int | float | None = knob(
            None, "tokens attended, or a share; None: half of the budget (published code)"
        )
        kept: int | float | None = knob(None, "tokens kept of a prompt, or a share; None: L / c^a (published code)")
        kernel: int = knob(63, "neighbours pooled, an odd number (published code: 63)", 1, 10**4)
        page: int = knob(3, "tokens of a page (published code: by length, 3 from a ratio of 9 on)", 1, 4096)
        channels: int | float = knob(
            0.5,
            "channels that score, or their share (published code: by length, 0.47 to 0.75 with pages of 3)",
            0,
            10**6,
        )

        def __post_init__(self):
            super().__post_init__()
            if self.adaptive:
                raise InputError("rocket: pages are of heads that hold equally many tokens: use adaptive=False")
            check_part("channels", self.channels)
            for knob_name in ("kept", "attended"):
                if (tokens := getattr(self, knob_name)) is not None:
                    check_budget(tokens, knob_name)

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, N, D = self.k.shape
        self.r = part_of(args.channels, D)
        if self.r > D:
            raise InputError(f"rocket: {self.r} channels do not fit in a head_dim of {D}: lower channels")
        self.most = self.pages_of(min(N, self.share(budget_cap, shape.max_seq_len)))
        self.buffer("bounds", (B, H, 2 * D, self.pages_of(N)))

    def pages_of(self, tokens):
        return -(-tokens // self.args.page)

    def num_kept(self, length):
        """L / c^a, with a = 0.2 + 0.06 log2 c up to 0.8 (published code)."""
        if self.args.kept is not None:
            return budget_tokens(self.args.kept, length, self.args.min_tokens).maximum(self.recent(length))
        ratio = length / budget_tokens(self.args.budget, length, self.args.min_tokens).double()
        kept = length / ratio ** (0.2 + 0.06 * ratio.log2()).clamp(max=0.8)
        return (kept + 1e-6).long().maximum(self.recent(length))

    def share(self, budget_of, length):
        """The number of tokens to attend to at a length, or at lengths, as `budget_of` takes them."""
        if self.args.attended is not None:
            return budget_of(self.args.attended, length, self.args.min_tokens)
        return (budget_of(self.args.budget, length, self.args.min_tokens) + 1) // 2

    # ---- storage: slots in the order of the text ----

    def keep(self, *args, **kwargs):
        super().keep(*args, **kwargs)
        self._index(len(args[0]))

    def compact(self):
        super().compact()
        self._index(len(self.k))

    def _index(self, B):
        there = (torch.arange(self.k.shape[2], device=self.k.device) < self.filled[:B, None])[:, None]
        order = torch.where(there, self.place[:B], torch.iinfo(torch.int32).max).sort(dim=-1, stable=True).indices
        for x in (self.k, self.v):
            x[:B] = gather_rows(x[:B], order)
        self.place[:B] = self.place[:B].gather(2, order)
        self.bounds[:B] = torch.cat(page_bounds(self.k[:B], self.filled[:B], self.args.page), 3).mT

    def append(self, k, v, pos):
        super().append(k, v, pos)
        low, high = self.bounds.mT.chunk(2, 3)
        join_page(low, high, k, self.newest(pos), self.args.page)

    def newest(self, pos):
        return self.once_a_step(pos, "newest", lambda: self.filled[: len(pos)] - 1)

    # ---- hybrid selection ----

    def scores(self, q, last):
        """Estimated weight of a token of each page by the largest channels, over the group: fp32 [B, Hkv, P]."""
        few, bound = largest_channels(q, self.shape.n_kv_head, self.r, bounds=True)
        return group_weights(channel_score(few, bound, self.bounds, last), last)

    def select(self, q, pos):
        """The best full pages of slots, followed by the newest one as far as it is filled."""
        page, newest = self.args.page, self.newest(pos)
        last = self.once_a_step(pos, "last", lambda: newest // page)
        wanted = self.once_a_step(
            pos, "wanted", lambda: self.pages_of(self.share(budget_tokens, pos + 1).minimum(newest + 1))
        )
        return page_select(self.scores(q, last), newest, wanted, page, max(2, self.most) * page, self.k.shape[2] - 1)

    def traffic(self, pos):
        """After the prompt of up to pos + 1 tokens of which most is kept: r channels of one bound of every page, and K
        and V of the chosen pages."""
        s, kept = self.shape, min(self.max_kept(pos + 1), self.k.shape[2])
        tokens = min(kept, self.pages_of(self.share(budget_cap, pos + 1)) * self.args.page)
        read = self.r * self.pages_of(kept) + 2 * s.head_dim * tokens
        return s.max_batch * (s.n_kv_head * read * s.dtype.itemsize + 8)
