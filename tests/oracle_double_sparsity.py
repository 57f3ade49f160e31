"""Slow float64 oracle of Double Sparsity and its offload variant, and a probe that sees what a method attends to.

Written from the paper and docs/design.md (section 3), one row and one KV head at a time.
Nothing here imports kv_methods/ or kernels/. The probe needs no knowledge of a method's inside either: it is the values
that tell the tokens apart.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from oracles import attention, softmax

NUDGE = 5e-7  # float32 roundings: what may put a number on the other side of a rounding border


def through_bits(x: np.ndarray, bits: int, fuzz: float) -> np.ndarray:
    """Label [r] quantized and back: one scale and zero for all channels, both fp16. `fuzz` moves what is rounded."""
    if bits == 16:
        return x
    levels = 2**bits - 1
    zero = float(np.float16(x.min() + fuzz))
    scale = float(np.float16(max(0.0, (x.max() - fuzz - zero) / levels)))
    out = np.zeros(len(x))
    for c, value in enumerate(x):
        code = math.floor((value + fuzz - zero) / scale + 0.5) if scale else 0
        out[c] = min(max(code, 0), levels) * scale + zero
    return out


class LabelHead:
    """One row and one KV head. Keys and queries come rotated, slot t holds the token at position t."""

    by = "group"  # what a list is the best of: the sum over the group, its mean "softmax" or its "max"

    def __init__(self, channels: list[int], label_bits: int, budget: int | float, sinks: int, recent: int):
        self.channels, self.bits, self.budget, self.sinks, self.recent = channels, label_bits, budget, sinks, recent
        self.k: list[np.ndarray] = []
        self.v: list[np.ndarray] = []
        self.labels: list[tuple[np.ndarray, np.ndarray]] = []  # [r], and how far float32 may put each channel off

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """k, v [D]. The label cache holds the calibrated channels of every key (Sec. 4.2)."""
        self.k.append(k)
        self.v.append(v)
        x = np.array([k[c] for c in self.channels])
        versions = [through_bits(x, self.bits, f * np.abs(x).max()) for f in (0.0, NUDGE, -NUDGE)]
        self.labels.append((versions[0], np.max(versions, 0) - np.min(versions, 0)))

    def scores(self, q: np.ndarray) -> list[tuple[float, float]]:
        """q [g, D] -> every token's approximate attention (queries summed), and how far float32 may be off."""
        q_sum = np.array([sum(head[c] for head in q) for c in self.channels])
        size = np.array([sum(abs(head[c]) for head in q) for c in self.channels])
        return [(float(q_sum @ x), float(np.abs(q_sum) @ off + 2e-6 * (size @ np.abs(x)))) for x, off in self.labels]

    def joined(self, q: np.ndarray) -> list[tuple[float, float]]:
        """The same as `scores`, of what the queries [g, D] want together, by `by`."""
        if self.by not in ("softmax", "max"):
            return self.scores(q)
        each = [self.scores(x[None]) for x in q]
        if self.by == "max":
            return [(max(s for s, _ in of), max(off for _, off in of)) for of in zip(*each, strict=True)]
        off = max(off for scores in each for _, off in scores) / math.sqrt(q.shape[1])
        weights = [softmax(np.array([s for s, _ in scores]) / math.sqrt(q.shape[1]) + self.held()) for scores in each]
        return [(float(w), float(w) * (2 * off + 1e-5)) for w in sum(weights)]

    def held(self) -> np.ndarray:
        """Logarithm of the tokens that a score stands for."""
        return np.zeros(len(self.k))

    def forced(self) -> set[int]:
        """Sinks and the newest tokens, the current one among them."""
        n = len(self.k)
        return {t for t in range(n) if t < self.sinks or t >= n - self.recent}

    def wanted(self) -> int:
        """Tokens attended in all: the budget at the current length, and no less than what is forced in."""
        n = len(self.k)
        budget = math.ceil(self.budget * n - 1e-6) if isinstance(self.budget, float) else self.budget
        return max(min(budget, n), len(self.forced()))

    def check(self, q: np.ndarray, chosen: list[int], what: str) -> None:
        """`chosen` are the forced tokens and the best of the rest by q [g, D], up to what float32 can tell apart."""
        forced = self.forced()
        assert forced <= set(chosen), f"{what}: {sorted(forced - set(chosen))} must be in, chosen are {chosen}"
        assert len(chosen) == len(set(chosen)) == self.wanted(), f"{what}: {len(chosen)} tokens for {self.wanted()}"
        scores = self.joined(q)
        free = set(chosen) - forced
        left = set(range(len(self.k))) - forced - free
        if free and left:
            worst = min(scores[t][0] + scores[t][1] for t in free)
            best = max(scores[t][0] - scores[t][1] for t in left)
            assert best <= worst, f"{what}: left out a score of {best}, took {worst}"

    def attend(self, q: np.ndarray, chosen: list[int]) -> np.ndarray:
        """Exact attention of q [g, D] over the chosen tokens -> [g, D]."""
        return np.stack([attention(head, [self.k[t] for t in chosen], [self.v[t] for t in chosen]) for head in q])


# ---- seeing what a method attends to ----


def random_keys(seed: int, g: int, h: int, d: int, rows: int, n: int):
    """q [B, Hq, n, D], k and v [B, Hkv, n, D] before rotation, float32: channels have a mean and a spread each."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, heads, n, d, generator=gen) for heads in (g * h, h, h))
    spread = 0.3 + 2 * torch.rand(h, 1, d, generator=gen) ** 3
    return q * 1.5, k * spread + 2 * torch.randn(h, 1, d, generator=gen), v + 0.3 * torch.randn(h, 1, d, generator=gen)


class Probe:
    """Runs a method on rows of random values and, beside them, on the same rows with one-hot values.

    What is attended to does not depend on the values here, and attention is linear in them: a copy of a row in which
    token t has the value e_c gives, in channel c of its output, the weight that t got. D tokens fit into one copy.
    """

    def __init__(self, method, q, k, v, lengths, prefetch=None):
        """q, k, v as of `random_keys`, n tokens per row of which `lengths` [B] are the prompt; q_hat for `prefetch`."""
        self.method, (self.B, _, self.n, self.d) = method, k.shape
        self.copies = self.copies_of(self.n, self.d)
        hot = torch.zeros(self.copies, 1, 1, self.n, self.d, dtype=v.dtype)
        for t in range(self.n):
            hot[t // self.d, :, :, t, t % self.d] = 1
        hot = hot.expand(self.copies, self.B, k.shape[1], self.n, self.d).flatten(0, 1)
        self.q, self.k = (x.repeat(1 + self.copies, 1, 1, 1) for x in (q, k))
        self.q_hat = None if prefetch is None else prefetch.repeat(1 + self.copies, 1, 1, 1)
        self.v, self.lengths = torch.cat((v, hot)), torch.tensor(lengths).repeat(1 + self.copies)
        S, keep = max(lengths), torch.arange(max(lengths)) < self.lengths[:, None]
        # what lies past the end of a prompt may be anything
        prompt = [torch.where(keep[:, None, :, None], x[:, :, :S], 7.0) for x in (self.q, self.k, self.v)]
        method.prefill(*prompt, self.lengths)

    @staticmethod
    def copies_of(n: int, d: int) -> int:
        return -(-n // d)

    @classmethod
    def rows(cls, B: int, n: int, d: int) -> int:
        """The batch that a method under a probe needs."""
        return B * (1 + cls.copies_of(n, d))

    def step(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Decode the i-th token after each prompt -> output [B, Hq, D], weights of all tokens [B, Hq, n]."""
        pos = self.lengths + i
        row = torch.arange(len(pos))
        now = [x[row, :, pos] for x in (self.q, self.k, self.v)]
        if self.q_hat is not None:
            self.method.prefetch(self.q_hat[row, :, pos], pos)
        out = self.method.decode(*now, pos)
        assert out.isfinite().all()
        self.method.maintain(i + 1)
        out = out.double().numpy()
        weights = np.concatenate(np.split(out[self.B :], self.copies), -1)
        return out[: self.B], weights[..., : self.n]


def attended(weights: np.ndarray) -> list[int]:
    """Weights [n] of one head -> the tokens that it sees. A softmax of moderate logits gives no token exactly zero."""
    return [int(t) for t in np.flatnonzero(weights)]
