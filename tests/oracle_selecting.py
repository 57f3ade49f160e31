"""Slow float64 oracles of Quest, SparQ, Loki and of budgets of p, from the papers and docs/design.md, section 3.

One row and one KV head at a time, loops in numpy. Nothing here imports kv_methods/ or kernels/.
"""

from __future__ import annotations

import math

import numpy as np
from oracle_double_sparsity import LabelHead
from oracles import softmax

NEAR = 3e-6  # what float32 may be off by, as a share of the sizes summed


class Head(LabelHead):
    """Keys and queries come rotated, slot t holds the token at position t."""

    def __init__(self, budget, sinks, recent, **knobs):
        self.budget, self.sinks, self.recent, self.knobs = budget, sinks, recent, knobs
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def append(self, k, v):
        self.k.append(k)
        self.v.append(v)


class LokiHead(Head):
    """basis [D, D] of this head, components in columns by falling variance."""

    def coordinates(self, x):
        return np.array([x @ self.knobs["basis"][:, j] for j in range(self.knobs["dims"])])

    def scores(self, q):
        total, size = sum(self.coordinates(x) for x in q), sum(np.abs(x).sum() for x in q)
        return [(float(total @ self.coordinates(k)), NEAR * size * np.abs(k).max()) for k in self.k]


class SparqHead(Head):
    def channels(self, q):
        """The r largest of the group's summed |q| (SparQ, grouped as in the published code)."""
        size = [sum(abs(x[c]) for x in q) for c in range(q.shape[1])]
        return sorted(range(len(size)), key=lambda c: -size[c])[: self.knobs["channels"]]

    def estimates(self, q):
        """The approximate logits of each query head, [g][n]."""
        at = self.channels(q)
        out = []
        for x in q:
            scale = math.sqrt(len(x) * sum(abs(x[c]) for c in at) / sum(abs(c) for c in x))
            out.append([sum(x[c] * k[c] for c in at) / scale for k in self.k])
        return out

    def scores(self, q):
        each = self.estimates(q)
        return [(sum(e[t] for e in each), NEAR * 10 * sum(1 + abs(e[t]) for e in each)) for t in range(len(self.k))]

    def attend(self, q, chosen):
        exact = super().attend(q, chosen)
        if not self.knobs["mean_value"]:
            return exact
        mean, out = sum(self.v) / len(self.v), []
        for y, logits in zip(exact, self.estimates(q), strict=True):
            alpha = softmax(np.array(logits))[chosen].sum()
            out.append(alpha * y + (1 - alpha) * mean)
        return np.stack(out)


class QuestHead(Head):
    """`page` tokens a page. The page of the current token, and those of forced tokens, are in."""

    def pages(self):
        page = self.knobs["page"]
        return [range(a, min(a + page, len(self.k))) for a in range(0, len(self.k), page)]

    def bound(self, x, tokens):
        """No key of the page has an inner product with x above it."""
        total = 0.0
        for c in range(len(x)):
            column = [self.k[t][c] for t in tokens]
            total += max(x[c] * bound for bound in (min(column), max(column)))
        return total

    def scores(self, q):
        size = NEAR * sum(np.abs(x).sum() for x in q) * max(np.abs(k).max() for k in self.k)
        return [(sum(self.bound(x, tokens) for x in q), size / 2) for tokens in self.pages()]

    def held(self):
        return np.log([len(tokens) for tokens in self.pages()])

    def check(self, q, chosen, what):
        page, pages = self.knobs["page"], self.pages()
        taken = {t // page for t in chosen}
        assert sorted(t for p in taken for t in pages[p]) == sorted(chosen), f"{what}: {chosen} are no whole pages"
        n = len(self.k)
        budget = math.ceil(self.budget * n - 1e-6) if isinstance(self.budget, float) else min(self.budget, n)
        # beside the current page as many full ones as the newest tokens may reach into
        reach = 1 + math.ceil((self.recent - 1) / page)
        forced = {p for p in range(len(pages)) if p < math.ceil(self.sinks / page) or p >= len(pages) - reach}
        assert forced <= taken, f"{what}: pages {forced} must be in, chosen are {taken}"
        assert len(taken) == max(math.ceil(budget / page), len(forced)), f"{what}: {len(taken)} pages"
        free, left = taken - forced, set(range(len(pages))) - taken
        if free and left:
            scores = self.joined(q)
            worst = min(scores[p][0] + scores[p][1] for p in free)
            best = max(scores[p][0] - scores[p][1] for p in left)
            assert best <= worst, f"{what}: left out a page of {best}, took {worst}"


def fewest(weights, p, forced, cap):
    """How many tokens: the forced ones, then by falling weight until p is reached; no more than cap."""
    taken, total = len(forced), sum(weights[t] for t in forced)
    for w in sorted((w for t, w in enumerate(weights) if t not in forced), reverse=True):
        if p < 1 and total >= p or taken >= cap:
            break
        taken, total = taken + 1, total + w
    return taken
