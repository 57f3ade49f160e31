"""Selection of tokens: exact top-k, under a mask or with the first and the newest tokens forced in.

The kernels neither sort nor come back to the host. Scores become integers of the same order, and the lowest one to be
taken is found by bisection: a step counts the keys that are not below the middle, all in registers. The search ends as
soon as the count is the wanted one, after about 16 to 20 of at most 32 steps. (A radix selection takes four histograms
of 256 bins. In Triton these are, by version, a hundred instructions for 32 keys or an atomic for each of them, which is
slow where many scores share their first digit: they all do.)

Rows of up to ROW slots are one program each: one launch, scores are read once. Longer rows go to three kernels over
chunks of a row, so that one row still fills the card. Chunks are interleaved, thus alike: each finds its own share of
the wanted, roughly (`_bracket`). The lowest and the highest key found there enclose the one that is wanted of the whole
row, whatever the scores are. The slots of the keys between them, a few per cent, are listed (`_candidates`); then every
chunk bisects the list alone, and writes its part of the selection (`_finish`).

Counted in the machine code for an H100, with 1/16 of normal scores wanted: 3600 instructions a thread for a row of 16K
(16 warps), 2100 for one of 4K (8 warps). To issue them takes 8.3 and 2.4 us at 1.755 GHz. That is a lower bound: waits
for memory, barriers and integer units that work at half rate come on top, and it has not been timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import native
from kernels.backend import tl, triton, use_native, use_triton
from kernels.bisection import HIGH, LOW, bisect, ends_of, keys_of, slot_of, target_of, write_slots

ROW = 16384  # keys of one program: 32 a thread, beside which the registers of 512 threads hold little else
CHUNK, CHUNK_WARPS = 8192, 8  # keys of a program of the three kernels: 32 a thread, and two programs a multiprocessor
KEYS = 16  # keys a thread of one program, up to 512 threads
SPAN = 8  # neighbouring slots in a chunk, 32 bytes: the fewer, the more alike are the chunks. Divides 32
SLACK = 32  # keys that a chunk may leave undecided
LISTED = 4096  # candidates held in registers; any more are read again at every step


def topk_select(scores: Tensor, mask: Tensor, k: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` highest-scoring allowed slots of every row and head, in any order (torch: highest first).

    scores [B, H, T], mask [B, 1 or H, T] bool, True = may be chosen; k static slots, count [B, H] wanted of them
    -> idx [B, H, k] int64, count [B, H] clamped to what is allowed and to k. Entries past the count point anywhere. Of
    equal scores the kernels take the first slots; they write slots in an order that is always the same.
    """
    if use_triton(scores):
        return torch.ops.kv_fast.topk_select(scores, mask, k, count)
    if use_native(scores):
        return native.select(scores, mask, None, count, k)
    scores = torch.where(mask, scores, float("-inf"))
    idx = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    allowed = mask.expand_as(scores).sum(-1)
    return idx, torch.minimum(count, allowed).clamp(max=idx.shape[-1])


def budget_select(
    scores: Tensor, pos: Tensor, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0
) -> tuple[Tensor, Tensor]:
    """The `wanted` highest-scoring tokens of each row and head, the first `sinks` and last `recent` ones forced in.

    scores [B, H, T], slot t holding the token at position t; pos [B] of the newest token; wanted [B] or [B, H] in all,
    raised to what is forced in; k static slots -> idx [B, H, k] int64, count [B, H]. Entries past the count point
    anywhere. Order and ties as in `topk_select`.
    """
    if use_triton(scores):
        return torch.ops.kv_fast.budget_select(scores, pos, wanted, k, sinks, recent)
    if use_native(scores):
        return native.select(scores, None, pos, wanted, k, sinks, recent)
    t = torch.arange(scores.shape[-1], device=scores.device)
    forced = (t < sinks) | (t > pos[:, None] - recent)
    filled = t <= pos[:, None]
    scores = torch.where(forced[:, None], float("inf"), scores)
    least = (sinks + recent * torch.ones_like(pos)).minimum(pos + 1)[:, None]
    wanted = torch.maximum(wanted.view(len(pos), -1), least)
    return topk_select(scores, filled[:, None], k, wanted.expand(scores.shape[:2]))


def with_run(idx: Tensor, count: Tensor, first: Tensor, last: int, k: int) -> Tensor:
    """The first count [B, H] of a list idx [B, H, n], and behind them the slots from first [B] on -> [B, H, k].

    The run ends where the list does; no slot is above `last`.
    """
    i, n = torch.arange(k, device=idx.device), idx.shape[2]
    both = ((first[:, None] - count)[..., None] + i).clamp(max=last)
    both[..., :n] = torch.where(i[:n] < count[..., None], idx, both[..., :n])
    return both


# ---- rows that fit into the registers of a program ----


@triton.jit
def _pad(idx, want, K):
    """Entries past the count are slots, too."""
    for first in range(want, K, 1024):
        i = first + tl.arange(0, 1024)
        tl.store(idx + i, tl.zeros([1024], tl.int64), mask=i < K)


@triton.jit
def _select_row(
    scores, mask, pos, wanted, words, idx, count,
    row_stride, head_stride, mask_row, mask_head, wanted_row, wanted_head, H, T, width, K, sinks, recent,
    ROW: tl.constexpr,
):  # fmt: skip
    """Program (row and head)."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H, row % H
    want, last = target_of(wanted, pos, b, h, wanted_row, wanted_head, T, K, sinks, recent)
    scores += b * row_stride + h * head_stride
    if mask is not None:
        mask += b * mask_row + h * mask_head
    idx += row * K
    t = tl.arange(0, ROW)
    keys = keys_of(scores, mask, t, last, T, width, sinks, recent)
    lo, hi, allowed, forced = ends_of(keys)
    want = tl.minimum(want, allowed)
    search = want > forced  # otherwise forced ones are all that is taken
    lo, hi, n, _ = bisect(keys, want, lo, hi, tl.where(search, allowed, want), forced, SLACK=0)
    level, n = tl.where(search, lo, HIGH), tl.where(search, n, forced)
    begin, end, cut = 0, ROW, ROW  # of the keys at the level, those before slot `cut`
    while n != want:
        cut = (begin + end) >> 1
        n = tl.sum(((keys > level) | ((keys == level) & (t < cut))).to(tl.int32))
        begin, end = tl.where(n < want, cut, begin), tl.where(n < want, end, cut)
    write_slots(idx, (keys > level) | ((keys == level) & (t < cut)), words + row * (ROW // 32), 0, 0, 1, SPAN=32)
    _pad(idx, want, K)
    tl.store(count + row, want.to(tl.int64))


# ---- longer rows, in chunks ----


@triton.jit
def _bracket(
    scores, mask, pos, wanted, bounds, found,
    row_stride, head_stride, mask_row, mask_head, wanted_row, wanted_head, H, T, width, K, sinks, recent, S,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    """Program (row and head, chunk): a key that r keys of the chunk are not below, and one that less than r are above.

    With r = ceil(want / S) in every chunk, at least `want` keys of the row are not below the lowest of the former, and
    at most S (r - 1) < want are above the highest of the latter: the wanted key is between them.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // H, row % H
    want, last = target_of(wanted, pos, b, h, wanted_row, wanted_head, T, K, sinks, recent)
    scores += b * row_stride + h * head_stride
    if mask is not None:
        mask += b * mask_row + h * mask_head
    keys = keys_of(scores, mask, slot_of(tl.arange(0, CHUNK), chunk, S, SPAN), last, T, width, sinks, recent)
    lo, hi, allowed, forced = ends_of(keys)
    share = tl.cdiv(want, S)
    search = (allowed >= share) & (share > forced)
    lo, hi, _, _ = bisect(keys, share, lo, hi, tl.where(search, allowed, share), forced, SLACK=SLACK)
    edge = tl.where(share > forced, LOW + 1, HIGH)  # all keys of the chunk are wanted, or only forced ones
    bounds += (row * S + chunk) * 3
    tl.store(bounds, tl.where(search, lo, edge))
    tl.store(bounds + 1, tl.where(search, hi - 1, edge))
    if chunk == 0:
        tl.store(found + row, 0)


@triton.jit
def _enclosing(bounds, s, S):
    lo, hi = tl.load(bounds + s * 3, mask=s < S, other=HIGH), tl.load(bounds + s * 3 + 1, mask=s < S, other=LOW)
    return tl.min(lo), tl.max(hi)


@triton.jit
def _unique(keys, t):
    """int64 keys without ties: of equal scores the first slot is highest."""
    return (keys.to(tl.int64) << 32) | (0x7FFFFFFF - t)


@triton.jit
def _candidates(
    scores, mask, pos, bounds, found, words, listed,
    row_stride, head_stride, mask_row, mask_head, H, T, width, sinks, recent, S,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (row and head, chunk): appends its slots within the bracket to the row's list, and counts those above.

    The order of the list is that in which programs arrive: nothing depends on it.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // H, row % H
    last = T - 1
    if pos is not None:
        last = tl.minimum(tl.load(pos + b), T - 1).to(tl.int32)
    scores += b * row_stride + h * head_stride
    if mask is not None:
        mask += b * mask_row + h * mask_head
    bounds += row * S * 3
    t = slot_of(tl.arange(0, CHUNK), chunk, S, SPAN)
    keys = keys_of(scores, mask, t, last, T, width, sinks, recent)
    lo, hi = _enclosing(bounds, tl.arange(0, BLOCK_S), S)
    tl.store(bounds + chunk * 3 + 2, tl.sum((keys > hi).to(tl.int32)))
    within = (keys >= lo) & (keys <= hi)
    start = tl.atomic_add(found + row, tl.sum(within.to(tl.int32)))
    write_slots(listed + row * T, within, words + (row * S + chunk) * (CHUNK // 32), start, chunk, S, SPAN)


@triton.jit
def _listed(scores, listed, i, n, last, T, width, sinks, recent):
    """Candidates i < n, as int64 keys without ties (the lowest of all past the end), and their slots.

    They are allowed by any mask: it needs no second look.
    """
    t = tl.load(listed + i, mask=i < n, other=0)
    keys = _unique(keys_of(scores, None, t, last, T, width, sinks, recent), t)
    return tl.where(i < n, keys, -(2**63)), t


@triton.jit
def _finish(
    scores, mask, pos, wanted, bounds, found, words, listed, idx, count,
    row_stride, head_stride, mask_row, mask_head, wanted_row, wanted_head, H, T, width, K, sinks, recent, S,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, BLOCK_S: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (row and head, chunk): the wanted key of the row, from the candidates alone; the chunk's part of idx."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // H, row % H
    want, last = target_of(wanted, pos, b, h, wanted_row, wanted_head, T, K, sinks, recent)
    scores += b * row_stride + h * head_stride
    if mask is not None:
        mask += b * mask_row + h * mask_head
    bounds += row * S * 3
    listed += row * T
    idx += row * K
    s, i = tl.arange(0, BLOCK_S), tl.arange(0, LISTED)
    n, above = tl.load(found + row), tl.load(bounds + s * 3 + 2, mask=s < S, other=0)
    want = tl.minimum(want, tl.sum(above) + n)  # with a mask: allowed slots may be fewer than wanted
    rest = want - tl.sum(above)

    keys, _ = _listed(scores, listed, i, n, last, T, width, sinks, recent)
    lowest, highest = _enclosing(bounds, s, S)
    lo, end = lowest.to(tl.int64) << 32, (highest.to(tl.int64) << 32) + 0x80000000
    hi, many = end, tl.where(rest > 0, n, rest)
    while many > rest:  # ends: no two keys are equal
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        m = tl.sum((keys >= middle).to(tl.int32))
        for first in range(LISTED, n, LISTED):
            more, _ = _listed(scores, listed, first + i, n, last, T, width, sinks, recent)
            m += tl.sum((more >= middle).to(tl.int32))
        enough = m >= rest
        lo, many = tl.where(enough, middle, lo), tl.where(enough, m, many)
        hi = tl.where(enough, hi, middle)
    level = tl.where(rest > 0, lo, end)

    # the chunk's part begins after those of the chunks before it
    start = tl.sum(tl.where(s < chunk, above, 0))
    for first in range(0, n, LISTED):
        more, slot = _listed(scores, listed, first + i, n, last, T, width, sinks, recent)
        start += tl.sum(((more >= level) & (slot // SPAN % S < chunk)).to(tl.int32))
    t = slot_of(tl.arange(0, CHUNK), chunk, S, SPAN)
    take = _unique(keys_of(scores, mask, t, last, T, width, sinks, recent), t) >= level
    write_slots(idx, take, words + (row * S + chunk) * (CHUNK // 32), start, chunk, S, SPAN)
    if chunk == 0:
        _pad(idx, want, K)
        tl.store(count + row, want.to(tl.int64))


# ---- launch ----


def select(
    scores: Tensor, mask: Tensor | None, pos: Tensor | None, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0,
    row: int = ROW, chunk: int = CHUNK, span: int = SPAN, slack: int = SLACK, listed: int = LISTED,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton version of `topk_select` (mask) and of `budget_select` (pos). Tests give it small blocks."""
    B, H, T = scores.shape
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    k, (idx, count) = min(k, T), _outputs(scores, k)
    if mask is not None:
        mask = mask.expand(B, H, T).view(torch.uint8)
        mask = mask if mask.stride(2) == 1 else mask.contiguous()
    pos = None if pos is None else pos.contiguous()
    wanted = wanted.view(B, -1).expand(B, H)
    strides = (*scores.stride()[:2], *((0, 0) if mask is None else mask.stride()[:2]))
    # a row may be read to the next multiple of 16 slots if that is still memory of its tensor
    width, memory = triton.cdiv(T, 16) * 16, scores.untyped_storage().nbytes() // scores.element_size()
    if scores.storage_offset() + (B - 1) * scores.stride(0) + (H - 1) * scores.stride(1) + width > memory:
        width = T
    if row >= T:
        block = max(32, triton.next_power_of_2(T))
        words = torch.empty(B * H, block // 32, dtype=torch.int32, device=scores.device)
        _select_row[(B * H,)](
            scores, mask, pos, wanted, words, idx, count, *strides, *wanted.stride(), H, T, width, k, sinks, recent,
            ROW=block, num_warps=_warps(block),
        )  # fmt: skip
        return idx, count
    S = triton.cdiv(T, chunk)
    bounds = torch.empty(B * H, S, 3, dtype=torch.int32, device=scores.device)
    found = torch.empty(B * H, dtype=torch.int32, device=scores.device)
    words = torch.empty(B * H, S, chunk // 32, dtype=torch.int32, device=scores.device)
    slots = torch.empty(B * H, T, dtype=torch.int32, device=scores.device)
    grid, sizes, block_s = (B * H, S), dict(CHUNK=chunk, SPAN=span, num_warps=CHUNK_WARPS), triton.next_power_of_2(S)
    _bracket[grid](
        scores, mask, pos, wanted, bounds, found, *strides, *wanted.stride(), H, T, width, k, sinks, recent, S,
        SLACK=slack, **sizes,
    )  # fmt: skip
    _candidates[grid](
        scores, mask, pos, bounds, found, words, slots, *strides, H, T, width, sinks, recent, S,
        BLOCK_S=block_s, **sizes,
    )  # fmt: skip
    _finish[grid](
        scores, mask, pos, wanted, bounds, found, words, slots, idx, count,
        *strides, *wanted.stride(), H, T, width, k, sinks, recent, S, BLOCK_S=block_s, LISTED=listed, **sizes,
    )  # fmt: skip
    return idx, count


def _warps(block: int) -> int:
    return max(4, min(16, block // (32 * KEYS)))


_lib = torch.library.Library("kv_fast", "FRAGMENT")
_lib.define("topk_select(Tensor scores, Tensor mask, int k, Tensor count) -> (Tensor, Tensor)")
_lib.define("budget_select(Tensor scores, Tensor pos, Tensor wanted, int k, int sinks, int recent) -> (Tensor, Tensor)")


def _topk_select(scores: Tensor, mask: Tensor, k: int, count: Tensor) -> tuple[Tensor, Tensor]:
    return select(scores, mask, None, count, k)


def _budget_select(
    scores: Tensor, pos: Tensor, wanted: Tensor, k: int, sinks: int, recent: int
) -> tuple[Tensor, Tensor]:
    return select(scores, None, pos, wanted, k, sinks, recent)


def _outputs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    B, H, T = scores.shape
    return scores.new_empty(B, H, min(k, T), dtype=torch.int64), scores.new_empty(B, H, dtype=torch.int64)


_lib.impl("topk_select", _topk_select, "CPU")
_lib.impl("budget_select", _budget_select, "CPU")
_lib.impl("topk_select", _topk_select, "CUDA")
_lib.impl("budget_select", _budget_select, "CUDA")
torch.library.register_fake("kv_fast::topk_select", lambda scores, mask, k, count: _outputs(scores, k), lib=_lib)
torch.library.register_fake(
    "kv_fast::budget_select", lambda scores, pos, wanted, k, sinks, recent: _outputs(scores, k), lib=_lib
)
