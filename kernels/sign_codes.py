"""Sign codes of Self-Indexing KVCache: 4 channels -> a 4-bit code, one codebook a head, scores by table look-up."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import pack, unpack

SUB = 4  # channels of a subvector (the paper's d = 4: 16 cells fit in shared memory)
TOKENS = 4096  # tokens per pass over the prompt: bounds the int64 cell indices


def sign_patterns(device: torch.device | None = None) -> Tensor:
    """[16, 4] of -1 and +1: the pattern of each code, eq. 3 (the first channel is the highest bit)."""
    bits = torch.arange(16, device=device)[:, None] >> torch.arange(SUB - 1, -1, -1, device=device) & 1
    return bits.float() * 2 - 1


def sign_codes(x: Tensor) -> Tensor:
    """Centred keys [..., D] -> codes uint8 [..., D / 4] in 0..15, eq. 2-3; zero counts as positive."""
    weights = torch.tensor([8, 4, 2, 1], dtype=torch.uint8, device=x.device)
    return ((x >= 0).unflatten(-1, (-1, SUB)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def pack_codes(codes: Tensor) -> Tensor:
    """[..., G] codes -> bytes [..., G / 2], the even subvector in the low half."""
    return pack(codes, 4)


def unpack_signs(packed: Tensor) -> Tensor:
    """Bytes [..., D / 8] -> signs fp32 [..., D]."""
    return sign_patterns(packed.device)[unpack(packed, 4).long()].flatten(-2)


def codebook(x: Tensor, codes: Tensor, valid: Tensor) -> Tensor:
    """Centroids of the 16 sign cells of every subvector, eq. 4, in one pass over the tokens.

    x [B, H, S, D] centred, codes [B, H, S, D / 4], valid [B, S] bool -> fp32 [B, H, D / 4, 16, 4]. An empty cell gets
    its sign pattern times the mean magnitude of its channels: what the cell would hold if it were like the others.
    """
    B, H, S, D = x.shape
    G = D // SUB
    cells = torch.zeros(B * H * G * 16, SUB + 1, device=x.device)  # sums of the four channels, and the count
    base = (torch.arange(B * H * G, device=x.device) * 16).view(B, H, 1, G)
    magnitude = torch.zeros(B, H, D, device=x.device)
    for i in range(0, S, TOKENS):
        keep = valid[:, None, i : i + TOKENS, None].float()
        part = torch.where(keep > 0, x[:, :, i : i + TOKENS].float(), 0)
        magnitude += part.abs().sum(2)
        weight = keep[..., None].expand(B, H, -1, G, 1)
        rows = torch.cat((part.unflatten(-1, (G, SUB)), weight), -1)
        cells.index_add_(0, (base + codes[:, :, i : i + TOKENS]).flatten(), rows.flatten(0, 3))
    sums, counts = cells.view(B, H, G, 16, SUB + 1).split((SUB, 1), -1)
    magnitude = (magnitude / valid.sum(1).clamp(min=1).view(B, 1, 1)).view(B, H, G, 1, SUB)
    return torch.where(counts > 0, sums / counts.clamp(min=1), sign_patterns(x.device) * magnitude)


def lut_score(q: Tensor, book: Tensor, packed: Tensor) -> Tensor:
    """Approximate q . k of every token by a look-up and an add per code, eq. 8.

    q [B, H, D], book [B, H, D / 4, 16, 4], packed codes [B, H, T, D / 8] uint8 -> fp32 [B, H, T]. A byte holds two
    codes, so the table is taken over pairs of subvectors: 256 entries, half the look-ups.
    """
    table = (book @ q.float().unflatten(-1, (-1, SUB))[..., None]).squeeze(-1)  # [B, H, G, 16]
    low, high = table[:, :, 0::2], table[:, :, 1::2]
    pairs = (high[..., :, None] + low[..., None, :]).flatten(-2)  # [B, H, G / 2, 256], indexed by the byte
    return pairs.gather(3, packed.transpose(2, 3).long()).sum(2)
