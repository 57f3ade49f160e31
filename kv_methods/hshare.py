"""HShare: critical tokens chosen once and shared across steps, across similar layers, and across similar heads.

Tokens are chosen as in Double Sparsity, by labels of every key. A set of them serves several steps. Layers and heads
whose choices for a prompt's last queries are most alike take the set of an earlier one. All attend to it with their own
keys and values, beside sinks and the newest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.base import CacheShape, Storage, knob
from kernels.select import budget_select
from kernels.shared_sets import choosers_last, take_sets
from kv_methods.double_sparsity import DoubleSparsity
from runtime.errors import InputError

PRESETS = {
    "hshare-4k": dict(),  # SALS, Table 4: 16 + 432 + 64
    "hshare-half": dict(layer_ratio=0.5, head_ratio=0.5),  # "1/2-1/2-1/2"
    # GSM8K and CoQA (published code: 8 + 88 + 32, of layers and heads a half)
    "hshare-128": dict(budget=128, sinks=8, recent=32, layer_ratio=0.5, head_ratio=0.5),
}


class SharedSets(Storage):
    """The sets of all layers of a cache: the first count [L, B, Hkv] of the slots idx [L, B, Hkv, n] int64.

    source [L, B]: the layer whose set a row takes, its own or an earlier one.
    """

    idx: Tensor
    count: Tensor
    source: Tensor
    layout = Storage.first_slots

    def __init__(self, shape: CacheShape, n: int, layers: list[int]):
        super().__init__(shape)
        size = (shape.n_layer, shape.max_batch, shape.n_kv_head, n)
        self.buffer("idx", size, torch.int64), self.buffer("count", size[:3], torch.int64)
        self.buffer("source", size[:2], torch.int64)
        self.layers = layers  # the layers that take part, in order
        self.seen: dict[int, Tensor] = {}  # each layer's sets for the current prompt, as flags [B, Q, Hkv, S]

    def empty(self, layer: int) -> None:
        if not self.source.is_meta:
            self.source[layer], self.count[layer] = layer, 0

    def compare(self, layer: int, flags: Tensor, share: float) -> None:
        """Record what a prompt's last queries chose, flags [B, Q, Hkv, S]; after the last layer, decide which share."""
        if layer == self.layers[0]:
            self.seen.clear()
        self.seen[layer] = flags
        if layer != self.layers[-1] or len(self.seen) < len(self.layers):
            return
        alike = torch.stack([overlap(self.seen[i], self.seen[j]) for i in self.layers for j in self.layers], -1)
        n = len(self.layers)
        taken = greedy(alike.view(-1, n, n), n - chosen_of(n, share))
        ids = torch.tensor(self.layers, device=taken.device)
        self.source[ids, : len(taken)] = ids[taken].T
        self.seen.clear()


def chosen_of(n: int, share: float) -> int:
    """The number of n layers, or heads, that choose for themselves."""
    return max(1, round(share * n))


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The number of tokens that two layers, flags [B, Q, Hkv, S] each, have in common over queries and heads -> [B]."""
    return (a & b).flatten(1).sum(1)


def greedy(alike: Tensor, n: int) -> Tensor:
    """The index of the set that each of N uses, its own or an earlier one's, [B, N]; n of them share. alike [B, N, N]:
    the similarity of i and j, used where i > j.

    The most similar pair comes first: the later one uses the earlier one's set. Whoever uses another's set no longer
    gives its own, and those that used it follow (HShare, greedy sharing, as published).
    """
    B, N, _ = alike.shape
    row, source = torch.arange(B, device=alike.device), torch.arange(N, device=alike.device).repeat(B, 1)
    earlier = torch.ones(N, N, dtype=torch.bool, device=alike.device).tril(-1)
    alike = torch.where(earlier, alike, -1)
    for _ in range(n):
        best = alike.flatten(1).argmax(1)
        i, j = best // N, best % N
        alike[row, i], alike[row, :, i] = -1, -1
        source = torch.where(source == i[:, None], j[:, None], source)
    return source


class HShare(DoubleSparsity):
    paper = "Wu et al. 2025, HShare: Fast LLM Decoding by Hierarchical Key-Value Sharing"
    stress = dict(budget=24, sinks=4, recent=8, layer_ratio=0.5, head_ratio=0.5, steps=3)
    skip_layers = ()  # type: ignore[assignment]
    reads_queries = True
    joins_heads = True
    deviates = frozenset({"unequal steps"})

    sets: SharedSets
    head_source: Tensor  # int64 [B, Hkv]: whose set a head takes, its own or an earlier one's, of all ranks
    newer: Tensor  # int64 [B]: newer tokens than those the set was chosen from begin here
    number: Tensor  # int64 [1]: of the layer; a buffer, so that layers share a graph

    @dataclass
    class Args(DoubleSparsity.Args):
        budget: int | float = knob(512, "tokens attended: sinks, critical ones and recent ones (SALS, Table 4)")
        sinks: int = knob(16, "first tokens always attended", low=0)
        recent: int = knob(64, "newest tokens always attended", low=1)
        layer_ratio: float = knob(0.75, "share of the layers that choose for themselves (3/4-3/4-1/2)", 0, 1)
        head_ratio: float = knob(0.75, "share of a layer's KV heads that choose for themselves", 0, 1)
        steps: int = knob(2, "steps that one set serves: 2 are the ratio of 1/2", 1, 4096)
        queries: int = knob(8, "last queries of a prompt that tell who is alike (ours; published code: all)", 1, 4096)

        def __post_init__(self):
            super().__post_init__()
            if self.heads != "group":
                raise InputError("hshare shares the sets of KV heads, chosen by the sum over a group: use heads=group")

    def __init__(self, args, shape, layer, rope, calib=None):
        super().__init__(args, shape, layer, rope, calib)
        B, H, T, _ = shape.kv
        if shape.drafts >= args.recent:
            raise InputError(f"hshare: a set may hold drafts that are taken back, but for the newest {args.recent} "
                             f"tokens: draft at most {args.recent - 1}, or give more recent ones")  # fmt: skip
        self.n_critical = max(1, self.k_static - min(args.recent, self.k_static))  # sinks among them
        self.k_static = self.n_critical + args.recent + args.steps - 1
        self.buffer("head_source", (B, H), torch.int64), self.buffer("newer", (B,), torch.int64)
        self.constant("number", (1,), torch.tensor([layer]), torch.int64)

    def connect(self, layers):
        """Layers that choose the same number of tokens share their sets."""
        mates = [
            m for m in layers if isinstance(m, HShare) and (m.shape, m.n_critical) == (self.shape, self.n_critical)
        ]
        self.shared_part("sets", mates, lambda: SharedSets(self.shape, self.n_critical, [m.layer for m in mates]))
        self.reset()

    def reset(self):
        if not self.newer.is_meta:
            own = self.shape.own_heads
            self.newer.zero_(), self.head_source.copy_(torch.arange(own.start, own.stop).expand_as(self.head_source))
            self.sets.empty(self.layer)

    def compress(self, q, k, v, lengths):
        """Prompts are attended to exactly. What their last queries would choose tells which layers and heads share."""
        super().compress(q, k, v, lengths)
        (B, H, S, _), Q, flags = k.shape, self.args.queries, []
        row = torch.arange(B, device=k.device)
        for back in reversed(range(Q)):
            pos = lengths - 1 - back
            last = (pos - self.args.recent).clamp(min=-1).repeat_interleave(H).view(B, H)
            idx, count = self._critical(q[row, :, pos.clamp(min=0)], last, self._wanted(pos))
            chosen = torch.arange(idx.shape[2], device=k.device) < count[..., None]
            at = torch.where(chosen, idx, S).clamp(max=S)
            flags.append(torch.zeros(B, H, S + 1, dtype=torch.bool, device=k.device).scatter(2, at, True)[..., :S])
        self.sets.idx[self.layer, :B], self.sets.count[self.layer, :B] = (
            idx,
            count,
        )  # of the last query, every head's own
        self.newer[:B] = (lengths - self.args.recent).clamp(min=0)
        told = self.of_all_heads(torch.stack(flags, 1), 2)  # [B, Q, Hkv, S]
        alike = torch.einsum("bqis,bqjs->bij", told.float(), told.float())
        n, own = told.shape[2], self.shape.own_heads
        self.head_source[:B] = greedy(alike, n - chosen_of(n, self.args.head_ratio))[:, own.start : own.stop]
        self.sets.compare(self.layer, told, self.args.layer_ratio)

    def _wanted(self, pos):
        """The number of tokens that each head chooses, with the newest at pos [B]: [B * Hkv]."""
        wanted = (self.selection.at((pos + 1).clamp(min=0)) - self.args.recent).clamp(min=0)
        return wanted.repeat_interleave(self.shape.n_kv_head)

    def _critical(self, q, last, wanted):
        """Sinks and the best tokens up to last [B, Hkv], by head; below 0, no token is read."""
        scores = self.label.scores_by_head(q, last)
        idx, count = budget_select(scores, last.view(-1), wanted, self.n_critical, self.args.sinks)
        return idx.view(*last.shape, -1), count.view(last.shape)

    def select(self, q, pos):
        a, sets, shared = self.args, self.sets, (self.head_source, self.sets.source, self.number)
        last = choosers_last(pos, *shared, self.shape.own_heads.start, a.steps, a.recent)
        wanted = self.once_a_step(pos, f"wanted by {self.shape.n_kv_head} heads", lambda: self._wanted(pos))
        idx, count = map(self.of_all_heads, self._critical(q, last, wanted))
        slots = self.shape.max_seq_len
        return take_sets(
            idx, count, pos, *shared, sets.idx, sets.count, self.newer, a.steps, a.recent, slots - 1, self.k_static
        )

    # ---- accounting ----

    def score_bytes(self, pos):
        """Layers, heads and steps that choose read every label: the mean over all of them."""
        a, H, L = self.args, self.shape.layer_heads, len(self.sets.layers)
        share = chosen_of(H, a.head_ratio) / H * chosen_of(L, a.layer_ratio) / L / a.steps
        return round((pos + 1) * self.label.token_bytes * share)

    def chosen(self, pos):
        """Includes the tokens that leave the recent window while a set serves."""
        return min(pos + 1, super().chosen(pos) + self.args.steps - 1)

    def card_nbytes(self):
        """The sets of all layers count as the first layer's."""
        sets = sum(b.nbytes for b in self.sets.buffers()) if "sets" in self._modules else 0
        return super().card_nbytes() + 8 * (self.shape.max_batch * (self.shape.n_kv_head + 1) + 1) + sets

    def traffic(self, pos):
        heads = self.shape.max_batch * self.shape.n_kv_head
        return heads * (self.score_bytes(pos) + self.chosen(pos) * self.token_bytes()) + self.label.constant_bytes
