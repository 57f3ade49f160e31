"""Keys in a latent space that all KV heads of a layer share: scores there, and attention over tokens expanded from it.

A GPU kernel has two passes to fuse: `latent_score`, and all of `latent_attention`, which never needs the expanded keys
in memory. A head's slice of the basis is [r, D], and a rotation in halves is two products, with its first and second
D / 2 columns, combined in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dense_attention import masked_attention
from kernels.gather_attention import gather_rows
from kernels.quantize import dequantize, quantize
from model import apply_rope


class LatentTokens(NamedTuple):
    """T slots of each row; a slot holds one token of all n KV heads together."""

    latents: tuple[Tensor, ...]  # [>= B, T, r_i]: the coordinates of a key in order, in buffers that are read apart
    values: tuple[Tensor, ...]  # uint8 [>= B, T, n*D*bits/8] and fp16 [>= B, T, n*D/32, 2]; at 16 bits [>= B, T, n*D]
    bits: int


def write_tokens(tokens: LatentTokens, row: Tensor, slot: Tensor, latents: Tensor, values: Tensor) -> None:
    """Store latents [..., >= r] and values [..., n*D] at (row, slot), which broadcast to [...].

    Coordinates past r are dropped. That is exact: the basis of a lower rank is the first vectors of a higher one's.
    """
    widths = [part.shape[2] for part in tokens.latents]
    for part, x in zip(tokens.latents, latents[..., : sum(widths)].split(widths, -1), strict=True):
        part[row, slot] = x
    coded = (values.to(tokens.values[0].dtype),) if tokens.bits == 16 else quantize(values, tokens.bits)
    for part, x in zip(tokens.values, coded, strict=True):
        part[row, slot] = x


def read_tokens(tokens: LatentTokens, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B, K] of each row -> latents [B, K, r], values [B, K, n*D] (dequantized: fp32)."""

    def take(part: Tensor) -> Tensor:
        return gather_rows(part.flatten(2)[:, None], slot[:, None])[:, 0]

    latents = torch.cat([take(part) for part in tokens.latents if part.shape[2]], -1)
    if tokens.bits == 16:
        return latents, take(tokens.values[0])
    packed, params = (take(part) for part in tokens.values)
    return latents, dequantize(packed, params.unflatten(-1, (-1, 2)), tokens.bits)


def latent_score(q: Tensor, latents: Tensor) -> Tensor:
    """Inner products of C queries a row with every token: q [B, C, r], latents [B, T, r] -> fp32 [B, C, T]."""
    return q.float() @ latents.float().transpose(1, 2)


def latent_attention(
    q: Tensor,
    basis: Tensor,
    ring: LatentTokens,
    store: LatentTokens,
    idx: Tensor,
    count: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Gather, expand, rotate at the tokens' own positions, attend to the first `count` tokens of each row.

    q [B, Hq, D] rotated; basis [>= r, n*D] with the basis vectors in rows, of which latents of r coordinates use the
    first r; idx [B, K] positions, K >= R: the first R are in the ring of R slots (slot = position mod R), the others in
    the store (slot = position); entries past count [B] may point anywhere; cos and sin [B, K, D/2] at the positions
    -> [B, Hq, D].
    """
    B, K, D, R = *idx.shape, q.shape[2], ring.latents[0].shape[1]
    keys, values = [], []
    for tokens, slot in ((ring, idx[:, :R] % R), (store, idx[:, R:])):
        latents, v = read_tokens(tokens, slot)
        keys.append(latents @ basis[: latents.shape[2]])
        values.append(v.to(q.dtype))
    k, v = (torch.cat(x, 1).view(B, K, -1, D).transpose(1, 2) for x in (keys, values))  # [B, n, K, D]
    chosen = torch.arange(K, device=q.device) < count[:, None]
    return masked_attention(q, apply_rope(k, cos[:, None], sin[:, None]), v, chosen[:, None])
