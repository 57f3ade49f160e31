"""Slow float64 oracles of the methods, written from the papers and docs/design.md (section 3): plain loops in numpy.

Nothing here imports kv_methods/ or kernels/: what the two sides share is the text they were written from.
"""

from __future__ import annotations

import math

import numpy as np


def rotate(x: np.ndarray, pos: int, theta: float = 10_000.0) -> np.ndarray:
    """Rotary embedding in halves (Hugging Face layout) of vectors x [..., D] at one position."""
    half = x.shape[-1] // 2
    angle = pos / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), -1)


def rotated(rope, x) -> np.ndarray:
    """Tensors x [B, H, n, D] at positions 0..n-1 -> float64. Float32's own rotation, whose angles are good to 1e-5."""
    got = rope.rotate_prompt(x).double().numpy()
    want = np.stack([rotate(x[:, :, t].double().numpy(), t) for t in range(x.shape[2])], 2)
    assert np.abs(got - want).max() < 3e-4
    return got


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """One query [D] over lists of [D] vectors."""
    p = softmax(np.array([q @ k for k in keys]) / math.sqrt(len(q)))
    return sum(w * v for w, v in zip(p, values, strict=True))


def causal_attention(q, k, v, window=None):
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] (rotated) -> [B, Hq, S, D], one query at a time."""
    out, g = np.zeros_like(q), q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(q.shape[:3]):
        first = 0 if window is None else max(0, i - window + 1)
        out[b, h, i] = attention(q[b, h, i], list(k[b, h // g, first : i + 1]), list(v[b, h // g, first : i + 1]))
    return out


def snapkv(q: np.ndarray, k: np.ndarray, window: int = 32, pool: int = 7) -> np.ndarray:
    """q [g, n, D] of one KV head's group, k [n, D], rotated, one prompt -> pooled scores [n]."""
    n, mass = len(k), np.zeros(len(k))
    for head in q:
        for i in range(max(0, n - window), n):
            mass[: i + 1] += softmax(k[: i + 1] @ head[i] / math.sqrt(k.shape[1]))
    return np.array([mass[max(0, t - pool // 2) : t + pool // 2 + 1].max() for t in range(n)])


def check_top(scores: dict[int, float], chosen: list[int], n: int, tol: float, what: str) -> None:
    """`chosen` are n keys of `scores` that score highest, up to near ties: nobody left out beats the worst by > tol."""
    assert len(chosen) == len(set(chosen)) == n, f"{what}: {len(set(chosen))} distinct of {len(chosen)}, expected {n}"
    assert set(chosen) <= set(scores), f"{what}: {sorted(set(chosen) - set(scores))} may not be chosen"
    if 0 < n < len(scores):
        worst, best_left = min(scores[t] for t in chosen), max(s for t, s in scores.items() if t not in set(chosen))
        assert best_left <= worst + tol, f"{what}: left out {best_left}, took {worst}"


class SelfIndexHead:
    """Self-Indexing KVCache of one row and one KV head. Positions are those of the text; keys come rotated.

    `nudge` shifts what is rounded by that share of the numbers it was computed from. Where a value lies so near to a
    rounding border that float32 and float64 may disagree, runs with +nudge and -nudge differ: by how much it matters.
    """

    def __init__(self, q, k, v, *, budget, sinks_in_budget, sinks, center, sink_queries, sinks_in_index,
                 store_bits, sign_in_quant, retrieval, heads, keep_decoded, tail, flush, max_seq_len,
                 nudge=0.0, sink_set=None):  # fmt: skip
        """q [g, n, D], k and v [n, D]: the prompt of this row alone, without padding. sink_set: instead of its own."""
        self.bits, self.sign_in_quant, self.tail, self.flush = store_bits, sign_in_quant, tail, flush
        self.budget, self.sinks, self.nudge, self.prompt = budget, min(sinks, max_seq_len), nudge, len(k)
        self.retrieval, self.sinks_in_budget, self.keep_decoded = retrieval, sinks_in_budget, keep_decoded
        self.heads = heads
        if sinks_in_budget is None:  # LongBench: 160 are 64 + 96; published code: int(0.075 * (L - 64)) beside 64
            self.sinks_in_budget = isinstance(budget, int)
        self.snapkv = dict(enumerate(snapkv(q, k, sink_queries)))
        ranked = sorted(self.snapkv, key=lambda t: -self.snapkv[t])
        self.sink_set: list[int] = ranked[: self.sinks] if sink_set is None else sink_set
        D = k.shape[1]
        self.mean = k.mean(0) if center == "mean" else np.sort(k, 0)[(len(k) - 1) // 2]  # eq. 5, published code
        self.k = [x - self.mean for x in k]  # exact, centred
        self.v = list(v)
        # which keys make codebook and alpha: the paper's K, or those that are compressed (published code)
        indexed = [t for t in range(len(k)) if sinks_in_index or t not in self.sink_set] or list(range(len(k)))
        magnitude = np.abs(np.array([self.k[t] for t in indexed]))
        self.alpha = magnitude.max(0)  # eq. 12
        # A channel that is (nearly) constant in a short prompt would blow up the tokens decoded later: a floor of a
        # thousandth of the head's largest key, before centring.
        self.alpha = np.maximum(self.alpha, 1e-3 * max(np.abs(k[t]).max() for t in indexed))
        cells: dict[tuple[int, tuple], list[np.ndarray]] = {}
        for x in (self.k[t] for t in indexed):
            for c in range(0, D, 4):
                cells.setdefault((c, self.pattern(x[c : c + 4])), []).append(x[c : c + 4])
        self.centroids = {cell: sum(xs) / len(xs) for cell, xs in cells.items()}  # eq. 4
        self.mean_magnitude = magnitude.mean(0)
        self.store = [self.compressed(x, y) for x, y in zip(self.k, self.v, strict=True)]
        self.flushed = 0

    @staticmethod
    def pattern(x):
        return tuple(1.0 if c >= 0 else -1.0 for c in x)

    def centroid(self, x):
        """What the index knows of key x [D]: a centroid for every 4 channels."""
        if self.retrieval == "sign":
            return np.array(self.pattern(x))
        parts = []
        for c in range(0, len(x), 4):
            signs = self.pattern(x[c : c + 4])
            empty = np.array(signs) * self.mean_magnitude[c : c + 4]
            parts.append(self.centroids.get((c, signs), empty))
        return np.concatenate(parts)

    def quantized(self, x, fuzz):
        """Through `bits` bits and back, eq. 9-11: 32 channels share scale and zero, both rounded to fp16."""
        out, levels = [], 2**self.bits - 1
        for c in range(0, len(x), 32):
            part, f = x[c : c + 32], fuzz[c : c + 32]
            zero = float(np.float16((part + f).min()))
            scale = float(np.float16(max(0.0, ((part - f).max() - zero) / levels)))
            code = np.floor((part + f - zero) / scale + 0.5) if scale else np.zeros(len(part))
            out.append(np.clip(code, 0, levels) * scale + zero)
        return np.concatenate(out)

    def compressed(self, x, v):
        """-> (index vector, key, value) as they come back from the compressed store."""
        if self.bits == 16:
            return self.centroid(x), x, v
        scaled = x / self.alpha
        fuzz = self.nudge * (np.abs(x) + np.abs(self.mean) + self.alpha) / self.alpha
        if self.sign_in_quant:
            key = self.quantized(np.abs(scaled), fuzz) * np.array(self.pattern(x)) * self.alpha  # eq. 13
        else:
            key = self.quantized(scaled, fuzz) * self.alpha
        return self.centroid(x), key, self.quantized(v, np.full(len(v), self.nudge * np.abs(v).max()))

    def append(self, k, v):
        self.k.append(k - self.mean)
        self.v.append(v)

    def scores(self, q):
        """Group-mean of q [g, D] against every stored token that is no sink, and not attended to anyway."""
        skip = {*self.sink_set, *self.always()}
        rivals = [(t, entry[0]) for t, entry in enumerate(self.store) if t not in skip]
        if self.heads == "mean" or not rivals:
            return {t: float(q.mean(0) @ x) for t, x in rivals}
        each = np.array([[head @ x for _, x in rivals] for head in q])
        if self.heads == "max":
            joined = each.max(0)
        else:
            joined = np.mean([softmax(logits / math.sqrt(q.shape[1])) for logits in each], 0)
        return {t: float(s) for (t, _), s in zip(rivals, joined, strict=True)}

    def always(self):
        """Decoded tokens of the store that are attended to whatever they score."""
        return list(range(self.prompt, len(self.store))) if self.keep_decoded else []

    def wanted(self, available):
        """How many of the available tokens the budget leaves: 160 is 64 + 96 whatever the prompt."""
        if isinstance(self.budget, int):
            want = self.budget - (self.sinks if self.sinks_in_budget else 0)
        elif self.sinks_in_budget:
            want = math.ceil(self.budget * len(self.k) - 1e-6) - len(self.sink_set)
        else:
            want = math.floor(self.budget * available + 1e-6)
        return min(max(want, 0), available)

    def attend(self, q, chosen):
        """q [g, D]; chosen: stored positions -> [g, D]."""
        recent = range(self.prompt + self.flushed, len(self.k))  # decoded tokens not flushed: always attended
        stored = [*chosen, *self.always()]
        keys = [self.k[t] for t in self.sink_set] + [self.store[t][1] for t in stored] + [self.k[t] for t in recent]
        values = [self.v[t] for t in self.sink_set] + [self.store[t][2] for t in stored] + [self.v[t] for t in recent]
        return np.stack([attention(head, keys, values) for head in q])

    def maintain(self):
        """Once `tail` decoded tokens are held, the oldest `flush` of them move to the store."""
        if len(self.k) - self.prompt - self.flushed >= self.tail:
            first = self.prompt + self.flushed
            self.store += [self.compressed(self.k[t], self.v[t]) for t in range(first, first + self.flush)]
            self.flushed += self.flush


def streaming(q, k, v, pos: int, sinks: int, recent: int, positions: str, window: int | None = None) -> np.ndarray:
    """q [g, D] at `pos`, k and v [pos + 1, D], none of them rotated: the first tokens and the last ones, of those in
    the model's window -> [g, D]."""
    seen = range(max(0, pos - window + 1) if window else 0, pos + 1)
    kept = [t for t in seen if t < sinks or t > pos - recent]
    if pos < sinks + recent and not window:
        assert kept == list(range(pos + 1))
    place = {t: rank if positions == "cache" else t for rank, t in enumerate(kept)}
    keys = [rotate(k[t], place[t]) for t in kept]
    return np.stack([attention(rotate(head, place[pos]), keys, [v[t] for t in kept]) for head in q])
