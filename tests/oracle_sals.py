"""Slow float64 oracle of SALS (Mu et al. 2025), one row of a batch, with plain loops over tokens and heads.

Written from the paper and docs/design.md (section 3). Nothing here imports kv_methods/ or kernels/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from oracles import attention, rotate, softmax


def through_bits(x: np.ndarray, bits: int, fuzz: float) -> np.ndarray:
    """Vector [D] quantized and back: 32 channels share a scale and a zero, both fp16, asymmetric; 16 bits: as it is.

    `fuzz` moves everything that is rounded by that much, to see whether float32 could round the other way.
    """
    if bits == 16:
        return x
    out, levels = np.zeros(len(x)), 2**bits - 1
    for c in range(0, len(x), 32):
        part = x[c : c + 32]
        zero = float(np.float16(part.min() + fuzz))
        scale = float(np.float16(max(0.0, part.max() - fuzz - zero) / levels))
        for i, value in enumerate(part):
            code = math.floor((value + fuzz - zero) / scale + 0.5) if scale else 0
            out[c + i] = min(max(code, 0), levels) * scale + zero
    return out


def ratio_of(share: float, whole: int) -> int:
    """A share of a size, to the nearest integer, at least one."""
    return max(1, math.floor(share * whole + 0.5))


@dataclass
class Token:
    latent: np.ndarray  # the leading coordinates that are still there
    value: np.ndarray  # [n, D], as it comes back from its bits
    key: np.ndarray  # [n, D], reconstructed and rotated at its own position


class SalsRow:
    """Everything comes before rotation. k and v [n, s, D]: the prompt alone, no padding; basis [n * D, n * D], columns
    by falling eigenvalue. `nudge`: the share of a value by which its rounding is moved (float32's own error)."""

    def __init__(self, k, v, basis, *, rank, score_rank, value_bits, budget, sinks, recent, score, budget_of="all",
                 nudge=0.0):  # fmt: skip
        self.n, s, self.D = k.shape
        self.basis, self.bits, self.nudge = basis, value_bits, nudge
        self.budget, self.sinks, self.recent, self.score = budget, sinks, recent, score
        self.budget_of = budget_of
        width = self.n * self.D
        self.r = ratio_of(rank, width)
        self.r_star = ratio_of(score_rank, self.r)  # Sec. 4.3; 0.5 r in Sec. 5.1
        # Sec. 5.1: "tokens in the most recent window are compressed by only 50%"
        self.r_recent, self.bits_recent = max(self.r, ratio_of(0.5, width)), max(8, value_bits)
        self.tokens: list[Token] = []
        for t in range(s):
            in_window = t >= s - recent
            width_t, bits_t = (self.r_recent, self.bits_recent) if in_window else (self.r, self.bits)
            self.tokens.append(self.stored(t, self.project(k[:, t], width_t), v[:, t], bits_t))

    def project(self, x, coordinates):
        """Vector [n, D] of all heads jointly -> its leading latent coordinates, Sec. 4.2."""
        flat = np.concatenate(list(x))
        return np.array([flat @ self.basis[:, c] for c in range(coordinates)])

    def stored(self, t, latent, value, bits):
        flat = np.zeros(self.n * self.D)
        for c, y in enumerate(latent):
            flat += y * self.basis[:, c]  # Algorithm 1, line 6
        key = np.stack([rotate(flat[h * self.D : (h + 1) * self.D], t) for h in range(self.n)])  # line 7
        back = np.stack([through_bits(value[h], bits, self.nudge * np.abs(value[h]).max()) for h in range(self.n)])
        return Token(latent, back, key)

    def append(self, k, v):
        """One token, k and v [n, D], into the recent window; the one that leaves it drops to the target ratio."""
        t = len(self.tokens)
        self.tokens.append(self.stored(t, self.project(k, self.r_recent), v, self.bits_recent))
        leaves = t - self.recent
        if leaves >= 0:
            old = self.tokens[leaves]
            self.tokens[leaves] = self.stored(leaves, old.latent[: self.r], old.value, self.bits)

    def scores(self, q):
        """q [Hq, D] at the newest token -> one score per token, on the first r* coordinates, not rotated."""
        g = len(q) // self.n
        queries = []
        if self.score == "sum":  # sum over h of q_h . k_g(h) = (sum of the group's queries) . k
            queries.append(np.stack([q[h * g : (h + 1) * g].sum(0) for h in range(self.n)]))
        else:
            for i, head in enumerate(q):
                alone = np.zeros((self.n, self.D))
                alone[i // g] = head
                queries.append(alone)
        total = np.zeros(len(self.tokens))
        for query in queries:
            y = self.project(query, self.r_star)
            raw = np.array([y @ token.latent[: self.r_star] for token in self.tokens])
            total += raw if self.score == "sum" else softmax(raw / math.sqrt(self.D))
        return total

    def forced(self):
        """Sinks and the recent window, always attended."""
        newest = len(self.tokens) - 1
        return {t for t in range(newest + 1) if t < self.sinks or t > newest - self.recent}

    def wanted(self):
        """How many tokens are attended in all."""
        s = len(self.tokens)
        if self.budget_of == "rest":  # Sec. 5.2: "keep the most recent 128 and decode the remaining at 1/4"
            left = s - len(self.forced())
            share = math.ceil(self.budget * left - 1e-6) if isinstance(self.budget, float) else self.budget
            return len(self.forced()) + min(left, share)
        asked = math.ceil(self.budget * s - 1e-6) if isinstance(self.budget, float) else self.budget
        return min(s, max(asked, len(self.forced())))

    def attend(self, q, chosen):
        """Exact attention over `chosen` positions, eq. 5: q [Hq, D] -> [Hq, D]."""
        g, at = len(q) // self.n, len(self.tokens) - 1
        out = []
        for i, head in enumerate(q):
            keys = [self.tokens[t].key[i // g] for t in chosen]
            values = [self.tokens[t].value[i // g] for t in chosen]
            out.append(attention(rotate(head, at), keys, values))
        return np.stack(out)


def memory_access(rank: float, sparsity: float, layers: int, dense_layers: int, score_share: float = 0.5) -> float:
    """The paper's memory-access column, Sec. 4.5: (s r* + 2 k r) / 2 s d, of which the dense layers score nothing.

    It counts neither the quantizer's scales and zeros nor the half-compressed window nor the projection matrix.
    """
    sparse = score_share * rank / 2 + sparsity * rank
    return ((layers - dense_layers) * sparse + dense_layers * rank) / layers
