"""Scores of pages of tokens from the minimum and maximum of each channel of their keys (Quest, Tang et al. 2024).

No key of a page has an inner product with q above sum_d max(q_d low_d, q_d high_d): pages are ranked by that bound. The
kernel reads both bounds of a page once for all query heads of the group: 2 D elements for `page` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.latent_score import head_scores
from kernels.op import operation, whole_vectors
from kernels.select import budget_select, with_run
from kernels.splits import empty_scores, score_grid
from kernels.tiles import filled
from kernels.tuned import tuned

TILE = 4096  # elements of a tile of bounds: 16 KB of both in bf16, as many programs as fit hide the latency
NUM_WARPS = 4


def page_bounds(k: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every channel in each page of a prompt's keys.

    k [B, H, S, D] rotated, lengths [B] -> low, high [B, H, ceil(S / page), D] in the dtype of k. Tokens past a prompt's
    end do not count; an empty page is +inf, -inf, so that the first token that joins it can be compared with these.
    """
    B, H, S, D = k.shape
    pages = -(-S // page)
    real = (torch.arange(pages * page, device=k.device) < lengths[:, None]).view(B, 1, pages, page, 1)
    k = torch.nn.functional.pad(k, (0, 0, 0, pages * page - S)).view(B, H, pages, page, D)
    return torch.where(real, k, float("inf")).amin(3), torch.where(real, k, float("-inf")).amax(3)


@operation(cpp=True, mutates=("low", "high"))
def join_page(low: Tensor, high: Tensor, k: Tensor, pos: Tensor, page: int) -> None:
    """In place, one token a row: k [B, H, D] at pos [B] widens its page in low and high [>= B, H, P, D].

    The first token of a page replaces what its bounds held.
    """
    row, at = torch.arange(len(pos), device=pos.device), pos // page
    first = (pos % page == 0)[:, None, None]
    low[row, :, at] = torch.where(first, k, low[row, :, at].minimum(k))
    high[row, :, at] = torch.where(first, k, high[row, :, at].maximum(k))


@operation(
    cpp=whole_vectors,
    fake=lambda q, low, high, last: empty_scores(len(q), *low.shape[1:3], device=q.device),
)
def page_score(q: Tensor, low: Tensor, high: Tensor, last: Tensor | None = None) -> Tensor:
    """Upper bounds of q . k over the keys of every page, summed over the query heads of a group.

    q [B, Hq, D], low and high [>= B, Hkv, P, D] -> fp32 [B, Hkv, P]. last [B], if given, is the last page that matters:
    later ones need not be read, and their scores may be anything.
    """
    # a positive channel of a query takes the maximum, a negative one the minimum: so sum over the group first
    groups = q.float().unflatten(1, (low.shape[1], -1))
    up, down = groups.clamp(min=0).sum(2, keepdim=True), groups.clamp(max=0).sum(2, keepdim=True)
    return (head_scores(up, high, last) + head_scores(down, low, last))[:, :, 0]


@operation(
    cpp=lambda scores, *_: scores.dtype == torch.float32,
    fake=lambda scores, pos, wanted, page, k, *_: tuple(
        scores.new_empty(*scores.shape[:2], *n, dtype=torch.int64) for n in ((k,), ())
    ),
)
def page_select(
    scores: Tensor, pos: Tensor, wanted: Tensor, page: int, k: int, last: int, sinks: int = 0, recent: int = 0
) -> tuple[Tensor, Tensor]:
    """The tokens of the `wanted` best pages, the last of which is that of the newest token, as far as it is filled.

    scores [B, H, P], pos [B] of the newest token; wanted [B] or [B, H] pages, the first `sinks` and the `recent` ones
    before the last forced in -> idx [B, H, k] int64, slots up to `last`, and count [B, H], as in `budget_select`.
    """
    newest = pos // page
    pages, n = budget_select(scores, newest - 1, wanted - 1, max(1, k // page - 1), sinks, recent)
    tokens = (pages[..., None] * page + torch.arange(page, device=pos.device)).flatten(2)
    return with_run(tokens, n * page, newest * page, last, k), n * page + (pos % page + 1)[:, None]


# ---- Triton ----


@triton.jit
def _page_score(
    q, low, high, last, out, q_strides, low_strides, out_strides, H, P,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (one of a head's, row and KV head): every so many blocks of pages."""
    pid_bh = tl.program_id(1).to(tl.int64)
    pid_b, pid_h, n_pages = pid_bh // H, pid_bh % H, filled(last, pid_bh // H, P)
    offs_d = tl.arange(0, BLOCK_D)
    q += pid_b * q_strides[0] + pid_h * G * q_strides[1] + offs_d
    low += pid_b * low_strides[0] + pid_h * low_strides[1] + offs_d
    high += pid_b * low_strides[0] + pid_h * low_strides[1] + offs_d
    out += pid_b * out_strides[0] + pid_h * out_strides[1]
    for first in range(tl.program_id(0) * BLOCK_P, n_pages, tl.num_programs(0) * BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        at, inside = offs_p.to(tl.int64)[:, None] * D, (offs_p[:, None] < n_pages) & (offs_d < D)
        lo = tl.load(low + at, mask=inside, other=0.0).to(tl.float32)
        hi = tl.load(high + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)  # summed over the lanes once, at the end
        for g in tl.static_range(G):
            b_q = tl.load(q + g * q_strides[1], mask=offs_d < D, other=0.0).to(tl.float32)
            score += tl.maximum(b_q * lo, b_q * hi)
        tl.store(out + offs_p, tl.sum(score, 1), mask=offs_p < tl.cdiv(P, 16) * 16)


@page_score.triton
def _page_score_triton(q: Tensor, low: Tensor, high: Tensor, last: Tensor | None, block: int | None = None) -> Tensor:
    """The Triton version of `page_score`; tests give pages per program."""
    (B, Hq, D), (H, P) = q.shape, low.shape[1:3]
    assert q.stride(2) == 1 and low.stride() == high.stride() and low.stride()[2:] == (D, 1), "pages are rows of D"
    out, width = empty_scores(B, H, P, device=q.device), triton.next_power_of_2(D)
    options = tuned("_page_score", BLOCK_P=block or TILE // width, num_warps=NUM_WARPS)
    _page_score[score_grid(B * H, P, options["BLOCK_P"], q.device)](
        q, low, high, None if last is None else last.contiguous(), out,
        q.stride(), low.stride(), out.stride(), H, P,
        G=Hq // H, D=D, BLOCK_D=width, **options,
    )  # fmt: skip
    return out
