"""Hadamard matrices: orthogonal, all entries of one size, so that a product spreads a large channel over all."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _first_factor(n: int) -> tuple[int, int] | None:
    """The least m with n = 2^k m, where m = 1 or q + 1 with a prime q = 3 mod 4 (Paley); None: there is none."""
    m = n & -n  # the power of two in n
    odd = n // m
    for power in range(m.bit_length()):
        size = odd << power
        q = size - 1
        if size == 1 or (q % 4 == 3 and all(q % i for i in range(2, int(q**0.5) + 1))):
            return size, n // size
    return None


def has_hadamard(n: int) -> bool:
    """Whether `hadamard_matrix` has one: for every multiple of 32 up to 1024, for 12, 20, 40, 80, but not for 28."""
    return _first_factor(n) is not None


def hadamard_matrix(n: int) -> Tensor:
    """Normalized, fp32 [n, n], H @ H.T = 1: Paley's first construction, doubled as Sylvester does.

    A head of 96 channels takes the product of the matrix of 12 and that of 8. Raises ValueError if none is known.
    """
    factors = _first_factor(n)
    if factors is None:
        raise ValueError(f"no Hadamard matrix of {n} is known here")
    m, doubled = factors
    h = torch.ones(1, 1, dtype=torch.float64)
    if m > 1:
        q = m - 1
        residue = torch.full((q,), -1.0, dtype=torch.float64)  # Legendre symbol
        residue[torch.arange(1, q) ** 2 % q] = 1
        residue[0] = 0
        at = torch.arange(q)
        skew = torch.zeros(m, m, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0] = 1, -1
        skew[1:, 1:] = residue[(at[:, None] - at) % q]
        h = skew + torch.eye(m, dtype=torch.float64)
    while doubled > 1:
        h, doubled = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1))), doubled // 2
    return (h * n**-0.5).float()
