"""How the work of a launch is cut into tiles and programs, where they write, and how their parts are joined.

All of it follows from sizes alone, never from a length on the GPU, because a captured graph keeps it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.tuned import tuned

ASSUMED_SMS = 132  # an H100's multiprocessors, if there is no GPU to ask
MAX_SPLITS = 64
SCORE_PROGRAMS = 4  # a multiprocessor, of those that score tokens: every card holds them all at once
COMBINE_D = 32  # channels of a program that joins parts: a full line of 128 bytes, and enough programs at batch 1
TILE_BYTES = 16384  # bytes of K or V in a block of tokens: 72 KB of shared memory a program, three on an H100


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else ASSUMED_SMS


def split_count(programs: int, n: int, block: int, device: torch.device, wave: int = 2) -> int:
    """The number of parts to split n tokens into, so that `programs` x parts fill the card.

    wave: programs per multiprocessor, which may hold more. Takes the fewest parts whose waves are 95 % as full as the
    best that any number of parts reaches (FlashDecoding's rule): a part costs its partial output, an idle
    multiprocessor costs more. A part is at least one block of `block` tokens.
    """
    wave *= multiprocessors(device)
    most = max(1, min(triton.cdiv(n, block), MAX_SPLITS))
    full = [programs * s / (wave * triton.cdiv(programs * s, wave)) for s in range(1, most + 1)]
    return next(s for s, share in enumerate(full, 1) if share >= 0.95 * max(full))


def score_grid(groups: int, n: int, block: int, device: torch.device) -> tuple[int, int]:
    """A grid of programs of a head x heads. A head's programs take turns at its blocks of tokens, so that there are no
    more than the card holds, however many of the n slots are still empty. The limit of y is 65,535: heads are there.
    """
    return min(triton.cdiv(n, block), max(1, SCORE_PROGRAMS * multiprocessors(device) // groups)), groups


def blocks_of(n_head: int, n_kv_head: int, head_dim: int, least: int = 16) -> dict[str, int]:
    """G, D and their tiles, padded to the 16 rows of a tensor-core instruction, a head's channels to `least`: 32 where
    its halves are multiplied."""
    G = n_head // n_kv_head
    BLOCK_G, BLOCK_D = max(16, triton.next_power_of_2(G)), max(least, triton.next_power_of_2(head_dim))
    return dict(G=G, D=head_dim, BLOCK_G=BLOCK_G, BLOCK_D=BLOCK_D)


def block_size(programs: int, n: int, row_bytes: int, device: torch.device) -> int:
    """Tokens per block: tiles of TILE_BYTES, smaller where that many would leave multiprocessors idle.

    A list is short (160 tokens in Self-Indexing KVCache): one row of it in blocks of 64 is three programs a head.
    """
    block = max(16, min(128, TILE_BYTES // row_bytes))
    while block > 16 and programs * triton.cdiv(n, block) < 2 * multiprocessors(device):
        block //= 2
    return block


@triton.jit
def share_of(count, part, parts, BLOCK_N: tl.constexpr):
    """Begin and end of share `part` of `parts` in `count` tokens: whole blocks, at most one more than others have."""
    blocks = tl.cdiv(count, BLOCK_N)
    lo = part * blocks // parts * BLOCK_N
    return lo, tl.minimum(count, (part + 1) * blocks // parts * BLOCK_N)


def parts_of(q: Tensor, splits: int) -> tuple[Tensor, Tensor | None]:
    """Buffers that `splits` programs per head write, outputs and weights; a single one writes the result itself."""
    if splits == 1:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), None
    part = torch.empty(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    return part, torch.empty(part.shape[:3], dtype=torch.float32, device=q.device)


@triton.jit
def _combine(part, lse, out, S, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    weight = tl.load(lse + row * S + offs_s, mask=offs_s < S, other=float("-inf"))
    acc = tl.load(part + (row * S + offs_s[:, None]) * D + offs_d, mask=(offs_s[:, None] < S) & (offs_d < D), other=0.0)
    m_i = tl.max(weight)
    weight = tl.exp2(weight - tl.where(m_i == float("-inf"), 0.0, m_i))  # a part that saw no token weighs nothing
    acc = tl.sum(tl.where(weight[:, None] > 0, acc, 0.0) * weight[:, None], 0) / tl.maximum(tl.sum(weight), 1e-30)
    tl.store(out + row * D + offs_d, acc.to(out.dtype.element_ty), mask=offs_d < D)


def combine(part: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax-weighted mean of partial attention outputs.

    part [..., S, D] fp32, each normalized by itself; lse [..., S] fp32, the log2 of each part's sum of exp2(logit),
    -inf if it saw no token -> [..., D], zeros where no part saw one.
    """
    *lead, S, D = part.shape
    out = torch.empty(*lead, D, dtype=dtype, device=part.device)
    grid = (lse.numel() // S, triton.cdiv(D, COMBINE_D))
    _combine[grid](
        part, lse, out, S, D=D, BLOCK_S=triton.next_power_of_2(S), BLOCK_D=COMBINE_D, **tuned("_combine", num_warps=2)
    )
    return out


def empty_scores(*size: int, device: torch.device) -> Tensor:
    """Uninitialized fp32 [..., T] whose rows start at multiples of 64 bytes, for wide loads and stores at any T."""
    *lead, T = size
    return torch.empty(*lead, triton.cdiv(T, 16) * 16, dtype=torch.float32, device=device)[..., :T]
