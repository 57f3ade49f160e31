"""Quest: pages of 16 tokens, ranked by a bound on what any of their keys can score; the best pages are attended whole.

All of K and V is kept. Beside it, every page has the minimum and the maximum of each channel of its keys: 2 D numbers,
1/16 of K and V. A step reads all of these, and K and V of the chosen pages, one of which is always the page of the
current token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import knob
from cache.budget import TopP
from cache.selecting import Heads, Selecting
from kernels.page_score import join_page, page_bounds, page_score, page_select
from kernels.top_p import top_p_count

PRESETS = {
    "quest-2048": dict(budget=2048),  # Quest's kernels and end to end, 32K
    "quest-160": dict(budget=160),  # Self-Indexing KVCache, Table 1 (LongBench), with skip_layers=none
    "quest-7.5": dict(budget=0.075),  # Self-Indexing KVCache, Table 2 (RULER), with skip_layers=none
}


class Quest(Selecting):
    paper = "Tang et al. 2024, Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference"
    stress = dict(budget=24, sinks=0, recent=1, page=8)
    skip_layers = (0, 1)

    low: Tensor  # [B, Hkv, P, D]
    high: Tensor

    @dataclass
    class Args(Selecting.Args):
        budget: int | float | TopP = knob(1024, "tokens attended, in whole pages (Quest: near full on LongBench)")
        sinks: int = knob(0, "first tokens whose pages are always attended; the paper forces none", low=0)
        recent: int = knob(1, "newest tokens whose pages are always attended: 1, the current page (published code)", 1)
        page: int = knob(16, "tokens of a page (Quest: 16)", 1, 4096)
        heads: Heads = knob(
            "group",
            "a list per KV head by its group's sum, softmax or max (ours), or per query head (paper, published code)",
        )

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, D = shape.kv
        pages = self.pages_of(T)
        # beside the page of the current token: pages of the sinks, and all pages that the newest tokens can lie in
        self.sink_pages, self.recent_pages = self.pages_of(args.sinks), self.pages_of(args.recent - 1)
        self.most = min(pages, max(self.pages_of(self.k_static), self.sink_pages + self.recent_pages + 1))
        self.k_static = max(2, self.most) * args.page
        self.buffer("low", (B, H, pages, D)), self.buffer("high", (B, H, pages, D))

    def pages_of(self, tokens):
        """The number of pages that `tokens` fill, an int or a tensor."""
        return -(-tokens // self.args.page)

    def last_page(self, pos):
        return self.once_a_step(pos, "last", lambda: pos // self.args.page)

    def compress(self, q, k, v, lengths):
        super().compress(q, k, v, lengths)
        for bound, of_prompt in zip((self.low, self.high), page_bounds(k, lengths, self.args.page), strict=True):
            bound[: len(k), :, : of_prompt.shape[2]] = of_prompt

    def append(self, k, v, pos):
        super().append(k, v, pos)
        join_page(self.low, self.high, k, pos, self.args.page)

    def rewind(self, pos, end):
        """Restore the bounds of each pos's page from its keys before pos; later pages start anew with a first token."""
        page, T = self.args.page, self.shape.max_seq_len
        row, first = torch.arange(len(pos), device=pos.device)[:, None], pos // page * page
        at = first[:, None] + torch.arange(page, device=pos.device)
        keys = self.k[row, :, at.clamp(max=T - 1)].transpose(1, 2)  # [B, Hkv, page, D]
        low, high = page_bounds(keys, pos - first, page)
        # an empty page has no bounds: its first token sets them
        row, to = row[:, 0], (pos // page).clamp(max=self.low.shape[2] - 1)
        self.low[row, :, to], self.high[row, :, to] = low[:, :, 0], high[:, :, 0]

    def scores(self, q, pos):
        """The upper bound of every page: the sum over channels of max(q low, q high) -> [B, Hkv or Hq, P]."""
        if self.by_query:
            return self._bounds(q, pos)
        return page_score(q, self.low, self.high, self.last_page(pos))

    def _bounds(self, q, pos):
        """The same bounds for every query head, [B, Hq, P]."""
        each = q.unflatten(1, (self.shape.n_kv_head, -1)).unbind(2)
        last = self.last_page(pos)
        return torch.stack([page_score(x, self.low, self.high, last) for x in each], 2).flatten(1, 2)

    def logits(self, q, pos):
        """Logits of pages: each of a page's tokens counts at the page's bound, which adds the log of their number."""
        page, pages = self.args.page, torch.arange(self.low.shape[2], device=pos.device)
        held = (pos[:, None] + 1 - pages * page).clamp(1, page)
        return self._bounds(q, pos) * q.shape[2] ** -0.5 + held.log()[:, None]

    def select(self, q, pos):
        """The best full pages, followed by the current one as far as it is filled."""
        page, sinks, recent = self.args.page, self.sink_pages, self.recent_pages
        last = self.last_page(pos)
        wanted = self.once_a_step(pos, "pages", lambda: self.pages_of(self.wanted(pos)))
        if self.p is None:
            scores = self.ranked(q, pos, last)
        else:
            scores = self.weights(self.logits(q, pos), last)
            need = top_p_count(scores, last, self.p, sinks, recent + 1)
            wanted = need.minimum(wanted[:, None])
        slots = self.shape.max_seq_len
        idx, count = page_select(scores, pos, wanted, page, self.k_static, slots - 1, sinks, recent)
        if self.p is not None:
            self.note_read(count, pos)
        return idx, count

    # ---- accounting ----

    def score_bytes(self, pos):
        return self.scorings() * self.pages_of(pos + 1) * self.token_bytes()  # both bounds of every page

    def chosen(self, pos):
        """The current page is counted as full, which it is at its last token."""
        forced = self.sink_pages + self.recent_pages + 1
        return min(pos + 1, max(self.pages_of(super().chosen(pos)), forced) * self.args.page)
