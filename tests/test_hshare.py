"""HShare against a float64 simulation of a whole cache: who takes whose sets, and what every layer attends to."""

from __future__ import annotations

import pytest
import torch

from cache.base import connected
from cache.calibration import Calibration
from cache.spec import make_args, method_class
from kv_methods.hshare import chosen_of, greedy
from model import ModelArgs

L, H, G, D, R = 4, 4, 2, 32, 8  # layers, KV heads, queries of a group, head_dim, label channels
KNOBS = dict(
    budget=20, sinks=3, recent=6, layer_ratio=0.5, head_ratio=0.5, steps=3, queries=4, channels=R, label_bits=16
)


def channels():
    gen = torch.Generator().manual_seed(0)
    return {f"layers.{i}.channels.{kind}": torch.rand(H, D, generator=gen).argsort(-1)
            for i in range(L) for kind in ("qk", "q", "k")}  # fmt: skip


class Row:
    """One row of a cache of L layers, q [L, Hq, n, D] and k [L, Hkv, n, D] rotated."""

    def __init__(self, q, k, length, budget, sinks, recent, layer_ratio, head_ratio, steps, queries, **_):
        self.q, self.k, self.budget, self.sinks, self.recent, self.steps = (
            q.double(), k.double(), budget, sinks, recent, steps,
        )  # fmt: skip
        self.kept = [channels()[f"layers.{i}.channels.qk"][:, :R] for i in range(L)]
        told = [
            [[self.critical(i, h, length - 1 - back) for h in range(H)] for back in range(queries)] for i in range(L)
        ]
        heads_of = [[[sum(len(t[a] & t[b]) for t in told[i]) for b in range(H)] for a in range(H)] for i in range(L)]
        self.heads = [self.pairs(x, round(head_ratio * H)) for x in heads_of]
        layers_of = [[sum(len(x[h] & y[h]) for x, y in zip(told[a], told[b], strict=True) for h in range(H))
                      for b in range(L)] for a in range(L)]  # fmt: skip
        self.layers = self.pairs(layers_of, round(layer_ratio * L))
        self.sets = [told[i][0] for i in range(L)]
        self.first = max(0, length - recent)

    def critical(self, i, h, p):
        """Sinks and the best tokens older than the recent ones, by the group's sum over the kept channels."""
        older = range(max(0, p - self.recent + 1))
        at = self.kept[i][h]
        total = self.q[i, h * G : h * G + G, p][:, at].sum(0)
        scores = {t: float(total @ self.k[i, h, t, at]) for t in older if t >= self.sinks}
        n = max(0, min(self.budget, p + 1) - self.recent - min(self.sinks, len(older)))
        return {t for t in older if t < self.sinks} | set(sorted(scores, key=lambda t: -scores[t])[:n])

    @staticmethod
    def pairs(alike, keep):
        """Greedily the most alike pair, the later takes the earlier's set, until `keep` choose for themselves."""
        n, source, gone = len(alike), list(range(len(alike))), set()
        for _ in range(n - keep):
            i, j = max(
                ((a, b) for a in range(n) for b in range(a) if not {a, b} & gone), key=lambda x: alike[x[0]][x[1]]
            )
            gone.add(i)
            source = [j if s == i else s for s in source]
        return source

    def step(self, p):
        """The tokens of every layer and head."""
        if (p + 1) % self.steps == 0:
            self.first = max(0, p + 1 - self.recent)
            for i in range(L):
                mine = [self.critical(i, self.heads[i][h], p) for h in range(H)]
                self.sets[i] = mine if self.layers[i] == i else self.sets[self.layers[i]]
        return [[s | set(range(self.first, p + 1)) for s in sets] for sets in self.sets]


def cache(knobs, B, T):
    cls, args = method_class("hshare"), ModelArgs(n_head=G * H, n_kv_head=H, head_dim=D, n_layer=L)
    rope, calib = args.rotary(B, T), Calibration(channels(), L)
    return connected(
        cls(make_args(cls, knobs), args.cache_shape(i, B, T, torch.float32, "cpu"), i, rope, calib) for i in range(L)
    )


def compare(knobs, lengths=(5, 40, 61), steps=14):
    gen, B, n = torch.Generator().manual_seed(1), len(lengths), max(lengths) + steps
    # layers and heads resemble each other, more or less: ties of the greedy choice are unlikely
    base = torch.randn(1, B, H, n, D, generator=gen)
    k = base + 0.7 * torch.randn(L, B, H, n, D, generator=gen)
    q = torch.randn(L, B, G * H, n, D, generator=gen) + base.repeat_interleave(G, 2)
    methods, length = cache(knobs, B, n), torch.tensor(lengths)
    S = max(lengths)
    for i, method in enumerate(methods):
        method.compress(q[i, :, :, :S], k[i, :, :, :S], k[i, :, :, :S], length)
    rows = [Row(q[:, b], k[:, b], lengths[b], **knobs) for b in range(B)]
    row, shared = torch.arange(B), 0
    for step in range(steps):
        pos = length + step
        want = [rows[b].step(int(pos[b])) for b in range(B)]
        for i, method in enumerate(methods):
            method.append(k[i][row, :, pos], k[i][row, :, pos], pos)
            idx, count = method.select(q[i][row, :, pos], pos)
            for b in range(B):
                for h in range(H):
                    got = idx[b, h, : count[b, h]].tolist()
                    assert len(got) == len(set(got)) and set(got) == want[b][i][h], f"step {step} layer {i} row {b} {h}"
            shared += sum(r.layers[i] != i for r in rows)
    return shared


@pytest.mark.parametrize(
    "knobs", [{}, dict(layer_ratio=1.0, head_ratio=1.0, steps=1), dict(head_ratio=0.25, steps=2)], ids=str
)
def test_equals_the_simulation(knobs):
    assert (compare(KNOBS | knobs) > 0) == ((KNOBS | knobs)["layer_ratio"] < 1)


def test_the_published_order_of_taking():
    """The most alike pair first; who took from one that takes follows it."""
    alike = torch.zeros(1, 4, 4)
    alike[0, 3, 2], alike[0, 2, 0], alike[0, 1, 0] = 9, 8, 1
    assert greedy(alike, 1).tolist() == [[0, 1, 2, 2]]
    assert greedy(alike, 2).tolist() == [[0, 1, 0, 0]]
    assert greedy(alike, 3).tolist() == [[0, 0, 0, 0]]
    assert [chosen_of(32, x) for x in (0.75, 0.5, 0.0)] == [24, 16, 1]
