"""Huge pages for what lasts."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from mmap import PAGESIZE

import torch
from torch import Tensor

ADVICE = 14  # MADV_HUGEPAGE of Linux
LEAST = 1 << 17  # bytes: what is smaller shares its pages with others
HUGE = 1 << 21  # bytes of a huge page
LINE = 64  # bytes of a line of a cache: a tensor begins with one


def in_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages for a tensor on a CPU that lasts and was not written yet; returns it.

    Of a cache in pages of 4 KB every row of a list is in another page: to look these up took a third of the time of
    attention over the list, and a fifth of dense attention; a step's weights are read up to 3 % faster. (Not for what
    comes and goes: clearing a huge page takes most of a millisecond, and THP_MEM_ALLOC_ENABLE=1 of torch does it for
    every temporary tensor of 2 MB.)
    """
    if x.device.type == "cpu" and sys.platform == "linux" and type(x) is Tensor and x.nbytes >= LEAST:
        # all pages that it touches: a huge one may begin in a tensor and end in the next
        start, stop = x.data_ptr() // PAGESIZE * PAGESIZE, -(-(x.data_ptr() + x.nbytes) // PAGESIZE) * PAGESIZE
        # no more than advice: where there are none, nothing happens
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ADVICE)
    return x


class OnePiece:
    """Memory of a CPU for many tensors that last, side by side in huge pages, with no small ones between them."""

    def __init__(self, nbytes: Iterable[int]):
        """nbytes: of each of them."""
        size = sum(-(-n // LINE) * LINE for n in nbytes)
        memory = in_huge_pages(torch.empty(size + HUGE, dtype=torch.uint8))
        first = -memory.data_ptr() % HUGE
        self.left = memory[first : first + size]

    def take(self, like: Tensor) -> Tensor:
        """The next of them, of this shape and dtype, not filled."""
        mine, self.left = self.left[: like.nbytes], self.left[-(-like.nbytes // LINE) * LINE :]
        return mine.view(like.dtype).view(like.shape)
