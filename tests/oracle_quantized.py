"""Slow oracles of KIVI and of QuaRot's cache, written from the papers and docs/design.md (section 3): loops in numpy.

Nothing here imports kv_methods/, cache/ or kernels/.
"""

from __future__ import annotations

import numpy as np
from oracles import attention


def through_bits(x: np.ndarray, bits: int, clip: float = 1.0) -> np.ndarray:
    """One group, as it comes back: codes of float32 numbers against a scale and a zero in fp16."""
    if bits == 16:
        return x
    f, levels = np.float32, 2**bits - 1
    x = x.astype(f)
    zero = np.float16(x.min() * f(clip))
    scale = np.float16((x.max() * f(clip) - f(zero)) / f(levels))
    step = max(f(scale), f(1e-8))
    codes = np.clip(np.round((x - f(zero)) / step), 0, levels)
    return (codes * f(scale) + f(zero)).astype(np.float64)


def hadamard(n: int) -> np.ndarray:
    """Powers of two by the parity of common bits; 96 by 12 of the quadratic residues modulo 11."""
    if n == 96:
        h = np.ones((12, 12))
        for i in range(12):
            for j in range(12):
                if i == j or i == 0:
                    h[i, j] = 1
                elif j == 0:
                    h[i, j] = -1
                else:
                    h[i, j] = 1 if (i - j) % 11 in (1, 3, 4, 5, 9) else -1
        return np.kron(hadamard(8) * np.sqrt(8), h) / np.sqrt(n)
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / np.sqrt(n)


def kivi(q, k, v, *, k_bits: int, v_bits: int, residual: int, packed: str) -> np.ndarray:
    """The newest query q [g, D] of one KV head over all of its tokens k, v [n, D], rotated -> [g, D].

    Read as two lists of whole tokens that are walked through from the first token on: a token joins both; when there
    are `residual` keys, all are quantized, 32 tokens of a channel together; when there are more values than that, the
    oldest is, 32 channels together. Published code attends, then does so ("after"); Algorithm 1 does so, then attends.
    """
    n, D = k.shape
    keys, values, whole_keys, whole_values = k.copy(), v.copy(), [], []
    for t in range(n):
        whole_keys.append(t)
        whole_values.append(t)
        if packed == "after" and t == n - 1:
            break  # this token attends first
        if len(whole_keys) == residual:
            for i, c in np.ndindex(residual // 32, D):
                at = whole_keys[32 * i : 32 * i + 32]
                keys[at, c] = through_bits(k[at, c], k_bits)
            whole_keys = []
        if len(whole_values) > residual:
            old = whole_values.pop(0)
            for c in range(0, D, 32):
                values[old, c : c + 32] = through_bits(v[old, c : c + 32], v_bits)
    return np.array([attention(x, list(keys), list(values)) for x in q])


def quarot(q, k, v, *, k_bits: int, v_bits: int, group: int, clip: float, recent: int, sinks: int) -> np.ndarray:
    """As `kivi`: keys and values in the turned basis, `group` channels of a token together."""
    h, n = hadamard(k.shape[1]), len(k)
    keys, values = k @ h, v @ h
    for t in range(sinks, n - recent):
        for c in range(0, k.shape[1], group):
            keys[t, c : c + group] = through_bits(keys[t, c : c + group], k_bits, clip)
            values[t, c : c + group] = through_bits(values[t, c : c + group], v_bits, clip)
    return np.array([attention(x @ h, list(keys), list(values)) @ h.T for x in q])
