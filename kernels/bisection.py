"""Scores as integers of the same order, and the lowest one to select: what selection kernels do in registers."""

from __future__ import annotations

from typing import NamedTuple

from kernels.backend import tl, triton

LOW, HIGH = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # keys of slots that may not be chosen, and of forced ones


class Rows(NamedTuple):
    """What the kernels of a selection know of all its rows: strides of scores [B, H, T], mask and wanted, and sizes."""

    scores: tuple[int, ...]
    mask: tuple[int, ...] | None
    wanted: tuple[int, ...]
    H: int
    T: int  # slots
    width: int  # slots whose memory may be read
    K: int  # places in the list of chosen slots
    sinks: int  # so many first slots and newest ones are always chosen
    recent: int


@triton.jit
def target_of(wanted, pos, pid_b, pid_h, rows):
    """How many slots row pid_b, head pid_h is to choose, and the last slot that may be chosen."""
    want, last = tl.load(wanted + pid_b * rows.wanted[0] + pid_h * rows.wanted[1]), rows.T - 1
    if pos is not None:
        last = tl.maximum(tl.minimum(tl.load(pos + pid_b), rows.T - 1), -1).to(tl.int32)  # -1: no slot is filled yet
        want = tl.minimum(tl.maximum(want, tl.minimum(rows.sinks + rows.recent, last + 1)), last + 1)
    return tl.maximum(tl.minimum(want, rows.K), 0).to(tl.int32), last


@triton.jit
def keys_of(scores, mask, offs_t, last, rows):
    """Scores of slots offs_t of a row as int32 of the same order, LOW and HIGH apart. -0 is 0, NaN is large."""
    # the bound is a multiple of 16, so that a thread loads 16 bytes at once: to that end rows are read past their end
    score = tl.load(scores + offs_t, mask=offs_t < tl.minimum(tl.cdiv(last + 1, 16) * 16, rows.width), other=0.0)
    bits = (score.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    key = tl.maximum(tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), HIGH - 1), LOW + 1)
    if mask is not None:
        return tl.where(tl.load(mask + offs_t, mask=offs_t < rows.T, other=0) != 0, key, LOW)
    key = tl.where((offs_t < rows.sinks) | (offs_t > last - rows.recent), HIGH, key)
    return tl.where(offs_t <= last, key, LOW)


@triton.jit
def ends_of(keys):
    """The lowest key that is neither LOW nor HIGH, and the highest plus one; how many are not LOW, how many HIGH."""
    lo = tl.min(tl.where(keys > LOW, keys, HIGH))
    hi = tl.max(tl.where(keys < HIGH, keys, LOW)) + 1
    return lo, hi, tl.sum((keys > LOW).to(tl.int32)), tl.sum((keys == HIGH).to(tl.int32))


@triton.jit
def bisect(keys, want, lo, hi, many, few, SLACK: tl.constexpr):
    """Narrow lo < hi until the `many` keys >= lo are `want`, or no integer is between; `few` < want keys are >= hi.

    Stops as soon as no more than SLACK keys are between them.
    """
    if (many > want) & (lo < 0) & (hi > 0):
        n_above = tl.sum((keys >= 0).to(tl.int32))
        lo, many = tl.where(n_above >= want, 0, lo), tl.where(n_above >= want, n_above, many)
        hi, few = tl.where(n_above >= want, hi, 0), tl.where(n_above >= want, few, n_above)
    # keys of one sign differ by less than 2^31: the sign bit of a difference compares them and can be summed
    near = tl.maximum(tl.minimum(keys, hi), lo - 1)
    while (many > want) & (hi > lo + 1) & (many - few > SLACK):
        middle = lo + ((hi - lo) >> 1)
        n_above = keys.shape[0] - tl.sum(((near - middle).to(tl.uint32, bitcast=True) >> 31).to(tl.int32))
        enough = n_above >= want
        lo, many = tl.where(enough, middle, lo), tl.where(enough, n_above, many)
        hi, few = tl.where(enough, hi, middle), tl.where(enough, few, n_above)
    return lo, hi, many, few


@triton.jit
def store_flags(words, flags):
    """Pack flags [N] into words [N / 32] of 32, the first flag in the lowest bit."""
    bits = tl.reshape(flags.to(tl.int32), [flags.shape[0] // 32, 32]) << tl.arange(0, 32)[None, :]
    tl.store(words + tl.arange(0, flags.shape[0] // 32), tl.sum(bits, 1))


@triton.jit
def write_flagged(to, word, slot, start):
    """Write the slots whose flags are set to to[start], to[start + 1], ..., in order -> their number.

    word [N] of 32 flags, the first of which is slot [N]'s: one thread counts and writes the slots of a word.
    """
    n_set = word - ((word >> 1) & 0x55555555)
    n_set = (n_set & 0x33333333) + ((n_set >> 2) & 0x33333333)
    n_set = (((n_set + (n_set >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    at, slot = start + tl.cumsum(n_set, 0) - n_set, slot.to(to.dtype.element_ty)
    for j in tl.static_range(32):
        bit = (word >> j) & 1
        tl.store(to + at, slot + j, mask=bit != 0)
        at += bit
    return tl.sum(n_set)


@triton.jit
def write_slots(to, taken, words):
    """Write the slots whose `taken` [N] is true to to[0], to[1], ..., in order; words [N / 32] is scratch memory."""
    store_flags(words, taken)
    tl.debug_barrier()
    offs_w = tl.arange(0, taken.shape[0] // 32)
    write_flagged(to, tl.load(words + offs_w), offs_w * 32, 0)
