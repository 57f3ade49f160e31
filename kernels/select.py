"""Selection of tokens: exact top-k, under a mask or with the first and the newest tokens forced in.

The kernels neither sort nor synchronize with the host. Scores become integers of the same order, "keys", and the lowest
key to select is found by bisection: a step counts the keys not below the middle, all in registers. The search ends when
the count is the wanted one, after about 16 to 20 of at most 32 steps. (A radix selection takes four histograms of 256
bins. In Triton these take, depending on the version, a hundred instructions for 32 keys or an atomic for each of them,
which is slow where many scores share their first digit: they all do.)

One program holds a whole row of up to ROW slots. For a longer row, a sample tells roughly where the lowest key to
select is. Four standard deviations below that is the floor (`_floor`); the slots above it, a few per cent more than are
wanted, are listed in their order (`_list`); the bisection sees the list alone (`_take`). If the floor is too high,
which no sample can rule out, the list is the whole row: exact, but slow. The row is read by tiles, so that a few slots
more than a power of two cost one more tile. One program does all this up to ALONE slots. Longer rows are cut into equal
chunks, one per program, for the lists; a second launch searches and selects, one program a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backend import HIP, tl, triton
from kernels.bisection import (
    HIGH,
    LOW,
    Rows,
    bisect,
    ends_of,
    keys_of,
    store_flags,
    target_of,
    write_flagged,
    write_slots,
)
from kernels.op import operation
from kernels.tuned import tuned

ROW = 4096  # keys of a row that one program holds whole, 16 per thread
KEYS = 16  # keys per thread of such a program
ALONE = 16384  # slots of a row that one program reads, by tiles
CHUNK = 8192  # approximate number of slots of a longer row's chunks
TILE, WARPS = 1024, 8  # keys at a time: four per thread, 16 bytes
# registers per thread of such a program by the candidates that it holds: on cc 89 the assembler would choose 64 and
# spill, to make room for more programs than there are. 128 are two programs a multiprocessor, and so are 88.
ALONE_REGISTERS = {4096: 128, 8192: 255}
WORDS = 256  # words of 32 flags written at a time: one per thread
SAMPLE, LONG = 1024, 65536  # keys of a sample; twice as many above ALONE, four times from LONG on: shorter lists
SLACK = 16  # keys of the sample by which the floor may be too low
LISTED = 8192  # most candidates held in registers; more are read again at every step


def _lists(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    B, H, T = scores.shape
    return scores.new_empty(B, H, min(k, T), dtype=torch.int64), scores.new_empty(B, H, dtype=torch.int64)


def _of_fp32(scores: Tensor, *_: object) -> bool:
    return scores.dtype == torch.float32


@operation(
    cpp=_of_fp32,
    fake=lambda scores, mask, k, count: _lists(scores, k),
)
def topk_select(scores: Tensor, mask: Tensor, k: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` highest-scoring allowed slots of every row and head, in any order (torch: highest first).

    scores [B, H, T], mask [B, 1 or H, T] bool, True = may be chosen; k static slots, count [B, H] wanted of them
    -> idx [B, H, k] int64, count [B, H] clamped to what is allowed and to k. Entries past the count point anywhere. Of
    equal scores the kernels take the first slots; they write slots in an order that is always the same.
    """
    scores = torch.where(mask, scores, float("-inf"))
    idx = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    allowed = mask.expand_as(scores).sum(-1)
    return idx, torch.minimum(count, allowed).clamp(max=idx.shape[-1])


@operation(
    cpp=_of_fp32,
    fake=lambda scores, pos, wanted, k, *_: _lists(scores, k),
)
def budget_select(
    scores: Tensor, pos: Tensor, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0
) -> tuple[Tensor, Tensor]:
    """The `wanted` highest-scoring tokens of each row and head, the first `sinks` and last `recent` ones forced in.

    scores [B, H, T], slot t holding the token at position t; pos [B] of the newest token; wanted [B] or [B, H] in all,
    raised to what is forced in; k static slots -> idx [B, H, k] int64, count [B, H]. Entries past the count point
    anywhere. Order and ties are as in `topk_select`.
    """
    t = torch.arange(scores.shape[-1], device=scores.device)
    forced = (t < sinks) | (t > pos[:, None] - recent)
    filled = t <= pos[:, None]
    scores = torch.where(forced[:, None], float("inf"), scores)
    least = (sinks + recent * torch.ones_like(pos)).minimum(pos + 1)[:, None]
    wanted = torch.maximum(wanted.view(len(pos), -1), least)
    return topk_select(scores, filled[:, None], k, wanted.expand(scores.shape[:2]))


@topk_select.triton
def _(scores: Tensor, mask: Tensor, k: int, count: Tensor) -> tuple[Tensor, Tensor]:
    return select(scores, mask, None, count, k)


@budget_select.triton
def _(scores: Tensor, pos: Tensor, wanted: Tensor, k: int, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    return select(scores, None, pos, wanted, k, sinks, recent)


def with_run(idx: Tensor, count: Tensor, first: Tensor, last: int, k: int) -> Tensor:
    """The first count [B, H] of a list idx [B, H, n], followed by the slots from first [B] on -> [B, H, k].

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
        offs_k = first + tl.arange(0, 1024)
        tl.store(idx + offs_k, tl.zeros([1024], tl.int64), mask=offs_k < K)


@triton.jit
def _select_row(scores, mask, pos, wanted, words, idx, count, rows, ROW: tl.constexpr):
    """Program (row and head)."""
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // rows.H, pid_bh % rows.H
    want, last = target_of(wanted, pos, pid_b, pid_h, rows)
    scores += pid_b * rows.scores[0] + pid_h * rows.scores[1]
    if mask is not None:
        mask += pid_b * rows.mask[0] + pid_h * rows.mask[1]
    idx += pid_bh * rows.K
    offs_t = tl.arange(0, ROW)
    keys = keys_of(scores, mask, offs_t, last, rows)
    lo, hi, allowed, forced = ends_of(keys)
    want = tl.minimum(want, allowed)
    search = want > forced  # otherwise forced ones are all that is taken
    lo, hi, n_taken, _ = bisect(keys, want, lo, hi, tl.where(search, allowed, want), forced, SLACK=0)
    level, n_taken = tl.where(search, lo, HIGH), tl.where(search, n_taken, forced)
    begin, end, cut = 0, ROW, ROW  # of the keys at the level, those before slot `cut`
    while n_taken != want:
        cut = (begin + end) >> 1
        n_taken = tl.sum(((keys > level) | ((keys == level) & (offs_t < cut))).to(tl.int32))
        begin, end = tl.where(n_taken < want, cut, begin), tl.where(n_taken < want, end, cut)
    write_slots(idx, (keys > level) | ((keys == level) & (offs_t < cut)), words + pid_bh * (ROW // 32))
    _pad(idx, want, rows.K)
    tl.store(count + pid_bh, want.to(tl.int64))


# ---- longer rows ----


@triton.jit
def _floor(scores, mask, want, last, rows, SAMPLE: tl.constexpr, SLACK: tl.constexpr):
    """A key that more than `want` keys of a row are not below, as far as a sample tells; LOW + 1: all may be wanted."""
    seq_len = last + 1
    offs_t = (tl.arange(0, SAMPLE).to(tl.int64) * seq_len // SAMPLE).to(tl.int32)
    keys = keys_of(scores, mask, offs_t, last, rows)
    share = want / tl.maximum(seq_len, 1).to(tl.float32)
    rank = (share * SAMPLE + 4 * tl.sqrt(tl.maximum(share * (1 - share), 0.0) * SAMPLE)).to(tl.int32) + 1
    lo, hi, allowed, forced = ends_of(keys)
    search = (rank < allowed) & (rank > forced)
    lo, hi, _, _ = bisect(keys, rank, lo, hi, tl.where(search, allowed, rank), forced, SLACK=SLACK)
    return tl.where(search, lo, tl.where(rank < allowed, HIGH, LOW + 1))


@triton.jit
def _list(
    scores, mask, floor, begin, end, last, rows, words, listed, TILE: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Slots begin <= offs_t < end whose keys are not below the floor, in order, to `listed` -> how many."""
    for first in range(begin, end, TILE):
        offs_t = first + tl.arange(0, TILE)
        keys = keys_of(scores, mask, offs_t, last, rows)
        store_flags(words + (first - begin) // 32, (keys >= floor) & (offs_t < end))
    tl.debug_barrier()
    n_listed = 0
    for first in range(0, tl.cdiv(end - begin, 32), WORDS):
        offs_w = first + tl.arange(0, WORDS)
        word = tl.load(words + offs_w, mask=offs_w * 32 < end - begin, other=0)
        n_listed += write_flagged(listed, word, begin + offs_w * 32, n_listed)
    return n_listed


@triton.jit
def _candidates(scores, mask, listed, found, offs_c, n_cand, kept, size, S, last, rows):
    """Keys and slots of candidates offs_c < n_cand, in order; LOW past the end. Those of a chunk lie together."""
    at, end = offs_c, 0
    for chunk in range(S - 1):
        n_found = tl.load(found + chunk)
        end += n_found
        at += tl.where(offs_c >= end, size - n_found, 0)
    offs_t = tl.where(offs_c < kept, tl.load(listed + at, mask=offs_c < kept, other=0), offs_c)
    return tl.where(offs_c < n_cand, keys_of(scores, mask, offs_t, last, rows), LOW), offs_t


@triton.jit
def _taken(keys, offs_t, level, cut):
    """Which are taken: above the level, and of those at it the ones before slot `cut`."""
    return (keys > level) | ((keys == level) & (offs_t < cut))


@triton.jit
def _take(
    scores, mask, want, floor, n_cand, listed, found, idx, count, size, S, last, rows,
    TILE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """What is taken of a row's n_cand candidates, in order, to idx."""
    missed = (n_cand < want) & (floor > LOW + 1)  # the floor is too high: every slot is a candidate, and none is listed
    n_cand, kept = tl.where(missed, last + 1, n_cand), tl.where(missed, 0, n_cand)
    offs_c = tl.arange(0, LISTED)
    keys, _ = _candidates(scores, mask, listed, found, offs_c, n_cand, kept, size, S, last, rows)
    lo, hi, many, forced = ends_of(keys)
    for first in range(LISTED, n_cand, LISTED):
        more, _ = _candidates(scores, mask, listed, found, first + offs_c, n_cand, kept, size, S, last, rows)
        least, most, n_above, n_forced = ends_of(more)
        lo, hi, many, forced = tl.minimum(lo, least), tl.maximum(hi, most), many + n_above, forced + n_forced
    want = tl.minimum(want, many)  # with a mask: allowed slots may be fewer than wanted
    search = want > forced
    lo, many = tl.where(search, lo, HIGH), tl.where(search, many, forced)
    while (many > want) & (hi > lo) & (hi - 1 > lo):
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        n_above = tl.sum((keys >= middle).to(tl.int32))
        for first in range(LISTED, n_cand, LISTED):
            more, _ = _candidates(scores, mask, listed, found, first + offs_c, n_cand, kept, size, S, last, rows)
            n_above += tl.sum((more >= middle).to(tl.int32))
        enough = n_above >= want
        lo, many, hi = tl.where(enough, middle, lo), tl.where(enough, n_above, many), tl.where(enough, hi, middle)
    before, behind, cut = 0, rows.T, rows.T
    while many != want:
        cut = (before + behind) >> 1
        many = 0
        for first in range(0, n_cand, LISTED):
            more, offs_t = _candidates(scores, mask, listed, found, first + offs_c, n_cand, kept, size, S, last, rows)
            many += tl.sum(_taken(more, offs_t, lo, cut).to(tl.int32))
        before, behind = tl.where(many < want, cut, before), tl.where(many < want, behind, cut)

    start, offs_o = 0, tl.arange(0, TILE)
    for first in range(0, n_cand, TILE):  # read again: to write them all at once takes more registers than there are
        more, offs_t = _candidates(scores, mask, listed, found, first + offs_o, n_cand, kept, size, S, last, rows)
        take = _taken(more, offs_t, lo, cut).to(tl.int32)
        tl.store(idx + start + tl.cumsum(take, 0) - 1, offs_t.to(tl.int64), mask=take != 0)
        start += tl.sum(take)
    _pad(idx, want, rows.K)
    tl.store(count, want.to(tl.int64))


@triton.jit
def _select_alone(
    scores, mask, pos, wanted, words, listed, idx, count, rows, size,
    SAMPLE: tl.constexpr, SLACK: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (row and head)."""
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // rows.H, pid_bh % rows.H
    want, last = target_of(wanted, pos, pid_b, pid_h, rows)
    scores += pid_b * rows.scores[0] + pid_h * rows.scores[1]
    if mask is not None:
        mask += pid_b * rows.mask[0] + pid_h * rows.mask[1]
    listed += pid_bh * size
    words += pid_bh * (size // 32)
    floor = _floor(scores, mask, want, last, rows, SAMPLE, SLACK)
    n_cand = _list(scores, mask, floor, 0, last + 1, last, rows, words, listed, TILE, WORDS)
    tl.debug_barrier()  # the list is written
    _take(
        scores, mask, want, floor, n_cand, listed, listed, idx + pid_bh * rows.K, count + pid_bh, size, 1, last, rows,
        TILE, LISTED,
    )  # fmt: skip


@triton.jit
def _list_chunk(
    scores, mask, pos, wanted, words, listed, found, floors, rows, size, S,
    SAMPLE: tl.constexpr, SLACK: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (row and head, chunk of `size` slots): its candidates, and how many they are. Each finds the floor."""
    pid_bh, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pid_b, pid_h = pid_bh // rows.H, pid_bh % rows.H
    want, last = target_of(wanted, pos, pid_b, pid_h, rows)
    scores += pid_b * rows.scores[0] + pid_h * rows.scores[1]
    if mask is not None:
        mask += pid_b * rows.mask[0] + pid_h * rows.mask[1]
    floor, begin = _floor(scores, mask, want, last, rows, SAMPLE, SLACK), chunk * size
    n_cand = _list(
        scores, mask, floor, begin, tl.minimum(last + 1, begin + size), last, rows,
        words + (pid_bh * S + chunk) * (size // 32), listed + pid_bh * S * size + begin, TILE, WORDS,
    )  # fmt: skip
    tl.store(found + pid_bh * S + chunk, n_cand)
    if chunk == 0:
        tl.store(floors + pid_bh, floor)


@triton.jit
def _take_row(
    scores, mask, pos, wanted, listed, found, floors, idx, count, rows, size, S,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (row and head): from the lists of all chunks."""
    pid_bh = tl.program_id(0).to(tl.int64)
    pid_b, pid_h = pid_bh // rows.H, pid_bh % rows.H
    want, last = target_of(wanted, pos, pid_b, pid_h, rows)
    scores += pid_b * rows.scores[0] + pid_h * rows.scores[1]
    if mask is not None:
        mask += pid_b * rows.mask[0] + pid_h * rows.mask[1]
    found += pid_bh * S
    offs_s = tl.arange(0, BLOCK_S)
    n_cand = tl.sum(tl.load(found + offs_s, mask=offs_s < S, other=0))
    _take(
        scores, mask, want, tl.load(floors + pid_bh), n_cand, listed + pid_bh * S * size, found, idx + pid_bh * rows.K,
        count + pid_bh, size, S, last, rows, TILE, LISTED,
    )  # fmt: skip


# ---- launch ----


def select(
    scores: Tensor, mask: Tensor | None, pos: Tensor | None, wanted: Tensor, k: int, sinks: int = 0, recent: int = 0,
    row: int = ROW, alone: int = ALONE, chunk: int = CHUNK, tile: int = TILE, sample: int | None = None,
    slack: int = SLACK, listed: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton version of `topk_select` (mask) and of `budget_select` (pos). Tests give it small blocks."""
    B, H, T = scores.shape
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    k, (idx, count) = min(k, T), _lists(scores, k)
    if mask is not None:
        mask = mask.expand(B, H, T).view(torch.uint8)
        mask = mask if mask.stride(2) == 1 else mask.contiguous()
    pos = None if pos is None else pos.contiguous()
    wanted = wanted.view(B, -1).expand(B, H)
    # a row may be read to the next multiple of 16 slots if that is still memory of its tensor
    width, memory = triton.cdiv(T, 16) * 16, scores.untyped_storage().nbytes() // scores.element_size()
    if scores.storage_offset() + (B - 1) * scores.stride(0) + (H - 1) * scores.stride(1) + width > memory:
        width = T
    strides = (scores.stride(), None if mask is None else mask.stride(), wanted.stride())
    rows = Rows(*strides, H, T, width, k, sinks, recent)
    if row >= T:
        block = max(32, triton.next_power_of_2(T))
        words = torch.empty(B * H, block // 32, dtype=torch.int32, device=scores.device)
        options = tuned("_select_row", num_warps=_warps(block))
        _select_row[(B * H,)](scores, mask, pos, wanted, words, idx, count, rows, ROW=block, **options)
        return idx, count
    S, size = _chunks(T, alone, chunk, tile)
    words = torch.empty(B * H, S, size // 32, dtype=torch.int32, device=scores.device)
    slots = torch.empty(B * H, S, size, dtype=torch.int32, device=scores.device)
    sample = sample or _sample(T)
    reading, listed = dict(SAMPLE=sample, SLACK=slack, TILE=tile, WORDS=WORDS), listed or _listed(T, k, sample)
    if S == 1:
        _select_alone[(B * H,)](
            scores, mask, pos, wanted, words, slots, idx, count, rows, size,
            **reading, LISTED=listed, **tuned("_select_alone", num_warps=WARPS, **limit(listed)),
        )  # fmt: skip
        return idx, count
    found = torch.empty(B * H, S, dtype=torch.int32, device=scores.device)
    floors = torch.empty(B * H, dtype=torch.int32, device=scores.device)
    _list_chunk[(B * H, S)](
        scores, mask, pos, wanted, words, slots, found, floors, rows, size, S,
        **reading, **tuned("_list_chunk", num_warps=WARPS),
    )  # fmt: skip
    _take_row[(B * H,)](
        scores, mask, pos, wanted, slots, found, floors, idx, count, rows, size, S,
        TILE=tile, BLOCK_S=triton.next_power_of_2(S), LISTED=listed,
        **tuned("_take_row", num_warps=_take_warps(listed)),
    )  # fmt: skip
    return idx, count


def _warps(block: int) -> int:
    return max(4, min(8, block // (32 * KEYS)))


def _take_warps(listed: int) -> int:
    """With 8 warps, 8192 candidates take more than 128 registers a thread, so that a multiprocessor holds one program.
    It holds one of 16 warps as well, each of which has half of the work."""
    return 2 * WARPS if listed > 4096 else WARPS


def _chunks(T: int, alone: int, chunk: int, tile: int) -> tuple[int, int]:
    """The number of chunks of a row of T slots, and the slots of each, in whole tiles: about `chunk` each."""
    S = 1 if alone >= T else max(2, round(T / chunk))
    return S, triton.cdiv(triton.cdiv(T, S), tile) * tile


def _sample(T: int) -> int:
    return SAMPLE * (1 if T <= ALONE else 2 if T < LONG else 4)


def limit(listed: int) -> dict[str, int]:
    """The register limit for one program that holds `listed` candidates. AMD's compiler takes none."""
    return {} if HIP else dict(maxnreg=next(n for most, n in ALONE_REGISTERS.items() if listed <= most))


def _listed(T: int, k: int, sample: int) -> int:
    """Room for the list of k wanted slots of T, as a power of two: the floor is four standard deviations of the sample
    low, and the sample may be two more off."""
    share = k / T
    margin = (6 * (share * (1 - share) * sample) ** 0.5 + SLACK) / sample
    return min(LISTED, triton.next_power_of_2(k + math.ceil(margin * T)))
