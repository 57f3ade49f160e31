"""Critical tokens that layers and heads take from each other, and who takes whose: what HShare shares."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cache.base import CacheShape, Storage
from kernels.rope import Rope


class SharedSets(Storage):
    """The sets of all layers of a cache: slots idx [L, B, Hkv, n] int64, of which the first count [L, B, Hkv].

    source [L, B]: the layer whose set a row takes, its own or an earlier one.
    """

    idx: Tensor
    count: Tensor
    source: Tensor

    def __init__(self, shape: CacheShape, n: int):
        super().__init__(shape)
        size = (shape.n_layer, shape.max_batch, shape.n_kv_head, n)
        self.buffer("idx", size, torch.int64), self.buffer("count", size[:3], torch.int64)
        self.buffer("source", size[:2], torch.int64)
        self.layers: list[int] = []  # those that take part, from the first to the last
        self.seen: dict[int, Tensor] = {}  # of the prompt at hand: each layer's sets as flags [B, Q, Hkv, S]

    def join(self, layer: int) -> None:
        if layer not in self.layers:
            self.layers = sorted([*self.layers, layer])
        self.empty(layer)

    def empty(self, layer: int) -> None:
        if not self.source.is_meta:
            self.source[layer], self.count[layer] = layer, 0

    def compare(self, layer: int, flags: Tensor, share: float) -> None:
        """What a prompt's last queries chose, flags [B, Q, Hkv, S]. After the last layer: who takes whose."""
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


_SETS: WeakKeyDictionary[Rope, dict[tuple[CacheShape, int], SharedSets]] = WeakKeyDictionary()


def sets_of(rope: Rope, shape: CacheShape, n: int) -> tuple[SharedSets, bool]:
    """The sets of n slots that all layers of a cache share, found by their rotary table; and whether they are new."""
    known, key = _SETS.setdefault(rope, {}), (shape, n)
    new = key not in known
    return known.setdefault(key, SharedSets(shape, n) if new else known[key]), new


def chosen_of(n: int, share: float) -> int:
    """How many of n choose for themselves."""
    return max(1, round(share * n))


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """How many tokens two layers have in common, flags [B, Q, Hkv, S] each, over all queries and heads -> [B]."""
    return (a & b).flatten(1).sum(1)


def greedy(alike: Tensor, n: int) -> Tensor:
    """Who takes whose: alike [B, N, N], of which i > j count; n of the N take another's -> [B, N], own or earlier.

    The most alike pair first, the later takes the earlier's; who takes is no longer taken from, and those that took
    from it follow it (HShare, greedy sharing, as published).
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
