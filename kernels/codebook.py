"""Codes that stand for the numbers of a codebook, times a scale: Lloyd-Max codes of unit vectors (TurboQuant), e4m3.

A unit vector of D channels, turned at random, is uniform on the sphere: each coordinate has the density
(1 - x^2)^((D - 3) / 2), near a normal one of variance 1 / D, whatever the vector was. The numbers that lose least under
that density are known without any data, and the scale is the length of the vector. fp8 is the same with the numbers of
e4m3 and a scale that maps the largest number of 32 tokens to the largest of e4m3.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from kernels.quantize import FP16_MAX, pack, unpack

E4M3_MAX = 448.0
GRID, ROUNDS = 40001, 2000  # points of the density, and the most rounds of Lloyd's iteration


def lloyd_max(head_dim: int, bits: int) -> Tensor:
    """The 2^bits numbers of least mean square error for a coordinate of a random unit vector of head_dim channels, in
    ascending order: fp32 [2^bits] (TurboQuant, arXiv 2504.19874, eq. 4)."""
    return torch.tensor(_lloyd_max(head_dim, bits), dtype=torch.float32)


@functools.cache  # of numbers: a kept tensor would be a fake one, or one of inference mode, if the first caller's were
def _lloyd_max(head_dim: int, bits: int) -> tuple[float, ...]:
    end = min(1.0, 12 * head_dim**-0.5)  # beyond lies less than 1e-30
    x = np.linspace(-end, end, GRID)
    weight = (1 - x * x) ** ((head_dim - 3) / 2)
    mass, moment = (np.concatenate(([0], np.cumsum((y[1:] + y[:-1]) / 2))) for y in (weight, weight * x))
    book = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass / mass[-1], x)
    for _ in range(ROUNDS):
        edges = np.concatenate(([-end], (book[1:] + book[:-1]) / 2, [end]))
        new = np.diff(np.interp(edges, x, moment)) / np.diff(np.interp(edges, x, mass))
        done, book = np.abs(new - book).max() < 1e-12, new
        if done:
            break
    return tuple((book - book[::-1]) / 2)  # the density is even


def e4m3() -> Tensor:
    """The e4m3 numbers of all bytes, fp32 [256]: 127 and 255 are NaN, and no number is rounded to them."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def quantize_book(x: Tensor, bits: int, book: Tensor, tokens: int = 1) -> tuple[Tensor, Tensor]:
    """x [..., S, D], S a multiple of `tokens` that share a scale -> packed uint8 [..., S, D * bits / 8], scales fp16
    [..., S / tokens, 1].

    With 8 bits the book is e4m3 and the scale is the largest number over 448. Otherwise the book is for unit vectors
    and the scale is the vector's length. Codes are taken against the scale as stored.
    """
    groups = x.float().unflatten(-2, (-1, tokens))
    size = groups.abs().amax((-2, -1)) / E4M3_MAX if bits == 8 else groups.square().sum((-2, -1)).sqrt()
    scale = size.clamp(max=FP16_MAX).half()
    y = (groups / scale.float().clamp(min=1e-8)[..., None, None]).flatten(-3, -2)
    if bits == 8:
        codes = y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.bucketize(y, (book[1:] + book[:-1]) / 2).to(torch.uint8)
    return pack(codes, bits), scale[..., None]


def read_book(packed: Tensor, scale: Tensor, bits: int, book: Tensor, tokens: int = 1) -> Tensor:
    """The inverse, for the first S tokens: packed [..., S, D * bits / 8], scale [..., >= S / tokens, 1] -> fp32
    [..., S, D]."""
    scale = scale.float().repeat_interleave(tokens, -2)[..., : packed.shape[-2], :]
    return book[unpack(packed, bits).int()] * scale
