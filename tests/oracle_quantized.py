"""Slow oracles of KIVI, QuaRot's cache, fp8 and TurboQuant, written from the papers and docs/design.md (section 3), in
loops of numpy.

Nothing here imports kv_methods/, cache/ or kernels/.
"""

from __future__ import annotations

import bisect
import functools

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
    """Powers of two by the parity of common bits; 96 by 12 of the quadratic residues modulo 11, 40 and 80 by 20 of
    those modulo 19."""
    if n in (40, 80, 96):
        q = 11 if n == 96 else 19
        residues, more = {i * i % q for i in range(1, q)}, n // (q + 1)
        h = np.ones((q + 1, q + 1))
        for i in range(q + 1):
            for j in range(q + 1):
                if i == j or i == 0:
                    h[i, j] = 1
                elif j == 0:
                    h[i, j] = -1
                else:
                    h[i, j] = 1 if (i - j) % q in residues else -1
        return np.kron(hadamard(more) * np.sqrt(more), h) / np.sqrt(n)
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / np.sqrt(n)


def kivi(q, k, v, *, k_bits: int, v_bits: int, residual: int, packed: str, shift=0.0) -> np.ndarray:
    """The newest query q [g, D] of one KV head over all of its tokens k, v [n, D], rotated -> [g, D].

    Read as two lists of whole tokens that are walked through from the first token on: a token joins both; when there
    are `residual` keys, all are quantized, 32 tokens of a channel together; when there are more values than that, the
    oldest is, 32 channels together. Published code attends, then does so ("after"); Algorithm 1 does so, then attends.
    shift [n, D] is subtracted from keys before, and added to them again when they are read.
    """
    k = k - shift
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
    return np.array([attention(x, list(keys + shift), list(values)) for x in q])


def quarot(
    q, k, v, *, k_bits: int, v_bits: int, group: int, clip: float, recent: int, sinks: int, shift=0.0
) -> np.ndarray:
    """As `kivi`: keys and values in the turned basis, `group` channels of a token together."""
    h, n = hadamard(k.shape[1]), len(k)
    keys, values = (k - shift) @ h, v @ h
    for t in range(sinks, n - recent):
        for c in range(0, k.shape[1], group):
            keys[t, c : c + group] = through_bits(keys[t, c : c + group], k_bits, clip)
            values[t, c : c + group] = through_bits(values[t, c : c + group], v_bits, clip)
    return np.array([attention(x, list(keys @ h.T + shift), list(values)) @ h.T for x in q])


def e4m3_numbers() -> list[float]:
    """The numbers of e4m3 from 0 up, by their codes: 4 bits of exponent, of bias 7, 3 of mantissa; the last is NaN."""
    return [(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]


def through_e4m3(block: np.ndarray) -> np.ndarray:
    """A block [tokens, D] as it comes back: the nearest numbers, of two the one of the even code."""
    numbers = e4m3_numbers()
    block = block.astype(np.float32)
    scale = np.float32(np.float16(np.abs(block).max() / np.float32(448)))
    out = np.zeros(block.shape)
    for at in np.ndindex(*block.shape):
        x = float(block[at] / scale)
        above = min(bisect.bisect(numbers, abs(x)), len(numbers) - 1)
        gaps = [(abs(abs(x) - numbers[code]), code % 2, numbers[code]) for code in (above - 1, above)]
        out[at] = np.copysign(min(gaps)[2], x) * float(scale)
    return out


def fp8(q, k, v, *, residual: int, shift=0.0) -> np.ndarray:
    """As `kivi`: whenever `residual` tokens are whole, all are coded, blocks of 32, before the newest attends."""
    k = k - shift
    keys, values = k.copy(), v.copy()
    for first in range(0, len(k) // residual * residual, 32):
        at = slice(first, first + 32)
        keys[at], values[at] = through_e4m3(k[at]), through_e4m3(v[at])
    return np.array([attention(x, list(keys + shift), list(values)) for x in q])


@functools.cache
def codebook(d: int, bits: int) -> tuple[float, ...]:
    """Numbers that are the means of their cells, whose borders lie midway: of the density (1 - x^2)^((d - 3) / 2)."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    end = min(1.0, 12 / np.sqrt(d))
    book = np.linspace(-2, 2, 2**bits) / np.sqrt(d)
    for _ in range(3000):
        edges = [-end, *((book[1:] + book[:-1]) / 2), end]
        for i in range(2**bits):
            a, b = edges[i], edges[i + 1]
            x = (a + b) / 2 + (b - a) / 2 * nodes
            f = weights * (1 - x * x) ** ((d - 3) / 2)
            book[i] = (x * f).sum() / f.sum()
    return tuple(book)


def through_codebook(x: np.ndarray, bits: int) -> np.ndarray:
    """A turned vector [D]: its length, and for each coordinate of the unit vector the nearest number."""
    if bits == 16:
        return x
    x = x.astype(np.float32)
    length = float(np.float16(np.sqrt((x.astype(np.float64) ** 2).sum())))
    book = codebook(len(x), bits)
    return np.array([min((abs(c / length - y), y) for y in book)[1] * length for c in x.astype(np.float64)])


def turboquant(
    q, k, v, *, k_bits: int, v_bits: int, recent: int, sinks: int, rotation: np.ndarray, shift=0.0
) -> np.ndarray:
    """As `kivi`, in the turned basis; rotation [D, D] is drawn, so that it is given."""
    keys, values = (k - shift) @ rotation, v @ rotation
    for t in range(sinks, len(k) - recent):
        keys[t], values[t] = through_codebook(keys[t], k_bits), through_codebook(values[t], v_bits)
    keys = keys @ rotation.T + shift
    return np.array([attention(x, list(keys), list(values)) @ rotation.T for x in q])
