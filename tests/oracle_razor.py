"""Slow float64 oracle of RazorAttention, one row and one KV head at a time, and the scope of ALiBi heads.

Written from the paper and docs/design.md (section 3). Nothing here imports kv_methods/ or kernels/.
"""

from __future__ import annotations

import math

import numpy as np


def top_heads(scores: np.ndarray, share: float) -> set[tuple[int, int]]:
    """scores [n_layer, Hq] -> (layer, query head) of the share of all heads that score highest, rounded up."""
    ranked = sorted(np.ndindex(scores.shape), key=lambda at: -scores[at])
    return set(ranked[: math.ceil(share * scores.size - 1e-6)])


def protected_heads(induction: np.ndarray, echo: np.ndarray, shares: tuple[float, float], g: int):
    """Two [n_layer, Hq] -> (layer, KV head) kept whole: any query head of its group is one (Sec. 4.1.1)."""
    retrieval = top_heads(induction, shares[0]) | top_heads(echo, shares[1])
    return {(layer, head // g) for layer, head in retrieval}


class RazorHead:
    """Keys and queries come rotated."""

    def __init__(self, k, v, *, protected, sinks, window, share, compensation, full_up_to=0):
        """k, v [n, D]: the prompt of this row alone."""
        self.protected, self.sinks, self.compensation, self.share = protected, sinks, compensation, share
        self.threshold = window  # S_0
        if len(k) <= full_up_to:  # App. A.2: compression starts above 4K tokens
            self.threshold = max(window, full_up_to)
        self.k, self.v = list(k), list(v)

    def append(self, k, v):
        self.k.append(k)
        self.v.append(v)

    def dropped(self) -> list[int]:
        """Neither a sink nor among the last L_h tokens, the current one counted."""
        if self.protected:
            return []
        n = len(self.k)  # Algorithm 1, line 2: "the number of tokens in the head", now
        last = max(self.threshold, math.ceil(self.share * n - 1e-6))
        return [t for t in range(self.sinks, n) if t < n - last]

    def weights(self, q: np.ndarray) -> np.ndarray:
        """One query [D] -> the share of every token in the output [n], eq. 5: a dropped one has 1/N_d of the mean's."""
        gone = self.dropped()
        scale = 1 / math.sqrt(len(q))
        logits = {t: q @ self.k[t] * scale for t in range(len(self.k)) if t not in set(gone)}
        if gone and self.compensation:
            mean = sum(self.k[t] for t in gone) / len(gone)  # eq. 4
            logits[-1] = q @ mean * scale + math.log(len(gone))
        top = max(logits.values())
        total = sum(math.exp(x - top) for x in logits.values())
        out = np.zeros(len(self.k))
        for t, x in logits.items():
            for at in gone if t < 0 else [t]:
                out[at] = math.exp(x - top) / total / (len(gone) if t < 0 else 1)
        return out

    def attend(self, q: np.ndarray) -> np.ndarray:
        """q [g, D] -> [g, D]."""
        return np.stack([sum(w * v for w, v in zip(self.weights(head), self.v, strict=True)) for head in q])


# ---- ALiBi, Section 3.1 ----


def normalized(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray | None) -> np.ndarray:
    """x [n, dim] through RMSNorm (beta None) or LayerNorm."""
    out = []
    for row in x:
        if beta is not None:
            row = row - row.mean()
        row = row / math.sqrt((row @ row) / len(row))
        out.append(gamma * row + (0 if beta is None else beta))
    return np.array(out)


def alibi_weights(q: np.ndarray, k: np.ndarray, slope: float, scale: float) -> np.ndarray:
    """q, k [n, D] -> causal attention [n, n] with the bias -slope * distance, eq. 1."""
    n = len(q)
    out = np.zeros((n, n))
    for m in range(n):
        logits = np.array([q[m] @ k[j] * scale - slope * (m - j) for j in range(m + 1)])
        e = np.exp(logits - logits.max())
        out[m, : m + 1] = e / e.sum()
    return out
