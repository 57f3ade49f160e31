"""Slow float64 oracle of OjaKV, one row of a batch, with plain loops over heads, tokens and columns.

Written from the paper and docs/design.md (section 3). Nothing here imports kv_methods/ or kernels/.
"""

from __future__ import annotations

import math

import numpy as np
from oracles import attention, snapkv, softmax


def orthonormal(u: np.ndarray) -> np.ndarray:
    """QR's Q with diag(R) > 0, column by column (Gram-Schmidt, twice): no column can point the other way."""
    out = np.zeros_like(u)
    for c in range(u.shape[1]):
        x = u[:, c].copy()
        for _ in range(2):
            for b in range(c):
                x -= (out[:, b] @ x) * out[:, b]
        out[:, c] = x / np.sqrt(x @ x)
    return out


def oja(u: np.ndarray, xs: list[np.ndarray], eta: float, rule: str) -> np.ndarray:
    """Oja's rule on the tokens `xs` [D], u [D, r], before it is made orthonormal again (Sec. 5.2, Algorithm 1)."""
    if not xs:
        return u
    if rule == "sequential":  # one token after the other, in the order of the text
        for x in xs:
            y = u.T @ x
            u = u + eta / (x @ x) * np.outer(x - u @ y, y)
        return u
    step = np.zeros_like(u)
    energy = np.zeros(u.shape[1])
    for x in xs:
        y = u.T @ x
        step += np.outer(x - u @ y, y)
        energy += y**2
    if rule == "column":  # no column counts for less than 32 tokens of average energy, spread evenly, would bring
        average = sum(x @ x for x in xs) / len(xs)
        return u + eta * step / np.maximum(energy, 32 * average / len(u))
    if rule == "batch":
        return u + eta * step / sum(x @ x for x in xs)
    assert rule == "raw"
    return u + eta * step


def energy_rank(eigenvalues: np.ndarray, share: float) -> int:
    """[heads, D] falling -> the smallest rank that keeps `share` of the energy, the largest of the heads (App. A.2)."""
    largest = 0
    for values in eigenvalues:
        kept, r = 0.0, 0
        while kept < share * values.sum() * (1 - 1e-7):
            kept += values[r]
            r += 1
        largest = max(largest, r)
    return largest


def residual_energy(u: np.ndarray, xs: list[np.ndarray]) -> float:
    """Share of the energy of `xs` outside of the subspace of u (Section 4)."""
    return sum(((x - u @ (u.T @ x)) ** 2).sum() for x in xs) / sum(x @ x for x in xs)


class OjaRow:
    """q [Hq, s, D], k and v [n, s, D]: the prompt alone, rotated; bases [n, D, D], columns by falling eigenvalue."""

    def __init__(self, q, k, v, k_basis, v_basis, *, rank_k, rank_v, adapt, n_start, n_recent, update_every,
                 query_window, important, eta_prefill, eta_decode, rule, stale, keep):  # fmt: skip
        self.n, s, self.D = k.shape
        self.g = len(q) // self.n
        self.adapt, self.T, self.eta, self.rule, self.stale = adapt, update_every, eta_decode, rule, stale
        self.prompt_q, self.prompt_k, self.prompt_v, self.length = q, k, v, s
        self.u = [k_basis[h][:, :rank_k] for h in range(self.n)]
        self.w = [v_basis[h][:, :rank_v] for h in range(self.n)]

        mass = np.zeros(s)  # one set per layer: all heads and queries together, not pooled
        for i, head in enumerate(q):
            for t in range(max(0, s - query_window), s):
                mass[: t + 1] += softmax(k[i // self.g, : t + 1] @ head[t] / math.sqrt(self.D))
        count = min(s, math.ceil(important * s - 1e-6))
        order = sorted(range(s), key=lambda t: -mass[t])
        self.important = sorted(order[:count])
        # how sure the set is: with a tiny margin, float32 may take another token
        self.margin = math.inf if count in (0, s) else (mass[order[count - 1]] - mass[order[count]]) / mass.max()
        if adapt:
            for h in range(self.n):
                self.u[h] = orthonormal(oja(self.u[h], [k[h, t] for t in self.important], eta_prefill, rule))
                self.w[h] = orthonormal(oja(self.w[h], [v[h, t] for t in self.important], eta_prefill, rule))

        self.whole = {t for t in range(s) if t < n_start or t >= s - n_recent}  # stay full-rank
        self.kept = [set(range(s)) for _ in range(self.n)]
        if keep is not None:  # Sec. 7: SnapKV keeps some tokens of the prompt, for each KV head its own
            wanted = math.ceil(keep * s - 1e-6) if isinstance(keep, float) else keep
            for h in range(self.n):
                snap = snapkv(q[h * self.g : (h + 1) * self.g], k[h], query_window)
                rest = sorted((t for t in range(s) if t not in self.whole), key=lambda t, snap=snap: (-snap[t], t))
                self.kept[h] = self.whole | set(rest[: max(0, wanted - len(self.whole))])
        # per head: position -> full key and value, and position -> latents
        self.full = [{t: (k[h, t], v[h, t]) for t in self.whole} for h in range(self.n)]
        self.latent = [
            {t: self.compressed(h, k[h, t], v[h, t]) for t in sorted(self.kept[h] - self.whole)} for h in range(self.n)
        ]
        self.buffer: list[int] = []

    def compressed(self, h, k, v):
        return self.u[h].T @ k, self.w[h].T @ v

    def reconstructed(self, h, latents):
        return self.u[h] @ latents[0], self.w[h] @ latents[1]

    def prefill(self):
        """Causal attention of the prompt over what the bases give back of it, evicted tokens too -> [Hq, s, D]."""
        out = np.zeros_like(self.prompt_q)
        for h in range(self.n):
            pairs = []
            for t in range(self.length):
                pair = self.prompt_k[h, t], self.prompt_v[h, t]
                pairs.append(pair if t in self.whole else self.reconstructed(h, self.compressed(h, *pair)))
            keys, values = [p[0] for p in pairs], [p[1] for p in pairs]
            for i in range(h * self.g, (h + 1) * self.g):
                for t in range(self.length):
                    out[i, t] = attention(self.prompt_q[i, t], keys[: t + 1], values[: t + 1])
        return out

    def append(self, t, k, v):
        """k, v [n, D] of the token at position t, rotated: full rank until the next update."""
        self.buffer.append(t)
        for h in range(self.n):
            self.full[h][t] = k[h], v[h]

    def attend(self, q):
        """q [Hq, D] rotated -> [Hq, D]."""
        out = []
        for h in range(self.n):
            pairs = [*self.full[h].values(), *(self.reconstructed(h, y) for y in self.latent[h].values())]
            keys, values = [p[0] for p in pairs], [p[1] for p in pairs]
            out += [attention(head, keys, values) for head in q[h * self.g : (h + 1) * self.g]]
        return np.stack(out)

    def maintain(self):
        """Every T decoded tokens: one Oja step on them, then they are compressed with the new basis."""
        if len(self.buffer) < self.T:
            return
        for h in range(self.n):
            pairs = [self.full[h].pop(t) for t in self.buffer]
            if self.adapt:
                old_u, old_w = self.u[h], self.w[h]
                self.u[h] = orthonormal(oja(old_u, [k for k, _ in pairs], self.eta, self.rule))
                self.w[h] = orthonormal(oja(old_w, [v for _, v in pairs], self.eta, self.rule))
                if self.stale == "rotate":
                    for t, (y, z) in self.latent[h].items():
                        self.latent[h][t] = self.u[h].T @ (old_u @ y), self.w[h].T @ (old_w @ z)
            for t, (k, v) in zip(self.buffer, pairs, strict=True):
                self.latent[h][t] = self.compressed(h, k, v)
        self.buffer = []
